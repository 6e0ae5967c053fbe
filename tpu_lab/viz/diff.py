"""The diff view: two profiles of the same work, what changed, and what of it is above noise."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tpu_lab.difference import (
    Difference,
    LineChange,
    OpChange,
    Quantity,
    arrow,
    compare,
    counted,
    mean_split,
    mode,
    noise,
    write,
)
from tpu_lab.metrics import Metrics
from tpu_lab.place import place
from tpu_lab.viz import frame, number
from tpu_lab.viz.view import View, template

LINES = 8  # source lines before the fold
OPS = 6  # ops that only one has, a side
PAINTS = {
    "compile": ("compile",),
    "device": ("matmul", "other"),
    "transfer": ("move",),
    "dispatch": ("dispatch",),
    "Python": ("python",),
    "idle": ("idle",),
}
GLYPH = {"compile": "x", "matmul": "\u2588", "other": "/", "move": ":", "dispatch": "\u2593", "python": "-", "idle": "."}
STYLE = {"compile": "miss", "matmul": "matmul", "other": "other", "move": "move", "dispatch": "host"}
WAY = {"forward": "\u2192 fwd", "backward": "\u2190 bwd", "optimizer": "optimizer"}


def rows(d: Difference):
    """One row a figure, a source line or an op: part (quantity, line, op), name, file, line, phase, before, after, unit
    (ns, count, bytes, FLOP, share), changed."""
    import pandas as pd

    unit = {"time": "ns", "size": "bytes", "work": "FLOP", "share": "share", "count": "count"}
    out = [
        {"part": "quantity", "name": q.name, "before": q.before, "after": q.after, "unit": unit[q.kind], "changed": q.changed}
        for q in d.quantities
    ]
    for c in d.lines:
        out.append(
            {"part": "line", "name": c.code, "file": c.file, "line": c.line, "phase": c.phase, "before": c.ns[0], "after": c.ns[1],
             "unit": "ns", "changed": c.ops[0] != c.ops[1]}
        )  # fmt: skip
    for o in d.ops:
        before, after = (o.count, 0) if o.side == "before" else (0, o.count)
        out.append(
            {"part": "op", "name": o.name, "file": o.file, "line": o.line, "phase": o.phase, "before": before, "after": after,
             "unit": "count", "changed": True}
        )  # fmt: skip
    columns = ["part", "name", "file", "line", "phase", "before", "after", "unit", "changed"]
    return pd.DataFrame(out, columns=columns).astype({"line": "Int64"})


@dataclass(frozen=True)
class Segment:
    share: float
    paint: str
    tip: str


@dataclass(frozen=True)
class Side:
    """One profile's typical step as a bar."""

    name: str
    mode: str
    width: float  # percent of the longer
    segments: tuple[Segment, ...]
    time: tuple[str, str]
    around: str
    label: str


@dataclass(frozen=True)
class Row:
    """A figure of both, as it is written."""

    name: str
    before: str
    after: str
    change: str
    changed: bool
    paints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    place: str
    code: str
    way: str
    ops: str
    ops_changed: bool
    before: str
    after: str
    change: str


@dataclass(frozen=True)
class Only:
    """What one side runs and the other does not."""

    words: str
    ops: tuple[tuple[str, str], ...]
    more: str


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    sides: tuple[Side, ...]
    parts: tuple[Row, ...]
    rows: tuple[Row, ...]
    unit: str
    lines: tuple[Line, ...]
    others: Line | None
    only: tuple[Only, ...]
    foot: str
    hint: str = ""


def draw(before: Metrics, after: Metrics) -> View:
    """The view of two profiles' metrics."""
    d = compare(before, after)
    model = _model(d)
    return View("diff", d.title, d.title, lambda: rows(d), lambda: _text(model), lambda: template("diff.html", v=model))


