"""The TPU compiler's view: does it fit, whose bytes are where, what padding costs, and a bound that is no prediction.

Drawn from a `Compiled` (tpu_lab/aot.py). Sizes and layouts are the compiler's; a bound wears a `≥`; nothing ran.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpu_lab import padding
from tpu_lab.viz import number
from tpu_lab.viz.view import View, template

if TYPE_CHECKING:
    from tpu_lab.aot import Compiled

GIB, MIB = 1 << 30, 1 << 20
ROWS, FOLDED = 6, 40  # kinds of buffers before the fold, and at most in it
COLUMNS = "program name space kind owner what op module file line shape layout logical held fullest".split()
OUT_OF = re.compile(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)")


@dataclass(frozen=True)
class Bar:
    """A line of "does it fit": share of the axis; over: it runs out over the limit."""

    name: str
    share: float
    words: str
    over: bool


@dataclass(frozen=True)
class Segment:
    """Part of a memory's bar."""

    paint: str
    letter: str
    words: str
    size: str
    share: float
    tip: str


@dataclass(frozen=True)
class Space:
    """One memory."""

    name: str
    caption: str
    unit: str
    segments: tuple[Segment, ...]
    label: str


@dataclass(frozen=True)
class Row:
    """A kind of buffer in the table of padding."""

    what: str
    place: str  # "model.py:45"
    where: str
    shape: str
    layout: str
    useful: float  # share of the longest bar
    wasted: float
    logical: str
    held: str
    factor: str
    tip: str


@dataclass(frozen=True)
class Model:
    """All that the template and the text need, in words."""

    title: str
    meta: tuple
    facts: tuple
    fit: tuple[Bar, ...]
    ticks: tuple[tuple[str, float], ...]
    limit: tuple[str, float]
    spaces: tuple[Space, ...]
    section: str  # what the table is about
    unit: str  # of the table
    rows: tuple[Row, ...]
    more: tuple[Row, ...]
    more_words: str
    tile: padding.Tile | None
    tile_words: tuple[str, str, str]
    advice: tuple[str, str]
    say: str
    foot: tuple[str, str]


def draw(compiled: Compiled, limit: int | None = None, sort: str | None = None) -> View:
    """limit: kinds of buffers before the fold. `view.rows` is every buffer of HBM and VMEM."""
    made: list[Model] = []

    def model() -> Model:
        if not made:
            made.append(_model(compiled, limit or ROWS))
        return made[0]

    from tpu_lab.viz import v6e_text

    return View(
        "v6e", title(compiled), title(compiled), lambda: rows(compiled), lambda: v6e_text.lines(model()),
        lambda: template("v6e.html", v=model()),
    )  # fmt: skip


def said(sentence: str) -> View:
    """A view for when there is nothing to draw: it says why."""
    import pandas as pd

    head, _, rest = sentence.partition(": ")
    page = template("said.html", title=head, rest=rest)
    return View("v6e", head, sentence, lambda: pd.DataFrame(columns=COLUMNS), lambda: [[(head, "b")], [rest]], lambda: page)


def rows(compiled: Compiled):
    """One row a buffer, largest first; bytes."""
    import pandas as pd

    out = []
    for n, part in enumerate(compiled.parts):
        for b in part.placed.buffers if part.placed else ():
            out.append((
                n, b.name, b.space, b.kind, b.owner, b.what, b.op, b.module, b.file, b.line, b.shape, b.layout,
                b.logical, b.held, b.fullest,
            ))  # fmt: skip
    return pd.DataFrame(out, columns=COLUMNS)


def advice(c: Compiled) -> tuple[str, str]:
    """(the act, its reason): the one thing that the view says to try."""
    from tpu_lab.viz import v6e_parts as parts

    return parts.advice(c, *_worst(c.kinds if c.fits else _held(c)))


def _worst(kinds: list[padding.Kind]) -> tuple[padding.Kind | None, padding.Tile | None]:
    """The kind of buffers that wastes most, and how a tile of it is filled when that is much."""
    worst = next((k for k in sorted(kinds, key=lambda k: -k.waste) if k.waste and padding.tile(k.shape, k.layout)), None)
    return worst, padding.tile(worst.shape, worst.layout) if worst and worst.factor > 1.05 else None


def title(c: Compiled) -> str:
    """The finding: does it fit, and how much of what it holds is padding."""
    chip = f"one device of {c.target.name}" if c.main.whole else c.target.name
    need, room = asked(c), c.target.hbm
    if not c.fits:
        return f"Does not fit in {chip}: {gib(need)} GiB of HBM needed, {gib(room)} GiB there"
    share = need / room
    if share < 0.5:
        head = f"Fits in {chip} with room to spare"
    elif share < 0.9:
        head = f"Fits in {chip}: {number.percent(share, 2)} of its HBM"
    else:
        head = f"Only just fits in {chip}: {number.percent(share, 2)} of its HBM"
    kinds = c.kinds
    held, waste = sum(k.held for k in kinds), sum(k.waste for k in kinds)
    if not held or waste / held < 0.05:
        return head + "; next to nothing of what it holds is padding"
    part = waste / held
    words = "half" if 0.45 < part < 0.55 else f"{number.percent(part, 2)}"
    return f"{head}; but {words} of what it holds is padding"


def asked(c: Compiled) -> int:
    """Bytes of HBM that the largest program needs: by its buffers, else by the compiler's own message."""
    if c.hbm:
        return c.hbm
    for part in c.parts:
        if match := OUT_OF.search(part.answer.refused):
            return number_of(match[1])
    return 0


def number_of(text: str) -> int:
    """`39.67G` as the compiler writes it -> bytes."""
    return int(float(text.rstrip("KMGT")) * 1024 ** (" KMGT".index(text[-1]) if text[-1] in "KMGT" else 0))


def gib(nbytes: float) -> str:
    return number.sig(nbytes / GIB)


def _held(c: Compiled) -> list[padding.Kind]:
    """What is in HBM when it is fullest: of a program that does not fit, the reason."""
    placed = c.main.placed
    return padding.kinds(b for b in placed.buffers if b.fullest and b.space == "HBM") if placed else []


def _model(c: Compiled, limit: int) -> Model:
    from tpu_lab.viz import v6e_parts as parts

    kinds = c.kinds if c.fits else _held(c)
    shown = parts.chosen(kinds, limit) if c.fits else kinds[:limit]
    rest = [k for k in kinds if k not in shown]
    name, factor = number.size_unit(max((k.held for k in shown), default=MIB))
    longest = max((k.held for k in shown), default=1)
    worst, tile = _worst(kinds)
    count = sum(len(p.placed.buffers) for p in c.parts if p.placed)
    return Model(
        title(c), parts.meta(c), parts.facts(c), *parts.fit(c, asked(c)), parts.spaces(c),
        "What padding costs" if c.fits else "What is largest when HBM is fullest", name,
        tuple(parts.row(k, longest, factor) for k in shown), tuple(parts.row(k, longest, factor) for k in rest[:FOLDED]),
        f"{number.plural(len(rest), 'other kind')} of buffers, {number.size(sum(k.held for k in rest))} held" if rest else "",
        tile, parts.tile_words(tile), parts.advice(c, worst, tile),
        "" if count else "The compiler left no text of this program, so there are no buffers to show.",
        (parts.sources(c), f"every buffer: .rows, a DataFrame of {number.count(count)}"),
    )  # fmt: skip
