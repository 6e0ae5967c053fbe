"""The records: what the backend writes and the lab reads. Standard library only, imports nothing of ours.

`active` is the one `if` that the backend pays when nobody records. A Trace is bounded: what does not fit is
counted in `dropped`, never silently lost.
"""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass, field
from typing import Any

# Why a deferred graph ran: the closed list. (key, words for people)
REASONS = {
    "strict": "strict mode: each op runs at once",
    "debug": "debug mode: each op runs and waits",
    "item": "item() needs the value",
    "print": "print needs the values",
    "bool": "bool() needs the value",
    "int": "int() needs the value",
    "float": "float() needs the value",
    "index": "an index or a range needs the value",
    "numpy": "numpy() needs the values",
    "cpu": "copy to the CPU",
    "synchronize": "synchronize",
    "step end": "the optimizer step ended",
    "call end": "the profiled call ended",
    "mark": "p.step() ended the step",
    "loop": "a repeated run of ops was detected",
    "compiled": "a compiled graph ran",
    "unsupported": "an op without a TPU lowering ran on the CPU",
    "data-dependent": "the result's shape depends on the data",
    "size limit": "the deferred graph reached its size limit",
}


@dataclass(slots=True)  # not frozen: that would make it seven times as slow to write, and only the recorder writes
class OpRecord:
    """One ATen call that reached the device. Nobody but the recorder changes it."""

    index: int  # program order, from 0
    name: str  # "aten.add.Tensor"
    inputs: tuple[str, ...]  # ("f32[8,8]", "f32[8,8]")
    outputs: tuple[str, ...]
    static: tuple[str, ...]  # ("dim=1", "keepdim=True")
    kind: str  # matmul | elementwise | reduce | movement | random | host | view
    module: str  # "h.0.attn.c_attn", "" outside modules
    file: str  # the user's file; for a backward op that of its forward op; "" if unknown
    line: int
    code: str  # the stripped source line
    phase: str  # "forward" | "backward" | "optimizer"
    forward: int | None  # for a backward op: the index of its forward op, if known
    launch: int | None  # the launch that ran it; None for a free view
    flops: int  # model convention: one multiply-add = 2; 0 for what a program left out, as nobody held its result
    bytes: int  # logical bytes read and written; 0 for such an op, too
    time_ns: int  # host clock (perf_counter_ns) when it was called
    record_ns: int  # what recording it cost, measured at every 64th op
    fallback: bool = False  # ran on the CPU, as no lowering exists
    host_ns: int = 0  # host time of the whole call, recording included; 0 if not measured
    recomputed: bool = False  # a forward op that runs again within backward (torch.utils.checkpoint)


@dataclass(slots=True)
class LaunchRecord:
    """One execution of one XLA program. Nobody but the device clock changes it."""

    index: int
    ops: tuple[int, ...]  # OpRecord indices that it ran, in order
    cache: str  # "hit" | "miss" | "disk"
    reason: str  # a key of REASONS
    file: str  # the user's line that forced it
    line: int
    code: str
    mode: str  # "strict" | "debug" | "fused" | "compiled"
    key: str  # short hash of the cache key
    time_ns: int  # start, host clock
    lookup_ns: int  # building the key and finding the program (no compile in it)
    compile_ns: int  # 0 on a hit
    dispatch_ns: int  # the call into XLA, until it returned
    device_ns: int  # until the results were ready, after dispatch returned; 0 if nobody waited
    flops: int
    bytes: int
    inputs: int  # leaves
    outputs: int  # live values
    donated: int
    step: int  # optimizer steps finished before it, within this trace
    ready_ns: int = 0  # host clock when its results were ready; 0 if not measured


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """One program that was made or read back."""

    launch: int
    key: str
    tier: str  # "compiled" | "disk"
    trace_ns: int
    lower_ns: int
    compile_ns: int
    why: str  # a plain sentence: "first time this graph ran", "x: f32[31,128], was f32[32,128] (...)"
    cause: str  # first | shape | dtype | constant | ops | live set | donation | option | mode | view
    site: str  # "train.py:43", the call site
    hlo: object = None  # callable () -> optimised HLO text, or None


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """The host waited for the device, or moved data: item(), cpu(), a copy to the device."""

    what: str  # "item" | "bool" | "int" | "float" | "index" | "print" | "cpu" | "to tpu" | "synchronize" | an op on the host
    file: str
    line: int
    code: str
    time_ns: int
    wait_ns: int  # waiting for the device
    copy_ns: int  # moving bytes
    bytes: int