def _model(d: Difference) -> Model:
    a, b = d.before, d.after
    empty = [name for name, m in (("first", a), ("second", b)) if frame.nothing(m)]
    if empty:
        hint = frame.nothing_hint(a if empty[0] == "first" else b)
        return Model(d.title, (), (), (), (), "", (), None, (), "", hint)
    unit, factor = number.time_unit(max([abs(t) for c in d.lines for t in c.ns], default=1.0) or 1.0)
    shown = d.lines[:LINES] if any(t for c in d.lines for t in c.ns) else ()
    rest = d.lines[len(shown) :] if shown else ()
    named = [q for q in d.quantities if q.name not in PAINTS]
    times = d.quantities[0].spread
    assert times is not None
    limit = noise(*times)
    told = (
        f"a time counts as changed from \u00b1 {number.percent(limit, 2)} on: when the middle halves of the steps do not touch"
        if limit is not None
        else "fewer than three steps on a side: no time can be told from noise"
    )
    return Model(
        d.title, tuple(_meta(a, b)), _sides(a, b), tuple(_part(q) for q in d.quantities if q.name in PAINTS and (q.before or q.after)),
        tuple(_row(q) for q in named if q.before or q.after),
        unit, tuple(_line(c, factor) for c in shown), _others(rest, factor), tuple(_only(d.ops, side) for side in ("before", "after")),
        f"mean \u00b1 its standard error; {told}; a line\u2019s time is its ops\u2019 share of their launches",
    )  # fmt: skip


def _meta(a: Metrics, b: Metrics) -> list[tuple[str, bool]]:
    """What both have in common once, what differs for each."""
    sides = [[text for text, _ in frame.provenance(m)] for m in (a, b)]
    common = [text for text in sides[0] if text in sides[1]]
    own = [[text for text in side if text not in common] for side in sides]
    out = [(text, False) for text in common]
    for name, words in zip(("before", "after"), own, strict=True):
        if words:
            out.append((f"{name}: {', '.join(words)}", True))
    return out


def _sides(a: Metrics, b: Metrics) -> tuple[Side, ...]:
    longest = max(mean_split(m).total for m in (a, b)) or 1.0
    return tuple(_side(name, m, longest) for name, m in (("before", a), ("after", b)))


def _side(name: str, m: Metrics, longest: float) -> Side:
    split = mean_split(m)
    matmul = m.matmul_share if m.ops_time.sum() else 1.0
    segments = []
    for part, ns in split.parts():
        if part == "device":
            both = ((matmul, "matmul", "device, matmul"), (1 - matmul, "other", "device, other"))
            segments += [Segment(ns * s / (split.total or 1), p, f"{w}: {number.time(ns * s)}") for s, p, w in both if ns * s > 0]
        elif ns > 0:
            segments.append(Segment(ns / split.total, PAINTS[part][0], f"{part}: {number.time(ns)}"))
    mean, error = number.mean_error(s.ns for s in counted(m))  # as the report has it
    pair = number.time_pair(mean)
    around = ""
    if error is not None:
        around = f"\u00b1 {number.error_like(error, mean, number.time_unit(mean)[1])}, n = {len(counted(m))}"
    label = f"{name}: {number.time(split.total)}, of it " + ", ".join(f"{p} {number.time(ns)}" for p, ns in split.parts() if ns > 0)
    return Side(name, mode(m), 100 * split.total / longest, tuple(segments), pair, around, label)


def _part(q: Quantity) -> Row:
    before, _, after = arrow(q).partition(" \u2192 ")
    return Row(q.name, before, after, "", q.changed, PAINTS[q.name])


def _row(q: Quantity) -> Row:
    return Row(q.name, write(q.kind, q.before), write(q.kind, q.after), _change(q), q.changed)


def _change(q: Quantity) -> str:
    """`−742` for counts, `−24%` for what has a size; what is not above noise says so."""
    if q.before is None or q.after is None or q.before == q.after:
        return ""
    if q.kind == "time" and q.spread is not None and not q.changed:
        return "not above noise" if noise(*q.spread) is not None else "noise not known"
    if q.kind == "share" and not q.changed:
        return "not above noise"
    gap = q.after - q.before
    sign = "+" if gap > 0 else "\u2212"
    if q.kind == "count":
        return f"{sign}{number.count(int(abs(gap)))}"
    if not q.before:
        return ""
    times = q.after / q.before
    return f"{number.sig(times)}\u00d7" if times >= 2 else f"{sign}{number.percent(abs(gap) / q.before)}"


