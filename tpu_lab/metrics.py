"""Records -> numbers: where the time went, per step and in all, FLOPs, bytes, MFU, and what each op cost.

**The rule that makes the times add up.** Each nanosecond of the block's wall time goes to exactly one of six parts.
Where several things happen at once, the first of this list takes it:

    compile    tracing, lowering and compiling a program, or reading one back from disk
    device     the device works (whatever the host does meanwhile is hidden behind it, and shown as `hidden`)
    transfer   the host waits for a value or moves bytes, and the device does nothing
    dispatch   our own host work: recording ops, finding programs, calling XLA
    Python     the rest, as far as the host's thread was running (or may have been: see below)
    idle       the rest in which the host's main thread demonstrably did not run: sleep, disk, another process

So the sum is the wall time by construction. `idle` is a lower bound: from the main thread's blocked time we take away
all that we know it can block in (waits, launches, and the backward pass, which runs on autograd's own thread).

**Device intervals.** A launch runs from `ready_ns - device_ns` to `ready_ns`. Without `ready_ns` it starts when its
dispatch returned, or when the launch before it was done, as the device runs one program at a time.

An op's own time is its share of its launch: tpu_lab/costs.py.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tpu_lab import causal, costs
from tpu_lab.chips import Peak
from tpu_lab.trace import Trace

PARTS = ("compile", "device", "transfer", "dispatch", "Python", "idle")


@dataclass(frozen=True)
class Split:
    """Nanoseconds of wall time by part (see the module's docstring); their sum is the wall time."""

    compile: float = 0.0
    device: float = 0.0
    transfer: float = 0.0
    dispatch: float = 0.0
    python: float = 0.0
    idle: float = 0.0
    hidden: float = 0.0  # host work that ran while the device was busy: not part of the sum

    def parts(self) -> list[tuple[str, float]]:
        """(name, ns) for each of PARTS."""
        return [(name, getattr(self, name.lower())) for name in PARTS]

    @property
    def total(self) -> float:
        return sum(ns for _, ns in self.parts())

    def largest(self) -> tuple[str, float]:
        return max(self.parts(), key=lambda part: part[1])


@dataclass(frozen=True)
class Step:
    """One step: from the end of the one before it to its own end. Ranges are [first, last) positions in the trace."""

    number: int  # from 1
    start_ns: int
    end_ns: int
    ops: tuple[int, int]
    launches: tuple[int, int]
    misses: int  # programs compiled or read back in it
    warmup: bool
    split: Split
    settling: bool = False  # a program made before it was still running for the first time when it began
    cut: bool = False  # records of it were dropped: the trace was full

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


class Timeline:
    """Interval arithmetic over one trace: how much of [a, b) each part takes."""

    def __init__(self, trace: Trace) -> None:
        launches, ops, waits = trace.launches, trace.ops, trace.waits
        begin, lookup = _column(launches, "time_ns"), _column(launches, "lookup_ns")
        compiling = _column(launches, "compile_ns")
        done = begin + lookup + compiling + _column(launches, "dispatch_ns")
        self.device = _device_intervals(launches, done)
        op_begin, host_ns = _column(ops, "time_ns"), _column(ops, "host_ns")
        op_end = op_begin + np.where(host_ns > 0, host_ns, _column(ops, "record_ns"))
        wait_begin = _column(waits, "time_ns")
        wait_end = wait_begin + _column(waits, "wait_ns") + _column(waits, "copy_ns")
        compile_ = (begin + lookup, begin + lookup + compiling)
        host = (np.concatenate([begin, op_begin]), np.concatenate([done, op_end]))
        layers = [compile_, self.device, (wait_begin, wait_end), host]
        self._unions = [_Union([layer for layer in layers[: k + 1]]) for k in range(4)]
        self._own = [_Union([layer]) for layer in layers]
        self._blocking = _Union(
            [(wait_begin, wait_end), (begin + lookup, done), _backward_spans(ops, op_begin, op_end)]
        )
        self._cpu = np.array(trace.meta.get("cpu") or [], dtype=np.float64).reshape(-1, 2)

    def split(self, start: int, end: int) -> Split:
        """The parts of the window [start, end), in ns."""
        if end <= start:
            return Split()
        covered = [union.within(start, end) for union in self._unions]
        compile_, device, transfer, dispatch = (float(v) for v in np.diff([0.0, *covered]))
        rest = (end - start) - covered[-1]
        idle = 0.0
        if len(self._cpu) > 1:
            ran = float(np.diff(np.interp([start, end], self._cpu[:, 0], self._cpu[:, 1]))[0])
            idle = min(rest, max(0.0, (end - start) - ran - self._blocking.within(start, end)))
        hidden = self._own[3].within(start, end) - (covered[3] - covered[2]) - compile_
        return Split(compile_, device, transfer, dispatch, rest - idle, idle, max(0.0, hidden))


class _Union:
    """The union of intervals, and its measure inside a window."""

    def __init__(self, layers) -> None:
        start = np.concatenate([a for a, _ in layers])
        end = np.concatenate([b for _, b in layers])
        keep = end > start
        start, end = start[keep], end[keep]
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order]) if len(end) else end
        first = np.ones(len(start), dtype=bool)
        first[1:] = start[1:] > end[:-1]
        last = np.append(first[1:], True) if len(first) else first
        start, end = start[first], end[last]
        self._x = np.column_stack([start, end]).ravel()
        length = end - start
        after = np.cumsum(length)
        self._y = np.column_stack([after - length, after]).ravel()

    def within(self, start: float, end: float) -> float:
        if not len(self._x):
            return 0.0
        a, b = np.interp([start, end], self._x, self._y)
        return float(b - a)


