"""The ops view: every ATen call in order, with shapes, module, line, way, time, FLOPs and bytes."""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass

import numpy as np

from tpu_lab import fusions
from tpu_lab.metrics import Metrics
from tpu_lab.place import block, numbered, op_name, place, short_file
from tpu_lab.viz import frame, number, theme
from tpu_lab.viz.view import INLINE_ROWS, View, template

HEAVY = 9  # rows shown for their time, besides the first ones and the last
SORTS = {"time": "device_ms", "bytes": "bytes", "flops": "flops"}


def rows(m: Metrics, part: slice = slice(None), lettered: bool = True):
    """One row an op, of all or of a part of the trace: op (its number), name, result, inputs, static, kind, module, file, line, code, phase, forward,
    step, launch, fusion (the letter of its group in the drawn step), device_ms (its share of its launch), flops, bytes, fallback,
    host_us, at_ms (since the start). lettered: False leaves `fusion` empty and the compiler's text unread."""
    import pandas as pd

    ops, trace, letters = m.trace.ops[part], m.trace, fusions.letter_of(m) if lettered else {}
    step = np.zeros(len(trace.ops), dtype=np.int64)
    for s in m.steps:
        step[slice(*s.ops)] = s.number
    launch = np.array([r.index for r in trace.launches] + [-1], dtype=np.int64)[m.ops_launch[part]]
    return pd.DataFrame(
        {
            "op": [r.index for r in ops],
            "name": [op_name(r.name) for r in ops],
            "result": [avals(r.outputs) for r in ops],
            "inputs": [avals(r.inputs) for r in ops],
            "static": [", ".join(r.static) for r in ops],
            "kind": [r.kind for r in ops],
            "module": [r.module for r in ops],
            "file": [short_file(r.file) for r in ops],
            "line": [r.line for r in ops],
            "code": [r.code for r in ops],
            "phase": [r.phase for r in ops],
            "forward": pd.array([r.forward for r in ops], dtype="Int64"),
            "step": step[part],
            "launch": pd.array([v if v >= 0 else None for v in launch.tolist()], dtype="Int64"),
            "fusion": [letters.get(r.index, "") for r in ops],
            "device_ms": m.ops_time[part] / 1e6,
            "flops": [r.flops for r in ops],
            "bytes": [r.bytes for r in ops],
            "fallback": [r.fallback for r in ops],
            "host_us": [(r.host_ns or r.record_ns) / 1e3 for r in ops],
            "at_ms": [(r.time_ns - trace.start_ns) / 1e6 for r in ops],
        }
    )


def avals(texts: tuple[str, ...]) -> str:
    """`f32[8,64,1] x2` for equal neighbours; long lists end in how many there are."""
    out: list[list] = []
    for text in texts:
        if out and out[-1][0] == text:
            out[-1][1] += 1
        else:
            out.append([text, 1])
    words = [t if n == 1 else f"{t} \u00d7{n}" for t, n in out]
    if len(words) <= 3:
        return ", ".join(words)
    dtypes = {t.split("[")[0] for t, _ in out}
    return (
        f"{dtypes.pop()}[\u2026] \u00d7{len(texts)}"
        if len(dtypes) == 1
        else f"{', '.join(words[:2])}, \u2026 {len(texts)} in all"
    )


@dataclass(frozen=True)
class Line:
    """One op as the page and the terminal print it."""

    op: int
    name: str
    result: str
    inputs: str
    module: str
    place: str
    way: str
    forward: str
    paint: str
    word: str
    time: str
    share: float  # of the longest bar
    flops: str
    bytes: str
    tip: str
    letter: str


@dataclass(frozen=True)
class Fold:
    """Rows that are folded to one sentence with their sums."""

    words: str
    first: int
    last: int
    time: str
    flops: str
    bytes: str
    lines: tuple[Line, ...]
    more: int


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    items: tuple  # of Line and Fold, in order
    units: tuple[str, str, str]
    foot: tuple[str, str]
    hint: str = ""


def draw(m: Metrics, limit: int | None = None, sort: str | None = None) -> View:
    """limit: how many rows before a fold (or in a sorted table); sort: time, bytes or flops instead of program order."""
    if sort is not None and sort not in SORTS:
        raise ValueError(f"the ops view sorts by {', '.join(SORTS)}, not by {sort!r}")

    @functools.cache
    def model(lettered: bool) -> Model:
        return _model(m, limit, sort, lettered)

    title = _title(m)
    return View(
        "ops", title, _finding(m), lambda: rows(m), lambda: _text(model(False)), lambda: template("ops.html", v=model(True))
    )


def _finding(m: Metrics) -> str:
    if why := frame.nothing(m):
        return why[0].lower() + why[1:]
    ops = m.ops_in(m.span)
    known = sum(1 for o in ops if o.module and o.file)
    return f"{number.count(len(ops))}{' a step' if m.steady else ''}, of which {number.count(known)} carry a module and a line"