def _signed(ns: float, factor: float) -> str:
    text = number.sig(abs(ns) / factor)
    return text if text == "0" else f"{'+' if ns > 0 else chr(0x2212)}{text}"


def _line(c: LineChange, factor: float) -> Line:
    same = c.ops[0] == c.ops[1]
    ops = number.count(c.ops[0]) if same else f"{number.count(c.ops[0])} \u2192 {number.count(c.ops[1])}"
    return Line(
        place(c.file, c.line) or number.NONE, c.code, WAY.get(c.phase, ""), ops, not same,
        number.sig(c.ns[0] / factor), number.sig(c.ns[1] / factor), _signed(c.ns[1] - c.ns[0], factor),
    )  # fmt: skip


def _others(rest: tuple[LineChange, ...], factor: float) -> Line | None:
    if not rest:
        return None
    before, after = (sum(c.ns[i] for c in rest) for i in (0, 1))
    ops = [sum(c.ops[i] for c in rest) for i in (0, 1)]
    words = number.count(ops[0]) if ops[0] == ops[1] else f"{number.count(ops[0])} \u2192 {number.count(ops[1])}"
    return Line(
        f"{number.count(len(rest))} others", "", "", words, False, number.sig(before / factor), number.sig(after / factor),
        _signed(after - before, factor),
    )  # fmt: skip


def _only(ops: tuple[OpChange, ...], side: str) -> Only:
    own = [o for o in ops if o.side == side]
    total = sum(o.count for o in own)
    words = f"Only {side}: {number.plural(total, 'op')}" if own else f"Only {side}: none"
    shown = tuple((o.name + (f" \u00d7{number.count(o.count)}" if o.count > 1 else ""), place(o.file, o.line) or o.phase) for o in own[:OPS])
    rest = sum(o.count for o in own[OPS:])
    return Only(words, shown, f"{number.plural(rest, 'other')}, in .rows" if rest else "")


# --- the terminal -----------------------------------------------------------------------------------------------------


def _text(v: Model) -> list:
    out: list = [[(line, "b")] for line in textwrap.wrap(v.title, 98)] + frame.meta_lines(v.meta)[:2]
    if v.hint:
        out += [[], [v.hint]]
    if not v.sides:
        return out
    out.append([])
    for s in v.sides:
        wide = max(1, round(60 * s.width / 100))
        bar = [(GLYPH[x.paint] * max(1, round(wide * x.share)), STYLE.get(x.paint, "")) for x in s.segments]
        out.append([f"  {s.name:<7}{s.mode:<9}", *bar, f"  {' '.join(s.time)} {s.around}"])
    words = "   ".join(f"{'/'.join(GLYPH[p] for p in r.paints)} {r.name} {r.before} \u2192 {r.after}" for r in v.parts)
    out += [[(f"  {line}", "dim")] for line in textwrap.wrap(words.replace(number.NBSP, "\u00a0"), 96)[:2]]
    out += [[], [(f"  {'':<26}{'before':>14}{'after':>14}   change", "dim")]]
    for r in v.rows:
        out.append([f"  {r.name:<26}{r.before:>14}", (f"{r.after:>14}", "b" if r.changed else ""), f"   {r.change}"])
    if v.lines:
        out += [[], [(f"  {'line':<58}{'ops':>12}{v.unit:>8}{'after':>8}{'change':>9}", "dim")]]
        for x in v.lines[:2]:
            name = f"{x.place}  {x.way}  {x.code}"
            out.append([f"  {name[:56]:<58}{x.ops:>12}{x.before:>8}{x.after:>8}{x.change:>9}"])
    if any(o.ops for o in v.only):
        out.append([])
        for o in v.only:
            if o.ops:
                names = ", ".join(f"{name} ({where})" for name, where in o.ops[:4])
                out.append([(f"  {o.words}", "b"), f": {names}"])
    return out
