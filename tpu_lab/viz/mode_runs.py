"""What a step did in each mode, and the sentences about it: what each mode is, the title, whether the losses agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_lab.difference import Spread, counted, differ, noise, typical
from tpu_lab.metrics import Metrics
from tpu_lab.viz import frame, number
from tpu_lab.viz.nonfinite import figure

EPSILON = {"f64": 2.0**-52, "bf16": 2.0**-8, "f16": 2.0**-11}  # else f32's


@dataclass(frozen=True)
class Run:
    """The step in one mode. results: a number a call, or the arrays that the last call gave. failed: why it did not run."""

    mode: str
    metrics: Metrics | None
    results: tuple[Any, ...] = ()
    failed: str = ""
    times: tuple[int, ...] = ()  # ns, of the native CPU, which has no records
    parked: int = 0  # device bytes that the state of the other modes held meanwhile

    @property
    def spread(self) -> Spread:
        """Step times in ns."""
        return Spread.of(self.times if self.metrics is None else [s.ns for s in counted(self.metrics)])


@dataclass(frozen=True)
class Compared:
    """All modes of one comparison. native: on the CPU without the device, None when not asked for."""

    runs: tuple[Run, ...]
    native: Run | None
    steps: int
    warmup: int
    optimizer: str = "optimizer"
    iterators: int = 0  # found in the step: they cannot be wound back

    @property
    def ran(self) -> tuple[Run, ...]:
        return tuple(r for r in self.runs if r.metrics is not None and (r.metrics.trace.launches or r.metrics.trace.ops))

    def run(self, mode: str) -> Run | None:
        return next((r for r in self.ran if r.mode == mode), None)


def what(c: Compared, r: Run) -> str:
    """What a mode does, from what it did: which parts of the step its programs hold."""
    if r.failed:
        return r.failed
    if r.metrics is None:
        cores = next((x.metrics.trace.meta.get("cores") for x in c.ran if x.metrics), None)
        return "PyTorch without TPU Lab" + (f", the same {number.plural(cores, 'core')}" if cores else "")
    if r.mode == "debug":
        return "waits after each op, to find the one that fails"
    if r.mode == "strict":
        return "each op its own cached program"
    m = r.metrics
    launches = m.launches_in(typical(m))
    phase = {o.index: o.phase for o in m.ops_in(typical(m))}
    parts = [[p for p in ("forward", "backward", "optimizer") if p in {phase.get(i) for i in x.ops}] for x in launches]
    named = [_join([c.optimizer if p == "optimizer" else p for p in own]) or "part of it" for own in parts]
    if r.mode == "compiled" and not any(x.mode == "compiled" for x in launches):
        return "Dynamo compiled nothing: the ops ran one by one"
    graphs = [own for own, x in zip(named, launches, strict=True) if len(x.ops) > 1 or x.mode == "compiled"]
    alone = len(launches) - len(graphs)
    if len(launches) == 1:
        said = f"one program for {named[0]}"
    elif 1 < len(set(graphs)) == len(graphs) <= 4:
        said = f"{_join(graphs)} each a program"
    else:
        said = f"{number.plural(len(graphs), 'program')} of several ops"
    if alone and len(launches) > 1:
        said += f", {number.plural(alone, 'op')} alone"
    return said + _dynamo(r)


def _join(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def _dynamo(r: Run) -> str:
    """What the first steps of a compiled step took besides XLA: Dynamo's tracing."""
    assert r.metrics is not None
    if r.mode != "compiled":
        return ""
    early = [s for s in r.metrics.steps if s not in counted(r.metrics)]
    spent = sum(s.ns - s.split.compile for s in early) - r.spread.median * len(early)
    return f"; Dynamo took {number.time(spent)} to trace" if spent > 1e8 else ""


def title(c: Compared) -> str:
    """How many launches in which mode, and what that is worth."""
    ran = c.ran
    if not ran:
        failed = next((r.failed for r in c.runs if r.failed), "")
        return f"No mode ran: {failed}"[:85] if failed else "No op ran on 'tpu'"
    strict, fused = c.run("strict"), c.run("fused")
    if len(ran) == 1:
        return f"The step in {ran[0].mode} mode: {number.time(ran[0].spread.median)}"
    if strict is None or fused is None:
        best, worst = (f(ran, key=lambda r: r.spread.median) for f in (min, max))
        head = f"The same step, {_launches(worst)} or {number.count(count(best))}"
        return f"{head}: {_faster(best, worst)}"
    return f"The same step, {_launches(strict)} or {number.count(count(fused))}: {_faster(fused, strict)}"


