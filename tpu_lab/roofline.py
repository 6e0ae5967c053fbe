"""The roofline (Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785): is a cost bound by arithmetic or memory?

A cost that does W FLOPs and moves B bytes takes at least max(W / peak, B / bandwidth). Its intensity W / B says which of
the two it is; the ridge, peak / bandwidth, is where they meet.

**Work.** Matmuls and convolutions by their formulas, as everywhere. Other ops count one FLOP an element here, although
they are no model FLOPs: else every one of them would stand at intensity 0. What only moves data counts 0.
**Bytes.** Logical bytes read and written, op by op. Fused ops move less: what is between them is never written.
**Time.** Measured only where a launch holds ops of one cost and no other (strict and debug mode). Else the op's time is a
share of its launch by these same figures, and dividing by it would give back what was put in: then there is a bound, and
only the launches as a whole are measured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tpu_lab.costs import Cost
from tpu_lab.metrics import Metrics
from tpu_lab.trace import OpRecord

COUNTED = ("elementwise", "reduce", "random")  # kinds that count a FLOP an element


@dataclass(frozen=True)
class Point:
    """One cost, or all of them, a step. bound: "compute" or "memory"."""

    cost: Cost
    work: float  # FLOPs, see the module's docstring
    measured: bool  # `ns` is measured, not a share
    bound: str
    least_ns: float  # what the roof allows

    @property
    def ns(self) -> float:
        return self.cost.ns

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved; 0 for pure movement."""
        return self.work / self.cost.bytes if self.cost.bytes else 0.0

    @property
    def reached(self) -> float | None:
        """The part of its roof that it reaches; None where no time was measured. Over 1: its bytes came from caches."""
        return self.least_ns / self.ns if self.measured and self.ns > 0 else None

    @property
    def rate(self) -> float | None:
        """FLOP/s, measured."""
        return self.work / (self.ns * 1e-9) if self.measured and self.ns > 0 else None

    @property
    def possible(self) -> float:
        """FLOP/s at its roof."""
        return self.work / (self.least_ns * 1e-9) if self.least_ns else 0.0


class Roofline:
    """The costs of a trace under the roofs of its peak. `ValueError` when a roof is not known: look at `missing` first."""

    def __init__(self, m: Metrics) -> None:
        if why := missing(m):
            raise ValueError(why)
        assert m.peak is not None and m.peak.bandwidth is not None
        self.m, self.peak, self.bandwidth = m, m.peak.flops, m.peak.bandwidth
        self.ridge = self.peak / self.bandwidth  # FLOPs per byte

    @cached_property
    def points(self) -> list[Point]:
        """One a cost, most time first."""
        ops = self.m.trace.ops
        launches = [self.m.ops_launch[list(cost.at)] for cost in self.m.costs]
        owner = np.full(len(self.m.trace.launches) + 1, -1)  # of each launch: its cost, -2 when it holds several
        for number, own in enumerate(launches):
            owner[own] = np.where((owner[own] == -1) | (owner[own] == number), number, -2)
        owner[-1] = -2  # ops that no launch ran
        out = []
        for number, (cost, own) in enumerate(zip(self.m.costs, launches)):
            alone = bool((owner[own] == number).all())
            work = sum(work_of(ops[i]) for i in cost.at) / self.m.n if cost.at else cost.flops
            out.append(self._point(cost, work, alone))
        return out

    @cached_property
    def total(self) -> Point:
        """All launches of a step: their device time is measured, their bytes are what goes in and out of the programs."""
        costs = self.m.costs
        ns, flops = sum(c.ns for c in costs), sum(c.flops for c in costs)
        launches = sum(len(self.m.launches_in(s)) for s in self.m.steady or (self.m.span,)) / self.m.n
        name = "all launches" if launches != 1 else "the launch"
        cost = Cost(name, "", 0, "", "", "matmul", sum(c.ops for c in costs), ns, flops, self.m.bytes)
        return self._point(cost, sum(p.work for p in self.points), True)

    def _point(self, cost: Cost, work: float, measured: bool) -> Point:
        compute, memory = 1e9 * work / self.peak, 1e9 * cost.bytes / self.bandwidth
        return Point(cost, work, measured, "compute" if compute >= memory else "memory", max(compute, memory))


def of(m: Metrics) -> Roofline:
    """The roofline of these metrics, worked out once."""
    if "_roofline" not in vars(m):
        vars(m)["_roofline"] = Roofline(m)
    return vars(m)["_roofline"]


def missing(m: Metrics) -> str:
    """Why there is no roofline; "" when there is one."""
    if not any(r.device_ns for r in m.trace.launches):
        return "No device time was measured, so nothing stands under a roof"
    if m.peak is None and not m.flops:
        return "No matmul ran, so no peak was measured to draw a roof with"
    if m.peak is None or not m.peak.bandwidth:
        return "No roof is known for this chip"
    return ""


def work_of(op: OpRecord) -> int:
    """FLOPs of one op as the roofline counts them."""
    if op.flops or op.kind not in COUNTED:
        return op.flops
    return _largest(op.inputs[:1], op.outputs)


@functools.lru_cache(maxsize=4096)
def _largest(first: tuple[str, ...], results: tuple[str, ...]) -> int:
    """Elements of the first input or of all results: a reduction reads more than it gives."""
    return max(sum(map(elements, first)), sum(map(elements, results)))


def elements(aval: str) -> int:
    """How many elements `f32[8,64]` has; 1 for `f32[]`, 0 for what is no array."""
    _, bracket, sizes = aval.partition("[")
    if not bracket:
        return 0
    n = 1
    for size in sizes.rstrip("]").split(","):
        n *= int(size) if size.strip().isdigit() else 1
    return n
