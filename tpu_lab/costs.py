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

BALANCE = 8.0  # FLOPs that cost as much as one byte: between a CPU core's and a cache's; only shares depend on it


def op_times(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """(device ns of each op, position of its launch or -1), both by position in `trace.ops`."""
    position = {record.index: i for i, record in enumerate(trace.ops)}
    weight = np.maximum(
        np.array([r.flops if r.kind != "view" else 0 for r in trace.ops], dtype=np.float64),
        BALANCE * np.array([r.bytes if r.kind != "view" else 0 for r in trace.ops], dtype=np.float64),
    )
    owner = np.full(len(trace.ops), -1, dtype=np.int64)
    for i, launch in enumerate(trace.launches):
        for index in launch.ops:
            if index in position:
                owner[position[index]] = i
    numbers = {record.index: i for i, record in enumerate(trace.launches)}
    for i, record in enumerate(trace.ops):
        if owner[i] < 0 and record.launch is not None:
            owner[i] = numbers.get(record.launch, -1)
    ran = owner >= 0
    sums = np.bincount(owner[ran], weights=weight[ran], minlength=len(trace.launches))
    counts = np.bincount(owner[ran], minlength=len(trace.launches))
    device = np.array([r.device_ns for r in trace.launches], dtype=np.float64)
    times = np.zeros(len(trace.ops))
    total, n = sums[owner[ran]], counts[owner[ran]]
    share = np.where(total > 0, weight[ran] / np.where(total > 0, total, 1), 1 / np.maximum(n, 1))
    times[ran] = device[owner[ran]] * share
    return times, owner


@dataclass(frozen=True)
class Cost:
    """What one source line costs a step, forward or backward."""

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


def by_line(m: Metrics) -> list[Cost]:
    """Costs by source line and way, largest first; what a compiled graph took stands under the line that called it."""
    groups: dict[tuple, list[int]] = {}
    for i in m.step_ops.tolist():
        op = m.trace.ops[i]
        if op.kind != "view":
            groups.setdefault((op.file, op.line, op.phase), []).append(i)
    out = []
    for (file, line, phase), members in groups.items():
        ops = [m.trace.ops[i] for i in members]
        by_kind: Counter = Counter()
        by_name: Counter = Counter()
        by_stem: Counter = Counter()
        times = m.ops_time[members].tolist()
        for ns, op in zip(times, ops):
            by_kind[op.kind] += ns
            by_name[op_name(op.name)] += ns
            by_stem[stem(op.module)] += ns
        main = by_stem.most_common(1)[0][0]  # a line calls several modules: the costly one names it
        heavy = [n for n, _ in by_name.most_common(3)]
        name = family(op.module for op in ops if stem(op.module) == main)
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
                by_kind.most_common(1)[0][0],
                len(ops) // m.n,
                sum(times) / m.n,
                sum(op.flops for op in ops) / m.n,
                sum(op.bytes for op in ops) / m.n,
                tuple(members),
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