def count(r: Run) -> int:
    assert r.metrics is not None
    return len(r.metrics.launches_in(typical(r.metrics)))


def _launches(r: Run) -> str:
    return number.plural(count(r), "launch", "launches")


def _faster(a: Run, b: Run) -> str:
    x, y = a.spread, b.spread
    if not differ(x, y):
        limit = noise(x, y)
        if limit is None:
            return f"{a.mode} {number.time(x.median)}, {b.mode} {number.time(y.median)}"
        return f"time the same within noise, \u00b1 {number.percent(limit, 2)}"
    if x.median <= y.median:
        return f"{a.mode} is {number.sig(y.median / x.median)} times as fast as {b.mode}"
    return f"{a.mode} takes {number.sig(x.median / y.median)} times as long as {b.mode}"


# --- do the losses agree? ---------------------------------------------------------------------------------------------


def largest(a: tuple, b: tuple) -> tuple[float, int]:
    """(largest relative difference of two runs' results, at which call or array); inf where they cannot be compared."""
    if len(a) != len(b):
        return math.inf, 0
    worst, at = 0.0, 0
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
        if x.shape != y.shape or not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return math.inf, i
        finite = np.isfinite(x)
        gap = np.abs(x - y)[finite]
        size = np.maximum(np.abs(x), np.abs(y))[finite]
        difference = float(gap.max() / size.max()) if gap.size and gap.max() else 0.0
        if difference > worst:
            worst, at = difference, i
    return worst, at


def agreement(c: Compared) -> tuple[bool | None, str]:
    """(do all runs agree, a sentence); None when the step gave nothing to compare.

    Two runs agree when they differ by at most the square root of the dtype's epsilon: half of its digits, as rounding
    is another in each mode and grows from step to step.
    """
    runs = [r for r in c.ran if r.results]
    if len(runs) < 2:
        return None, "The step returned no number: let it return its loss, and the losses are compared" if len(c.ran) > 1 else ""
    first = runs[0]
    numbers = isinstance(first.results[0], float)
    word = "Losses" if numbers else "Results"
    assert first.metrics is not None
    allowed = math.sqrt(EPSILON.get(frame.dtype(first.metrics), 2.0**-23))
    worst, at, who = max(((*largest(first.results, r.results), r) for r in runs[1:]), key=lambda x: x[0])
    random = any(o.kind == "random" for o in first.metrics.trace.ops)
    if worst <= allowed:
        last = f"{first.results[-1]:.5g} at the last step, " if numbers else ""
        all_ = f"all {_spelled(len(runs))}" if len(runs) > 2 else "both"
        said = "no difference" if not worst else f"largest relative difference {figure(worst)}"
        return _with_native(c, first, allowed, random, True, f"{word} agree in {all_}: {last}{said}")
    where = f" at call {at + 1} of {len(first.results)}" if numbers else ""
    values = f": {first.mode} {first.results[at]:.5g}, {who.mode} {who.results[at]:.5g}" if numbers and at < len(who.results) else ""
    why = ""
    if c.iterators:
        why = ". The step draws from an iterator, which cannot be wound back: pass it one batch"
    elif random and who.mode == "compiled":
        why = ". A compiled graph draws its random numbers in another order: compare without dropout"
    said = f"by {figure(worst)} of their size" if math.isfinite(worst) else "in shape or in where they are finite"
    return False, f"{word} differ {said}{where}{values}{why}"


def _with_native(c: Compared, first: Run, allowed: float, random: bool, agree: bool, sentence: str) -> tuple[bool, str]:
    if c.native is None or not c.native.results:
        return agree, sentence
    gap, _ = largest(first.results, c.native.results)
    if gap <= allowed:
        return agree, f"{sentence}; native CPU within {figure(gap)}" if gap else f"{sentence}; native CPU gives the same"
    if random:
        return agree, f"{sentence}; native CPU draws other random numbers"
    by = figure(gap) if math.isfinite(gap) else "more than its finite values tell"
    return False, f"{sentence}; native CPU differs by {by}"


def _spelled(n: int) -> str:
    return {3: "three", 4: "four"}.get(n, str(n))
