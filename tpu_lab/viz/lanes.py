"""The barcode: a step's ops in program order over its launches over the device's time, as SVG paths.

A path a kind, not a mark an op: 743 marks with edges would be mud and 40 KB. Hover names runs by phase and module.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpu_lab.metrics import Metrics, Step
from tpu_lab.place import block, place
from tpu_lab.trace import REASONS
from tpu_lab.viz import number, theme

COLUMNS = 1000  # at most: beyond it a column is several ops, painted as most of them are
HEIGHT = 30
HOVERS = 120


@dataclass(frozen=True)
class Path:
    paint: str
    d: str


@dataclass(frozen=True)
class Hover:
    x: float
    width: float
    tip: str


@dataclass(frozen=True)
class Lane:
    """One SVG: `width` user units wide, stretched; words stand outside."""

    width: float
    paths: tuple[Path, ...]
    hovers: tuple[Hover, ...]
    label: str


@dataclass(frozen=True)
class Phase:
    name: str
    count: str
    share: float
    end: bool  # its label stands at its right end, as the segment is short


def ops_lane(m: Metrics, step: Step) -> Lane:
    """Ops in program order; views half as high."""
    paints = [theme.paint(o.kind) for o in m.ops_in(step)]
    n = len(paints)
    if n > COLUMNS:
        edges = np.linspace(0, n, COLUMNS + 1).astype(int)
        paints = [_most(paints[a:b]) for a, b in zip(edges, edges[1:])]
    counts = [
        f"{number.count(sum(p == k for p in paints))} {w}"
        for k, w in (("matmul", "matmul"), ("other", "elementwise"), ("move", "data movement"), ("free", "view"))
    ]
    label = f"{number.plural(n, 'op')} in program order: {', '.join(c for c in counts if not c.startswith('0 '))}"
    return Lane(len(paints), _paths([(p, 1.0) for p in paints]), _hovers(m, step, len(paints)), label)


def _most(paints):
    return max(sorted(set(paints)), key=paints.count)


def device_lane(m: Metrics, step: Step) -> Lane | None:
    """The same ops as slices as wide as their device time; None when none was measured."""
    times = m.ops_time[slice(*step.ops)]
    total = float(times.sum())
    if not total:
        return None
    runs: list[list] = []
    for op, t in zip(m.ops_in(step), times):
        if t <= 0:
            continue
        paint = theme.paint(op.kind)
        if runs and runs[-1][0] == paint:
            runs[-1][1] += 1000 * t / total
        else:
            runs.append([paint, 1000 * t / total])
    label = f"device time by op, in program order: matmuls take {number.percent(_share(m, step), 2)}"
    return Lane(1000.0, _paths([(p, w) for p, w in runs]), (), label)


def _share(m: Metrics, step: Step) -> float:
    times = m.ops_time[slice(*step.ops)]
    flag = np.array([o.kind == "matmul" for o in m.ops_in(step)], dtype=bool)
    return float(times[flag].sum() / times.sum())


def _paths(runs) -> tuple[Path, ...]:
    """Equal neighbours are one rectangle; rectangles of one paint are one path."""
    merged: list[list] = []
    for paint, width in runs:
        if merged and merged[-1][0] == paint:
            merged[-1][1] += width
        else:
            merged.append([paint, width])
    out: dict[str, list[str]] = {}
    x = 0.0
    for paint, width in merged:
        top = HEIGHT // 2 if paint == "free" else 0
        out.setdefault(paint, []).append(f"M{_n(x)} {top}h{_n(width)}V{HEIGHT}h-{_n(width)}z")
        x += width
    return tuple(Path(paint, "".join(d)) for paint, d in out.items())


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _hovers(m: Metrics, step: Step, width: int) -> tuple[Hover, ...]:
    """A title a run of ops of one phase and one repeated module."""
    ops, first = m.ops_in(step), step.ops[0]
    runs: list[list] = []
    for i, op in enumerate(ops):
        key = (op.phase, block(op.module))
        if runs and runs[-1][0] == key:
            runs[-1][2] = i + 1
        else:
            runs.append([key, i, i + 1])
    if len(runs) > HOVERS:
        return ()
    scale = width / max(1, len(ops))
    out = []
    for (phase, module), a, b in runs:
        spent = float(m.ops_time[first + a : first + b].sum())
        tip = f"{module or 'no module'}, {phase}: {number.plural(b - a, 'op')}, {number.time(spent)} \u00b7 {place(ops[a].file, ops[a].line)}"
        out.append(Hover(round(a * scale, 1), round((b - a) * scale, 1), tip))
    return tuple(out)


def phases(m: Metrics, step: Step) -> tuple[Phase, ...]:
    """The bracket under the ops: forward, backward, optimizer; () when they alternate more than that."""
    runs: list[list] = []
    for op in m.ops_in(step):
        if runs and runs[-1][0] == op.phase:
            runs[-1][1] += 1
        else:
            runs.append([op.phase, 1])
    if not 0 < len(runs) <= 5:
        return ()
    total = sum(n for _, n in runs)
    return tuple(
        Phase(name, number.count(n), n / total, i == len(runs) - 1 and n / total < 0.12)
        for i, (name, n) in enumerate(runs)
    )


def launch_lane(m: Metrics, step: Step) -> tuple[Lane | None, str]:
    """(boxes under the ops that each launch ran, a sentence). With one launch there is no lane: the sentence is the box."""
    launches = m.launches_in(step)
    if len(launches) == 1:
        r = launches[0]
        where = place(r.file, r.line)
        return None, "one XLA program \u00b7 " + REASONS.get(r.reason, r.reason) + (f", {where}" if where else "")
    first, n = step.ops[0], max(1, step.ops[1] - step.ops[0])
    position = {o.index: i for i, o in enumerate(m.ops_in(step))}
    boxes, x = [], 0.0
    for r in launches:
        own = [position[i] for i in r.ops if i in position]
        left, right = (min(own), max(own) + 1) if own else (x, x)
        boxes.append((left * 1000 / n, right * 1000 / n))
        x = right
    del first
    if len(launches) <= 60:
        path = Path(
            "box",
            "".join(f"M{_n(a + 0.5)} .5h{_n(max(b - a - 1, 1))}V29.5h-{_n(max(b - a - 1, 1))}z" for a, b in boxes),
        )
    else:
        path = Path("tick", "".join(f"M{_n((a + b) / 2)} 8V22" for a, b in boxes))
    from collections import Counter

    reasons = Counter(r.reason for r in launches)
    words = ", ".join(f"{number.count(c)} by {REASONS.get(k, k).split(':')[0]}" for k, c in reasons.most_common(3))
    if len(reasons) == 1:
        words = REASONS.get(next(iter(reasons)), next(iter(reasons)))
    return Lane(1000.0, (path,), (), f"{number.plural(len(launches), 'launch', 'launches')}: {words}"), words