def _column(records, name: str) -> np.ndarray:
    """One field of all records."""
    return np.fromiter(map(operator.attrgetter(name), records), dtype=np.float64, count=len(records))


def _device_intervals(launches, done) -> tuple[np.ndarray, np.ndarray]:
    end, device = _column(launches, "ready_ns"), _column(launches, "device_ns")
    start, free, last = end - device, 0.0, 0
    for i in np.flatnonzero(end == 0).tolist():  # nobody measured when it was ready
        free = max(free, end[last:i].max(initial=0.0))
        start[i] = max(done[i], free)
        end[i] = start[i] + device[i]
        last = i
    return start, end


def _backward_spans(ops, begin, end) -> tuple[np.ndarray, np.ndarray]:
    """[first op, last op] of each run of backward ops."""
    flag = np.fromiter((r.phase == "backward" for r in ops), dtype=bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flag, [False]]).astype(np.int8)))
    firsts, lasts = edges[::2], edges[1::2] - 1
    return begin[firsts], end[lasts]


def _steps(trace: Trace, timeline: Timeline, block_end: int) -> tuple[Step, ...]:
    """Steps by the calls profile() made or by p.step(), else by optimizer steps."""
    ends = [ns for what, ns in trace.marks if what in ("call end", "step end")] or trace.step_ends()
    ends = sorted(ns for ns in ends if ns <= block_end)
    warm = max((ns for what, ns in trace.marks if what == "warmup end"), default=0)
    op_at = np.maximum.accumulate(_column(trace.ops, "time_ns"))
    launch_at = np.maximum.accumulate(_column(trace.launches, "time_ns"))
    new = np.array([r.cache != "hit" for r in trace.launches], dtype=bool)
    first_runs = timeline.device[1][new], launch_at[new]
    full = [records[-1].time_ns for records in (trace.ops, trace.launches, trace.waits) if len(records) >= trace.limit > 0]
    known = min(full) if full and trace.dropped else block_end  # up to when all was recorded
    out, start = [], trace.start_ns
    for number, end in enumerate(ends, 1):
        ops = (int(np.searchsorted(op_at, start)), int(np.searchsorted(op_at, end)))
        inside = (int(np.searchsorted(launch_at, start)), int(np.searchsorted(launch_at, end)))
        settling = bool(((first_runs[0] > start) & (first_runs[1] < start)).any())
        misses = int(new[slice(*inside)].sum())
        out.append(Step(number, start, end, ops, inside, misses, end <= warm, timeline.split(start, end), settling, end > known))
        start = end
        if end <= warm and (number == len(ends) or ends[number] > warm):
            start = warm  # between the two profile() waits for the warm-up's device work: that is no step's
    return tuple(out)