def _title(m: Metrics) -> str:
    if why := frame.nothing(m):
        return why
    ops = m.ops_in(m.span)
    if not ops:
        return (
            f"{number.plural(len(m.trace.launches), 'launch', 'launches')} of compiled graphs, no op called by itself"
        )
    times = m.ops_time[slice(*m.span.ops)]
    head = f"{number.plural(len(ops), 'op')} in order"
    if not times.sum():
        return f"{head}; no device time was measured"
    by_kind: dict[str, list[float]] = {}
    for op, t in zip(ops, times):
        by_kind.setdefault(op.kind, []).append(float(t))
    kind, spent = max(by_kind.items(), key=lambda item: sum(item[1]))
    share = number.sig(100 * sum(spent) / times.sum(), 2)
    what = {"matmul": "matmul", "movement": "data movement", "reduce": "reduction", "host": "op on the host"}.get(
        kind, f"{kind} op"
    )
    if kind == "movement":
        return f"{head}; {number.plural(len(spent), 'op')} that move data take {share}% of the device time"
    return f"{head}; {number.plural(len(spent), what)} take{'s' if len(spent) == 1 else ''} {share}% of the device time"


def _model(m: Metrics, limit, sort, lettered: bool) -> Model:
    table = rows(m, slice(*m.span.ops), lettered)
    if not len(table):
        hint = (
            frame.nothing_hint(m)
            if frame.nothing(m)
            else "A compiled graph is one launch; its ops are inside the program."
        )
        return Model(_title(m), tuple(frame.provenance(m)), (), ("ms", "MFLOP", "MiB"), ("", ""), hint)
    meta: list[tuple[str, bool]] = []
    if m.steady:
        meta.append((f"step {m.span.number} of {len(m.steps)}, a steady one", False))
    if m.trace.meta.get("mode"):
        meta.append((m.trace.meta["mode"], True))
    if m.trace.meta.get("compiler"):
        meta.append((m.trace.meta["compiler"], False))
    meta.append(("time of an op is its share of its launch, by FLOPs and bytes", False))
    chosen = _chosen(table, limit, sort)
    unit = number.time_unit(1e6 * float(table.device_ms.max())) if table.device_ms.max() else ("ms", 1e6)
    work, size = number.work_unit(float(table.flops.max())), number.size_unit(float(table.bytes.max()))
    longest = float(table.device_ms.max()) or 1.0
    records = list(table.itertuples(index=False))
    forwards = dict(zip(table.op.tolist(), table.forward.fillna(-1).tolist()))

    def line(r) -> Line:
        t, forward = r.device_ms * 1e6 / unit[1], forwards[int(r.op)]
        free = r.kind == "view"
        module = r.module or ("optimizer" if r.phase == "optimizer" else "")
        tip = f"{r.name}: {'free' if free else number.time(r.device_ms * 1e6)}"
        return Line(
            int(r.op), r.name, r.result, f"({r.inputs})", module, place(r.file, r.line), frame.WAY.get(r.phase, ("", ""))[0],
            f"of {number.count(forward)}" if forward >= 0 else "",
            theme.paint(r.kind), theme.word(r.kind), number.NONE if free else number.sig(t), r.device_ms / longest,
            number.sig(r.flops / work[1]), number.NONE if free else number.sig(r.bytes / size[1]), f"{tip} \u00b7 {place(r.file, r.line)}",
            r.fusion,
        )  # fmt: skip

    items: list = []
    if sort:
        items = [line(records[i]) for i in chosen]
        rest = sorted(set(range(len(records))) - set(chosen))
        gaps = [rest] if rest else []
    else:
        gaps = _gaps(chosen, len(records))
    budget = max(0, INLINE_ROWS - len(chosen)) // max(1, len(gaps))

    def fold(gap) -> Fold:
        part = table.iloc[gap]
        return Fold(
            f"{number.count(len(gap))} others" if sort else _names(records, gap), int(part.op.iloc[0]), int(part.op.iloc[-1]),
            number.sig(part.device_ms.sum() * 1e6 / unit[1]), number.sig(part.flops.sum() / work[1]), number.sig(part.bytes.sum() / size[1]),
            tuple(line(records[i]) for i in gap[:budget]), max(0, len(gap) - budget),
        )  # fmt: skip

    if sort:
        items += [fold(g) for g in gaps]
    else:
        starts = {g[0]: g for g in gaps}
        position = 0
        while position < len(records):
            if position in starts:
                items.append(fold(starts[position]))
                position += len(starts[position])
            else:
                items.append(line(records[position]))
                position += 1
    if len(chosen) < len(records):
        meta.append((f"{number.count(len(chosen))} of {number.count(len(records))} shown", False))
    bare = int((table.module == "").sum())
    all_rows = f"all rows: p.ops.rows, a DataFrame of {number.count(len(m.trace.ops))} \u00d7 {table.shape[1]}"
    left = (f"no module: {number.plural(bare, 'op')} \u00b7 " if bare else "") + all_rows
    order = f"sorted by {sort}" if sort else "in program order"
    if m.trace.dropped:
        order = f"{number.plural(m.trace.dropped, 'record')} dropped \u00b7 {order}"
    return Model(
        _title(m),
        tuple(meta),
        tuple(items),
        (unit[0], work[0], size[0]),
        (left, f"{order} \u00b7 other orders: time, bytes, flops"),
    )


