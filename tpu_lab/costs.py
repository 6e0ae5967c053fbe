"""What each op and each source line cost: shares of the launches' device time.

An op's time is its share of its launch's device time by max(FLOPs, BALANCE x bytes); a view is free. Inside one XLA
program nobody measured the single op, so this is a share, not a measurement, and views that print it say so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tpu_lab.place import family, op_name, stem
from tpu_lab.trace import Trace

if TYPE_CHECKING:
    from tpu_lab.metrics import Metrics

FAMILIES = 4  # a line that runs more modules than this, those alike but for their numbers as one, calls a whole model
BALANCE = 8.0  # FLOPs that cost as much as one byte: between a CPU core's and a cache's; only shares depend on it


def op_times(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """(device ns of each op, position of its launch or -1), both by position in `trace.ops`."""
    ops, launches = trace.ops, trace.launches
    position = {record.index: i for i, record in enumerate(ops)}
    real = np.array([r.kind != "view" for r in ops], dtype=bool)
    flops = np.fromiter((r.flops for r in ops), dtype=np.float64, count=len(ops))
    moved = np.fromiter((r.bytes for r in ops), dtype=np.float64, count=len(ops))
    weight = np.where(real, np.maximum(flops, BALANCE * moved), 0.0)
    owner = np.full(len(ops), -1, dtype=np.int64)
    pairs = [(position[index], i) for i, launch in enumerate(launches) for index in launch.ops if index in position]
    if pairs:
        at, by = np.array(pairs).T
        owner[at] = by
    numbers = {record.index: i for i, record in enumerate(launches)}
    for i in np.flatnonzero(owner < 0).tolist():
        launched = ops[i].launch
        if launched is not None:
            owner[i] = numbers.get(launched, -1)
    ran = owner >= 0
    sums = np.bincount(owner[ran], weights=weight[ran], minlength=len(launches))
    counts = np.bincount(owner[ran], minlength=len(launches))
    device = np.array([r.device_ns for r in launches], dtype=np.float64)
    times = np.zeros(len(ops))
    total, n = sums[owner[ran]], counts[owner[ran]]
    share = np.where(total > 0, weight[ran] / np.where(total > 0, total, 1), 1 / np.maximum(n, 1))
    times[ran] = device[owner[ran]] * share
    return times, owner


@dataclass(frozen=True)
class Cost:
    """What one source line costs a step, forward or backward; of a line that calls a whole model, one family of modules."""

    name: str
    file: str
    line: int
    code: str
    phase: str
    kind: str  # the kind that takes most of it
    ops: int
    ns: float
    flops: float
    bytes: float
    at: tuple[int, ...] = ()  # positions of its ops in `trace.ops`, over all averaged steps
    part: str = ""  # "h.*.mlp": which modules, where a line has several costs


def by_line(m: Metrics) -> list[Cost]:
    """Costs by source line and way, largest first; what a compiled graph took stands under the line that called it.

    Of a model that somebody else wrote the user has one line, `model(x)`: its costs stand by their modules.
    """
    kinds: dict[tuple, int] = {}  # ops alike in all that is shown, numbered
    alike = np.array(
        [kinds.setdefault((op.file, op.line, op.phase, op.kind, op.name, op.module), len(kinds)) for op in m.averaged],
        dtype=np.int64,
    )
    families: dict[tuple, set] = {}
    for key in kinds:
        families.setdefault(key[:3], set()).add(stem(key[5]))
    places: dict[tuple, int] = {}  # a line, way and part, numbered

    def place_of(key) -> int:
        return places.setdefault((*key[:3], stem(key[5]) if len(families[key[:3]]) > FAMILIES else ""), len(places))

    line_of = np.array([-1 if key[3] == "view" else place_of(key) for key in kinds], dtype=np.int64)
    lines, times = line_of[alike], m.ops_time[m.step_ops]
    order = np.argsort(lines, kind="stable")  # positions in `averaged`, line by line
    edges = np.searchsorted(lines[order], np.arange(len(places) + 1))

    def by(what) -> list[Counter]:
        """Time by something of the ops, a Counter a line."""
        slots: dict[tuple, int] = {}
        slot = np.array([slots.setdefault((at, what(key)), len(slots)) for at, key in zip(line_of.tolist(), kinds)], dtype=np.int64)
        out: list[Counter] = [Counter() for _ in range(len(places) + 1)]  # the last one is the views'
        for (at, value), ns in zip(slots, np.bincount(slot[alike], weights=times, minlength=len(slots)).tolist()):
            out[at][value] = ns
        return out

    by_kind, by_name, by_stem = by(lambda key: key[3]), by(lambda key: op_name(key[4])), by(lambda key: stem(key[5]))
    modules: list[list[str]] = [[] for _ in range(len(places) + 1)]
    for at, key in zip(line_of.tolist(), kinds):
        modules[at].append(key[5])
    out = []
    for (file, line, phase, part), at in places.items():
        members = order[edges[at] : edges[at + 1]].tolist()
        ops = [m.averaged[i] for i in members]
        main = by_stem[at].most_common(1)[0][0]  # a line calls several modules: the costly one names it
        heavy = [n for n, _ in by_name[at].most_common(3)]
        name = family(module for module in modules[at] if stem(module) == main)
        name = name or ", ".join(heavy[:2]) + (" …" if len(heavy) > 2 else "")
        if phase == "optimizer":
            name = "optimizer step"
        elif phase == "backward":
            name += ", backward"
        out.append(
            Cost(
                name,
                file,
                line,
                ops[0].code,
                phase,
                by_kind[at].most_common(1)[0][0],
                len(members) // m.n,
                sum(times[members].tolist()) / m.n,
                sum(op.flops for op in ops) / m.n,
                sum(op.bytes for op in ops) / m.n,
                tuple(m.step_ops[members].tolist()),
                part,
            )
        )
    bare: dict[tuple, list] = {}
    for step in m.steady or (m.span,):
        for launch in m.launches_in(step):
            if not launch.ops:
                bare.setdefault((launch.file, launch.line), []).append(launch)
    for (file, line), launches in bare.items():
        flops = sum(r.flops for r in launches) / m.n
        out.append(
            Cost(
                "compiled graph",
                file,
                line,
                launches[0].code,
                "forward",
                "matmul" if flops else "elementwise",
                0,
                sum(r.device_ns for r in launches) / m.n,
                flops,
                sum(r.bytes for r in launches) / m.n,
            )
        )
    return sorted(out, key=lambda c: (-c.ns, c.file, c.line, c.phase))