@dataclass(slots=True)
class HeldRecord:
    """The life of one array on the device. Its bytes are part of `Trace.live` from position `born` up to before `died`."""

    op: int | None  # the op that made it, if known
    born: int  # positions in Trace.live
    died: int | None  # None: alive when the trace ended
    bytes: int
    owner: str  # weights | optimizer | gradients | inputs (came from the host) | before (older than the trace) | "" a result
    name: str  # "h.0.attn.qkv.weight", "exp_avg of h.0.attn.qkv.weight"; "" for results
    taken: bool = False  # it ended as its memory was given to a result of launch `died` (donation)


@dataclass
class Trace:
    """A bounded recording. Records are in program order, but for `held`.

    While it is active the backend only notes what it has at hand, in `log`; its `writer` makes records of the notes when
    somebody reads a field of WRITTEN.
    """

    limit: int = 200_000
    ops: list[OpRecord] = field(default_factory=list)
    launches: list[LaunchRecord] = field(default_factory=list)
    compiles: list[CompileRecord] = field(default_factory=list)
    waits: list[WaitRecord] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # host clock at the end of each optimizer step
    steppers: list[int] = field(default_factory=list)  # whose step that was: optimizers are numbered as they come
    marks: list[tuple[str, int]] = field(default_factory=list)  # ("warmup end" | "call end" | "step end" | "block end", ns): set by profile()
    live: list[tuple[int, int]] = field(default_factory=list)  # (op index, live bytes on the device after it)
    held: list[HeldRecord] = field(default_factory=list)  # the arrays behind `live`, by the end of their lives
    programs: dict[str, object] = field(default_factory=dict)  # LaunchRecord.key -> program: its texts, made when asked
    dropped: int = 0
    lines: bool = True  # look for the user's line behind each op
    op_count: int = 0  # with those that were dropped; the index of the next one
    launch_count: int = 0
    unlaunched: list[int] = field(default_factory=list)  # ops that the next launch will run
    start_ns: int = 0
    end_ns: int = 0
    meta: dict = field(default_factory=dict)  # mode, platform, device, versions, cores
    writing_ns: int = 0  # host time in which notes were made into records, beside the `record_ns` of the ops
    log: list = field(default_factory=list, repr=False, compare=False)
    writer: Any = field(default=None, repr=False, compare=False)  # has catch_up(): backend/writer.py

    def __post_init__(self) -> None:
        self.note = self.log.append  # each op calls it, and each array's end
        self.optimizers: dict[int, int] = {}  # id -> number in `steppers`

    def step_ends(self) -> list[int]:
        """The ends of the steps, by optimizer steps. Where several optimizers take turns (a GAN's two) a step ends with
        the one that came last in the first round."""
        of = self.steppers
        if len(of) != len(self.steps) or all(a <= b for a, b in zip(of, of[1:], strict=False)):
            return list(self.steps)  # one, or one after the other
        return [ns for ns, number in zip(self.steps, of, strict=True) if number == max(of)]

    def now(self) -> Trace:
        """What is recorded so far, while it goes on on another thread."""
        if self.writer is not None:
            self.writer.catch_up()
        found = copy.copy(self)
        found.__dict__.update({k: list(v) for k, v in vars(self).items() if v.__class__ is list}, writer=None, log=[])
        found.end_ns = found.end_ns or time.perf_counter_ns()
        return found

    def close(self) -> None:
        """Nothing will be noted any more: make all records, and forget how."""
        if self.writer is not None:
            self.writer.catch_up()
            self.writer = None

    def add(self, kind: str, record) -> None:
        """Append to `ops`, `launches`, `compiles`, `waits`, `live` or `held`, or count it as dropped."""
        records = getattr(self, kind)
        if len(records) < self.limit:
            records.append(record)
        else:
            self.dropped += 1


WRITTEN = ("ops", "launches", "live", "held", "programs", "dropped")


def _written(name: str) -> property:
    """A field that is brought up to date before it is read."""
    kept = f"_{name}"

    def read(self):
        if self.writer is not None:
            self.writer.catch_up()
        return getattr(self, kept)

    def write(self, value) -> None:
        setattr(self, kept, value)

    return property(read, write)


for _name in WRITTEN:
    setattr(Trace, _name, _written(_name))

active: Trace | None = None
_lock = threading.Lock()


def start(limit: int = 200_000, lines: bool = True) -> Trace:
    """Begin recording. One trace at a time; RuntimeError when one is active."""
    global active
    with _lock:
        if active is not None:
            whole = active.meta.get("whole")
            way = f"{whole}, so run it with `python`, or take its own profile out" if whole else "end the other one first"
            raise RuntimeError(f"a profile is already active: profiles do not nest, {way}")
        active = Trace(limit=limit, lines=lines, start_ns=time.perf_counter_ns())
        return active


def stop() -> Trace:
    """End recording and give the trace."""
    global active
    with _lock:
        trace, active = active, None
    if trace is None:
        raise RuntimeError("no profile is active")
    trace.end_ns = time.perf_counter_ns()
    return trace
