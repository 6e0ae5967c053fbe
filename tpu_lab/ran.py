"""What of a step ran on "tpu": its records step by step, its work, and which parts the record lacks.

Work that is done on the CPU leaves no op and no launch: counts of them alone would take it for the best of all answers.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from tpu_lab import causal
from tpu_lab.metrics import Metrics
from tpu_lab.trace import LaunchRecord, OpRecord

COMPUTES = ("matmul", "elementwise", "reduce")  # kinds of ops that make new values of those that they read
PHASES = ("forward", "backward", "optimizer")
TRAINING = ("forward matmul", "backward matmul", "optimizer")  # what a training step is made of

Step = tuple[list[OpRecord], list[LaunchRecord], float]


def steps(m: Metrics) -> list[Step]:
    """(ops, launches, ns without compiling) of each step after the warm-up; ops and launches after the last one are its own.

    Steps are an optimizer's where it made several, else calls.
    """
    calls = [step for step in m.steps if not step.warmup]
    begin = calls[0].start_ns if calls else m.trace.start_ns
    ends = [ns for ns in m.trace.step_ends() if ns >= begin]
    if len(ends) < 2 or len(calls) > 1:
        ends = [step.end_ns for step in calls] or [m.trace.end_ns]

    def parted(records) -> list[list]:
        parts: list[list] = [[] for _ in ends]
        for record in records:
            if record.time_ns >= begin:
                parts[min(bisect.bisect_left(ends, record.time_ns), len(ends) - 1)].append(record)
        return parts

    splits = [m.timeline.split(start, end) for start, end in zip([begin, *ends], ends)]
    nanoseconds = [split.total - split.compile for split in splits]
    return list(zip(parted(m.trace.ops), parted(m.trace.launches), nanoseconds))


def work(step: Step) -> float:
    """Model FLOPs of a step: its matmuls, as in Metrics.flops; of compiled graphs, which have no ops, the launches'."""
    ops, launches, _ = step
    dropped = causal.masked(ops, launches)
    own = sum(op.flops - dropped.get(op.index, 0) for op in ops if op.kind == "matmul" and not op.recomputed)
    return own or sum(r.flops for r in launches)


def lacking(m: Metrics, parts: Sequence[str] | None) -> str:
    """Which of these parts a step did not run on the device, in a sentence; "" when all ran.

    parts: each a kind of COMPUTES, one of PHASES or both, such as "backward matmul"; ValueError for other words. With ()
    something has to be computed there, with None something launched. An op whose result nobody held does not count.
    """
    elsewhere = "on `tpu`: this ran on the CPU, or its result was typed in."
    if parts is None:
        return "" if m.trace.launches else f"nothing ran {elsewhere}"
    for part in parts:
        if unknown := set(part.split()) - {*COMPUTES, *PHASES}:
            raise ValueError(f"no part {min(unknown)!r}: there are {', '.join((*COMPUTES, *PHASES))}")
    done = [[op for op in ops if op.kind in COMPUTES and op.bytes and not op.fallback] for ops, *_ in steps(m)]
    if not any(done):
        return f"nothing was computed {elsewhere}"
    for number, ops in enumerate(done, 1):
        for part in parts:
            if not any(set(part.split()) <= {op.kind, op.phase} for op in ops):
                step = f" in step {number}" if len(done) > 1 else ""
                return f"the record of `tpu` holds no {part} op{step}: that part ran on the CPU, or not at all."
    return ""