def _chosen(table, limit, sort) -> list[int]:
    """Positions of the rows that are shown before any fold."""
    n = len(table)
    if sort:
        order = np.argsort(-table[SORTS[sort]].to_numpy(), kind="stable")
        return [int(i) for i in order[: limit or 12]]
    if n <= (limit or 16):
        return list(range(n))
    keep: set[int] = set()
    lines: set[tuple] = set()
    places = list(zip(table.file, table.line, table.phase))
    for i in np.argsort(-table.device_ms.to_numpy(), kind="stable"):  # the heaviest op of each of the heaviest lines
        line = places[i]
        if len(keep) < (limit or HEAVY + 7) - 7 and line not in lines:
            lines.add(line)
            keep.add(int(i))
    real = np.flatnonzero((table.kind != "view").to_numpy()).tolist()
    back = [i for i in real if places[i][2] == "backward"]
    keep |= {*real[:3], *back[:2], *real[-2:]}
    keep |= {gap[0] for gap in _gaps(sorted(keep), n) if len(gap) == 1}  # a fold of one row is no fold
    return sorted(keep)


def _gaps(chosen: list[int], n: int) -> list[list[int]]:
    edges = [-1, *chosen, n]
    return [list(range(a + 1, b)) for a, b in zip(edges, edges[1:]) if b - a > 1]


def _names(records, gap) -> str:
    """`the rest of h.0, then h.1 to h.5, ln_f and head: 215 ops`."""
    blocks: list[str] = []
    for i in gap:
        r = records[i]
        name = block(r.module) or ("the optimizer" if r.phase == "optimizer" else "")
        if name and (not blocks or blocks[-1] != name):
            blocks.append(name)
    blocks = list(dict.fromkeys(blocks))
    runs: list[list[str]] = []
    for name in blocks:
        last = runs[-1][-1] if runs else ""
        if numbered(name) and numbered(last) and name.rsplit(".", 1)[0] == last.rsplit(".", 1)[0]:
            runs[-1].append(name)
        else:
            runs.append([name])
    before = block(records[gap[0] - 1].module) if gap[0] else ""
    words = []
    if blocks and blocks[0] == before and runs:
        words.append(f"the rest of {before}")
        runs[0] = runs[0][1:]
        runs = [r for r in runs if r]
    words += [r[0] if len(r) == 1 else f"{r[0]} and {r[1]}" if len(r) == 2 else f"{r[0]} to {r[-1]}" for r in runs]
    if len(words) > 4:
        words = [*words[:3], f"{len(words) - 3} more modules"]
    count = number.plural(len(gap), "op")
    if not words:
        return count
    if words[0].startswith("the rest") and len(words) > 1:
        words[1] = "then " + words[1]
    text = (
        ", ".join(words[:-1]) + (", " if words[-1].startswith("then") else " and ") + words[-1]
        if len(words) > 1
        else words[0]
    )
    return f"{text}: {count}"


def _text(v: Model) -> list:
    out: list = [[(v.title, "b")], *frame.meta_lines(v.meta), []]
    if v.hint:
        return [*out, *([part] for part in textwrap.wrap(v.hint, 98))]
    out.append(
        [
            (
                f"{'op':>6}  {'name':<24}{'result':<22}{'line':<18}{'way':<6}{v.units[0]:>7}{v.units[1]:>8}{v.units[2]:>7}",
                "dim",
            )
        ]
    )
    for item in v.items:
        if isinstance(item, Fold):
            span = f"{number.count(item.first)}\u2013{number.count(item.last)}"
            out.append(
                [
                    (
                        f"{'':>6}  {_cut(item.words, 67 - len(span)) + '  ' + span:<70}{item.time:>7}{item.flops:>8}{item.bytes:>7}",
                        "dim",
                    )
                ]
            )
            continue
        style = {"matmul": "matmul", "move": "move"}.get(item.paint, "other") if item.paint != "free" else "dim"
        out.append([
            f"{number.count(item.op):>6}  ", (f"{_end(item.name, 23):<24}", style), f"{_end(item.result, 21):<22}{item.place[-17:]:<18}{item.way:<6}",
            f"{item.time:>7}{item.flops:>8}{item.bytes:>7}",
        ])  # fmt: skip
    return [*out, [], [(v.foot[0], "dim")]]


def _cut(text: str, width: int) -> str:
    """A fold's sentence keeps its end, which counts: `the rest of h.0, then …: 215 ops`."""
    if len(text) <= width:
        return text
    head, _, tail = text.rpartition(": ")
    return f"{head[: width - len(tail) - 3]}\u2026: {tail}"


def _end(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"