class Metrics:
    """All numbers of one trace. Times in ns, sizes in bytes, work in FLOPs; each figure is computed when asked for.

    peak: what MFU divides by, or None. flops: the caller's own model FLOPs a step, instead of the records' matmuls.
    """

    def __init__(self, trace: Trace, peak: Peak | None = None, flops: float | None = None) -> None:
        self.trace, self.peak, self._flops = trace, peak, flops
        last = max((ns for what, ns in trace.marks if what == "block end"), default=0)
        self.end_ns = last or max(trace.end_ns, trace.start_ns)
        self.wall_ns = self.end_ns - trace.start_ns
        self.timeline = Timeline(trace)
        self.whole = self.timeline.split(trace.start_ns, self.end_ns)
        self.steps = _steps(trace, self.timeline, self.end_ns)

    @cached_property
    def steady(self) -> tuple[Step, ...]:
        """Steps after warm-up that compiled nothing and read nothing back, and in which no new program had its first run;
        recorded whole.

        Without calls of ours to bound them, the first step of a block also holds what the block did before its
        loop: it counts only when there is no other.
        """
        good = [s for s in self.steps if not s.warmup and not s.misses and not s.cut]
        good = [s for s in good if not s.settling] or good
        by_calls = any(what == "call end" for what, _ in self.trace.marks)
        if len(good) > 1 and not by_calls and good[0].number == 1:
            good = good[1:]
        return tuple(good)

    @cached_property
    def step_split(self) -> Split:
        """The mean steady step; the whole block when there is none."""
        if not self.steady:
            return self.whole
        names = ("compile", "device", "transfer", "dispatch", "python", "idle", "hidden")
        return Split(*(sum(getattr(s.split, n) for s in self.steady) / len(self.steady) for n in names))

    @cached_property
    def span(self) -> Step:
        """The step that the views draw: the last steady one, else the whole block as one."""
        if self.steady:
            return self.steady[-1]
        trace = self.trace
        misses = sum(r.cache != "hit" for r in trace.launches)
        return Step(0, trace.start_ns, self.end_ns, (0, len(trace.ops)), (0, len(trace.launches)), misses, False, self.whole)

    @cached_property
    def step_of_launch(self) -> dict[int, int]:
        """Launch index -> number of the step it began in."""
        return {r.index: s.number for s in self.steps for r in self.launches_in(s)}

    @cached_property
    def compile_of_launch(self) -> dict:
        """Launch index -> its CompileRecord."""
        return {c.launch: c for c in self.trace.compiles}

    def ops_in(self, step: Step) -> list:
        return self.trace.ops[slice(*step.ops)]

    def launches_in(self, step: Step) -> list:
        return self.trace.launches[slice(*step.launches)]

    @cached_property
    def sites(self) -> list[tuple[str, int, str]]:
        """`site` of each launch, by its position in the trace."""
        return [self.site(r) for r in self.trace.launches]

    def site(self, launch) -> tuple[str, int, str]:
        """(file, line, code) that made a launch run; that of its first op where the launch has none (backward ops)."""
        if launch.file or not launch.ops:
            return launch.file, launch.line, launch.code
        first = self._numbered.get(launch.ops[0])
        return (first.file, first.line, first.code) if first else ("", 0, "")

    @cached_property
    def _numbered(self) -> dict:
        return {op.index: op for op in self.trace.ops}

    @cached_property
    def ops_time(self) -> np.ndarray:
        return self._op_times[0]

    @cached_property
    def ops_launch(self) -> np.ndarray:
        """For each op the position of its launch in the trace, -1 for none."""
        return self._op_times[1]

    @cached_property
    def _op_times(self):
        return costs.op_times(self.trace)

    @cached_property
    def step_ops(self) -> np.ndarray:
        """Positions of the ops whose cost is averaged: those of all steady steps, else all."""
        steps = self.steady or (self.span,)
        return np.concatenate([np.arange(*s.ops) for s in steps]) if steps else np.empty(0, dtype=int)

    @cached_property
    def averaged(self) -> list:
        """The ops at `step_ops`."""
        ops = self.trace.ops
        return [ops[i] for i in self.step_ops.tolist()]

    @cached_property
    def _matmuls(self) -> list:
        return [op for op in self.averaged if op.kind == "matmul"]

    @property
    def n(self) -> int:
        """Over how many steps a per-step figure is the mean; at least 1."""
        return max(1, len(self.steady))

    @cached_property
    def flops(self) -> float:
        """Model FLOPs a step: matmuls and convolutions as they ran, one multiply-add = 2; or what the caller gave.

        Not in it: embeddings (they look up), elementwise work, and what runs a second time for torch.utils.checkpoint.
        A backward pass comes to twice its forward pass, a product for each of a product's two inputs. Attention with
        `is_causal=True` counts half (causal.py); one that is written out in full: give `flops=` (`mingpt.flops`) for that.
        """
        if self._flops is not None:
            return float(self._flops)
        matmul = sum(op.flops for op in self._matmuls if not op.recomputed)
        if not matmul:  # compiled graphs have launches without ATen calls
            steps = self.steady or (self.span,)
            matmul = sum(r.flops for s in steps for r in self.launches_in(s) if not r.ops)
        return matmul / self.n - self.masked

    @cached_property
    def bytes(self) -> float:
        """Bytes read and written by the programs' inputs and outputs a step."""
        steps = self.steady or (self.span,)
        return sum(r.bytes for s in steps for r in self.launches_in(s)) / self.n

    @cached_property
    def mfu(self) -> float | None:
        """Model FLOPs / (time x peak); None without a peak, FLOPs or time. Compile time never counts."""
        time = self.step_split.total - self.step_split.compile
        if self.peak is None or not self.flops or time <= 0:
            return None
        return self.flops / (time * 1e-9 * self.peak.flops)

    @cached_property
    def recomputed(self) -> float:
        """FLOPs a step of matmuls that ran a second time, within backward, instead of being kept."""
        return sum(op.flops for op in self._matmuls if op.recomputed) / self.n

    @cached_property
    def masked(self) -> float:
        """FLOPs a step that make only what a causal mask throws away: they ran, and are no model FLOPs."""
        dropped = causal.masked(self.averaged, self.trace.launches)
        return sum(dropped.get(op.index, 0) for op in self._matmuls if not op.recomputed) / self.n

    @cached_property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation: as MFU, of all that ran (Korthikanti et al. 2022, arXiv 2205.05198)."""
        return None if self.mfu is None else self.mfu * (1 + (self.recomputed + self.masked) / self.flops)

    @property
    def also_ran(self) -> str:
        """What is in HFU and not in MFU, in words; "" when they are one."""
        return " and ".join(["recomputation"] * bool(self.recomputed) + ["the masked half of causal attention"] * bool(self.masked))

    @cached_property
    def matmul_share(self) -> float:
        """The part of the device time of the averaged ops that matmuls take, 0 to 1."""
        times = self.ops_time[self.step_ops] if len(self.step_ops) else np.zeros(0)
        total = times.sum()
        if not total:
            return 0.0
        flag = np.array([op.kind == "matmul" for op in self.averaged], dtype=bool)
        return float(times[flag].sum() / total)

    def outcomes(self) -> dict[str, int]:
        """How many launches were "hit", "miss" and "disk"."""
        return dict(self._outcomes)

    @cached_property
    def _outcomes(self) -> dict[str, int]:
        count = Counter(r.cache for r in self.trace.launches)
        return {name: count[name] for name in ("hit", "miss", "disk")}

    @cached_property
    def late_ns(self) -> float:
        """Device work that went on after the block had ended (nothing in the block waited for it)."""
        _, ends = self.timeline.device
        return max(0.0, float(ends.max()) - self.end_ns) if len(ends) else 0.0

    @cached_property
    def recording(self) -> tuple[float, float]:
        """What recording cost: (ns an op, ns a step), with an equal share of making the records of the notes afterwards."""
        recorded, count = len(self.trace.ops), max(1, len(self.averaged))
        if not recorded:
            return 0.0, 0.0
        each = sum(op.record_ns for op in self.averaged) / count
        each += self.trace.writing_ns / max(self.trace.op_count, recorded)
        return each, each * count / self.n

    @cached_property
    def costs(self) -> list[costs.Cost]:
        """Device time a step by source line and way, largest first. Their sum is the launches' device time."""
        return costs.by_line(self)
