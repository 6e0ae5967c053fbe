"""The fusions view: the user's source lettered by group, and per group what is inside, what it saved, why it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from tpu_lab import fusions
from tpu_lab.fusions import Group
from tpu_lab.ladder import Ladder, ladder, stablehlo_lines
from tpu_lab.metrics import Metrics
from tpu_lab.place import place
from tpu_lab.viz import frame, gutter, number, theme
from tpu_lab.viz.fusions_text import text
from tpu_lab.viz.view import INLINE_ROWS, View, template

SHOWN = 7  # groups of a table before the rest is folded
SORTS = {"time": "ns", "saved": "saved", "bytes": "bytes"}
TIMED = {"share": ", time by share", "measured": ", measured", "bound": ", ahead of time", "": ""}


def rows(groups: Sequence[Group]):
    """One row a group, in running order: group (its number), letter, compiler, launch, name (the compiler's), kind,
    phase, block, inside, ops, lines, bytes_in, bytes_out, unfused, saved, flops, ms, timing, why."""
    import pandas as pd

    return pd.DataFrame(
        {
            "group": range(len(groups)),
            "letter": [g.letter for g in groups],
            "compiler": [g.compiler for g in groups],
            "launch": [g.launch for g in groups],
            "name": [g.name for g in groups],
            "kind": [g.kind for g in groups],
            "phase": [g.phase for g in groups],
            "block": [g.block for g in groups],
            "inside": [g.words for g in groups],
            "ops": [list(g.ops) for g in groups],
            "lines": [[place(file, line) for file, line in g.lines] for g in groups],
            "bytes_in": [g.bytes_in for g in groups],
            "bytes_out": [g.bytes_out for g in groups],
            "unfused": [g.unfused for g in groups],
            "saved": [g.saved for g in groups],
            "flops": [g.flops for g in groups],
            "ms": [None if g.ns is None else g.ns / 1e6 for g in groups],
            "timing": [g.timing for g in groups],
            "why": [g.why for g in groups],
        }
    )


@dataclass(frozen=True)
class Row:
    """All groups of one letter, their figures summed over the step."""

    letter: str
    paint: str
    words: str
    times: int  # how many groups wear the letter
    why: str
    ops: int
    saved: str
    time: str
    ns: float
    tip: str


@dataclass(frozen=True)
class Table:
    """One compiler's groups."""

    label: str
    note: str
    head: str  # of the time column
    shown: tuple[Row, ...]
    rest: tuple[Row, ...]
    more: str  # the fold's sentence
    cut: int  # rows that do not fit even there


@dataclass(frozen=True)
class Rungs:
    row: Row
    steps: str
    ladder: Ladder


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    hint: str = ""
    compilers: tuple[str, ...] = ()
    listings: tuple = ()
    units: tuple = ()  # by compiler: (unit of the line costs, ns in one, longest)
    tables: tuple[Table, ...] = ()
    rungs: tuple[Rungs, ...] = ()
    foot: str = ""
    broad: bool = False  # some letters are two
    per: str = ""  # " a step"

    @property
    def chips(self) -> tuple[str, ...]:
        """Short names of the compilers' targets: CPU, v6e."""
        return tuple(name.replace(":", " ").split()[-1] for name in self.compilers)


def draw(
    m: Metrics,
    limit: int | None = None,
    sort: str | None = None,
    groups: Sequence[Group] | None = None,
    right: Sequence[Group] = (),
    note: str = "",
) -> View:
    """limit: groups of a table before a fold; sort: time, saved or bytes instead of running order.

    groups: the left side's, when somebody measured them. right: another compiler's groups of the same ops, drawn in
    gutters of their own right of the code; note: what the line of provenance says of them.
    """
    if sort is not None and sort not in SORTS:
        raise ValueError(f"the fusions view sorts by {', '.join(SORTS)}, not by {sort!r}")
    cache: dict = {}

    def made() -> tuple[Group, ...]:
        if "groups" not in cache:
            cache["groups"] = tuple(groups) if groups is not None else fusions.of(m)
        return cache["groups"]

    def model() -> Model:
        if "model" not in cache:
            cache["model"] = _model(m, made(), tuple(right), note, limit, sort)
        return cache["model"]

    title, finding = _title(m, made(), tuple(right))
    return View(
        "fusions", title, finding, lambda: rows([*made(), *right]), lambda: text(model()),
        lambda: template("fusions.html", v=model()),
    )  # fmt: skip


def _alone(m: Metrics) -> bool:
    """Each op was a launch of its own: nothing could be joined."""
    launches = m.launches_in(m.span)
    return bool(launches) and all(r.mode in ("strict", "debug") for r in launches)


def _title(m: Metrics, groups: tuple[Group, ...], right: tuple[Group, ...]) -> tuple[str, str]:
    """(title, finding)."""
    if why := frame.nothing(m):
        return why, why[0].lower() + why[1:]
    launches = m.launches_in(m.span)
    ran = len({i for r in launches for i in r.ops})
    if _alone(m):
        title = f"{number.plural(ran, 'op')} ran as {number.plural(len(launches), 'launch', 'launches')}: {launches[0].mode} mode joins nothing"
        return title, f"none: {launches[0].mode} mode runs each op by itself"
    own = fusions.users(groups)
    if not own:
        return "No program text to read fusions from", "no program text"
    if right:
        other = fusions.users(right)
        return (
            f"{other[0].compiler if other else 'The other'} makes {number.plural(len(other), 'group')} of this {'step' if m.steady else 'run'}, {own[0].compiler} {number.count(len(own))}",
            f"{number.plural(len(own), 'group')} here, {number.count(len(other))} there",
        )
    saved, unfused = sum(g.saved for g in own), sum(g.unfused for g in own)
    ops, stepping = len(m.ops_in(m.span)) or ran, sum(g.phase == "optimizer" for g in own)
    made = f"{number.plural(ops, 'op')} run as {number.plural(len(own), 'group')}"
    if len(own) > ops and 0 < stepping < len(own):  # one op of an optimizer works on every weight
        made += f", {number.count(stepping)} of them the optimizer's"
    if not saved:
        return f"{made}; no bytes were saved", f"{number.plural(len(own), 'group')}, no bytes saved"
    gain = f"{number.size(saved)} of {number.size(unfused)}"
    return (
        f"{made}: fusing saves {gain}{' a step' if m.steady else ''}",
        f"{number.plural(len(own), 'group')} save {gain}",
    )


def _hint(m: Metrics, groups: tuple[Group, ...]) -> str:
    if frame.nothing(m):
        return frame.nothing_hint(m)
    if _alone(m):
        return (
            'In fused mode the compiler sees all ops of a step at once: tpu_lab.profile(step, mode="fused"). '
            "What it makes of single ops here is in p.fusions.rows."
        )
    if any(g.ops for g in groups):
        return ""
    if not m.launches_in(m.span):
        return "Nothing was launched in the drawn step: its ops wait for a value that somebody reads."
    if m.trace.programs:
        return "The programs of this step were dropped, as the trace was full: give profile() a larger limit=."
    return "The texts of its programs were not kept with it: profile again, and look at p.fusions in the same process."


def _model(m: Metrics, groups, right, note, limit, sort) -> Model:
    title = _title(m, groups, right)[0]
    if hint := _hint(m, groups):
        return Model(title, tuple(frame.provenance(m)), hint)
    records = {r.index: r for r in m.trace.ops}
    sides = [side for side in (fusions.users(groups), fusions.users(right)) if side]
    first, alike = fusions.modules_alike(groups)
    meta: list[tuple[str, bool]] = [(str(m.trace.meta["name"]), False)] if m.trace.meta.get("name") else []
    if alike:
        meta.append((f"{first} of {alike} alike", False))
    meta.append(("CAPITALS forward, small letters backward, numbers the optimizer, in running order", False))
    meta += [piece for piece in frame.provenance(m) if piece[1] or piece[0].startswith("XLA")]
    if note:
        meta.append((note, False))
    listings = gutter.listings(sides, records, first)
    units = []
    for side in range(len(sides)):
        longest = max((sum(line.costs[side]) for f in listings for line in f.lines), default=0.0)
        unit, ns = number.time_unit(longest or 1e6)
        units.append((unit, ns, longest))
    tables = [_table(list(side), limit, sort, "a step, " if m.steady else "") for side in (groups, right) if side]
    foot = "saved: bytes written and read again if each op ran alone, minus this group\u2019s own"
    if any(g.timing == "share" for g in groups):
        foot += " \u00b7 time: a group\u2019s share of its launch, by FLOPs and bytes"
    if any(g.timing == "measured" for g in groups):
        foot += " \u00b7 time: measured in a replay; groups can run side by side"
    if any(g.timing == "bound" for g in right):
        foot += " \u00b7 \u2265: no faster than the chip\u2019s FLOP/s and bytes/s allow"
    return Model(
        title, tuple(meta), "", tuple(side[0].compiler for side in sides), tuple(listings), tuple(units), tuple(tables),
        _rungs(m, groups, records, tables[0]), foot, any(len(g.letter) > 1 for side in sides for g in side),
        " a step" if m.steady else "",
    )  # fmt: skip


def _table(groups: list[Group], limit: int | None, sort: str | None, per: str) -> Table:
    by_letter: dict[str, list[Group]] = {}
    for g in groups:
        by_letter.setdefault(g.letter, []).append(g)
    added = by_letter.pop("", [])
    heaviest = max((sum(g.ns or 0.0 for g in same) for same in by_letter.values()), default=0.0)
    unit, ns = number.time_unit(heaviest or 1e6)
    size, nbytes = number.size_unit(max((sum(g.saved for g in same) for same in by_letter.values()), default=1 << 20))

    def row(same: list[Group]) -> Row:
        g, total = same[0], sum(x.ns or 0.0 for x in same)
        timed = [x for x in same if x.ns is not None]
        return Row(
            g.letter, theme.paint(g.kind), g.words, len(same), g.why, sum(len(x.ops) for x in same),
            number.sig(sum(x.saved for x in same) / nbytes), number.sig(total / ns) if timed else number.NONE, total, gutter.tip(g),
        )  # fmt: skip

    every = [row(same) for same in by_letter.values()]
    weight = {"time": lambda s: sum(g.ns or 0.0 for g in s), "saved": lambda s: sum(g.saved for g in s),
              "bytes": lambda s: sum(g.bytes_in + g.bytes_out for g in s)}[sort or "time"]  # fmt: skip
    order = sorted(range(len(every)), key=lambda i: -weight(list(by_letter.values())[i]))
    chosen = order[: limit or SHOWN]
    if len(every) - len(chosen) == 1:
        chosen = order
    rest = [i for i in range(len(every)) if i not in set(chosen)]
    shown = [every[i] for i in (chosen if sort else sorted(chosen))]
    if added:
        copies = row(added)
        extra = Row("", "", "copy that the compiler adds", len(added), copies.why, 0, copies.saved, copies.time, copies.ns, "")  # fmt: skip
        every.append(extra)
        rest.append(len(every) - 1)
    folded = sum(every[i].ns for i in rest)
    bound, least = any(g.timing == "bound" for g in groups), "\u2265 "
    hidden = sum(every[i].times for i in rest) - len(added)  # what the compiler adds is no group, see fusions.users
    counts = [number.plural(hidden, "more group")] if hidden else []
    counts += [number.plural(len(added), "copy the compiler adds", "copies the compiler adds")] if added else []
    more = f"{' and '.join(counts)}, {least if bound else ''}{number.time(folded)}" if rest else ""
    what = "roofline bound" if bound else "time"
    timing = next((g.timing for g in groups if g.timing), "")
    return Table(
        groups[0].compiler + TIMED[timing], f"{per}saved in {size}, {what} in {unit}", least + unit if bound else unit,
        tuple(shown), tuple(every[i] for i in rest[:INLINE_ROWS]), more, max(0, len(rest) - INLINE_ROWS),
    )  # fmt: skip


def _rungs(m: Metrics, groups, records, table: Table) -> tuple[Rungs, ...]:
    """Ladders of the shown groups of the side that ran, each letter's first group."""
    launches = {r.index: r for r in m.launches_in(m.span)}
    lowered: dict[str, dict] = {}
    out = []
    for row in table.shown[: SHOWN + 1]:
        g = next(g for g in groups if g.letter == row.letter)
        launch = launches.get(g.launch)
        module = fusions.module_of(m, launch) if launch else None
        if launch is None or module is None:
            continue
        if launch.key not in lowered:
            lowered[launch.key] = {}
            with contextlib.suppress(LookupError):  # a profile read from a file holds the text of few programs
                lowered[launch.key] = _lowered(m.trace.programs[launch.key])
        made = ladder(g, launch, records, module, lowered[launch.key])
        out.append(Rungs(row, f"{number.plural(len(g.ops), 'op')} to {g.name}", made))
    return tuple(out)


def _lowered(program) -> dict[int, list[str]]:
    """Lines of its StableHLO by op; none for a program read from a file that was written without."""
    try:
        return stablehlo_lines(program.stablehlo())
    except LookupError:
        return {}
