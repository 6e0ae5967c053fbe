"""The TPU compiler's view without a TPU: `tpu_lab.compile_for(fn, *args, chip="v6e")` and `Profile.on("v6e")`.

The programs are those that the same code launches: recorded by a profile, or by a rehearsal in which nothing runs, so a
model for a large chip needs neither its memory nor its time here. They are lowered for "tpu" and given to XLA:TPU in a
child process (aot_compiler.py); whose bytes are where is worked out in placement.py.

What it may say: what XLA:TPU, version X, compiled for a chip; layouts, placement, fits or not; a roofline bound. A
step time nobody measured, so none is given.
"""

from __future__ import annotations

import functools
import io
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tpu_lab import aot_compiler, garbage, padding
from tpu_lab import fusions as fused
from tpu_lab.aot_compiler import Answer, CompileError
from tpu_lab.kept import kept
from tpu_lab.placement import Placed, is_data
from tpu_lab.targets import Target, target
from tpu_lab.trace import LaunchRecord, OpRecord, Trace

if TYPE_CHECKING:
    from tpu_lab.metrics import Metrics

MOST = 12  # programs of one step: more is an eager run, op by op
_ESTIMATE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*\"estimated_cycles\":\"(\d+)\"", re.M)
__all__ = ["CompileError", "Compiled", "Part", "compile_for", "on"]


@dataclass(frozen=True)
class Part:
    """One program of a step, as XLA:TPU compiled it. placed: None when the compiler left no text of it."""

    launches: tuple[LaunchRecord, ...]  # of it in the step
    ops: tuple[OpRecord | None, ...]  # of the first launch
    answer: Answer
    placed: Placed | None
    split: tuple[int, ...] = ()  # arguments whose first dimension is split over the devices of a slice
    whole: str = ""  # why none is, on a slice

    @property
    def launch(self) -> LaunchRecord:
        """The first one."""
        return self.launches[0]

    @property
    def times(self) -> int:
        return len(self.launches)


class Compiled:
    """A step as XLA:TPU compiles it for a chip. Alone on a cell's last line it shows its view.

    parts: its programs in order. trace: the records of the ops. `hlo` is the largest program's text, `rows` the
    buffers as a DataFrame, `fusions` the groups on the source's lines.
    """

    def __init__(self, trace: Trace, goal: Target, parts: tuple[Part, ...], beside: Metrics | None = None) -> None:
        self.trace, self.target, self.parts, self._beside = trace, goal, parts, beside

    @property
    def main(self) -> Part:
        """The program that needs the most memory."""
        return max(self.parts, key=lambda p: p.placed.hbm if p.placed else 1 << 62)

    @property
    def hlo(self) -> str:
        """The optimised TPU HLO of the largest program: after fusion, layout and buffer assignment."""
        return self.main.answer.hlo

    @property
    def fits(self) -> bool:
        """Did the compiler find room for all programs?"""
        return not any(p.answer.refused for p in self.parts)

    @property
    def hbm(self) -> int:
        """Bytes of HBM that the largest program needs."""
        return max((p.placed.hbm for p in self.parts if p.placed), default=0)

    @property
    def vmem(self) -> int:
        """Bytes of VMEM that the largest program needs at most."""
        return max((p.placed.vmem for p in self.parts if p.placed), default=0)

    @property
    def bound_ns(self) -> float:
        """No step is faster: HBM bytes and matmul FLOPs of each program at the chip's published peaks."""
        return sum(p.times * max(p.placed.bound_ns) for p in self.parts if p.placed)

    @functools.cached_property
    def kinds(self) -> list[padding.Kind]:
        """The buffers of all programs by kind, largest first."""
        return padding.kinds(b for p in self.parts if p.placed for b in p.placed.buffers if b.owner != "other")

    @functools.cached_property
    @garbage.paused()
    def view(self):
        """The view that it shows itself as."""
        from tpu_lab.viz import v6e

        return v6e.draw(self)

    @property
    def rows(self):
        """All buffers as a pandas DataFrame, largest first."""
        return self.view.rows

    @functools.cached_property
    @garbage.paused()
    def groups(self) -> tuple[fused.Group, ...]:
        """What XLA:TPU joined, as `tpu_lab.fusions.Group`s in running order, those of each launch of the step; their
        times are bounds by the roofline."""
        records, programs = {op.index: op for op in self.trace.ops}, []
        for part in self.parts:
            placed, many = part.placed, self.target.devices if part.split else 1
            if placed is None:
                continue
            for launch in part.launches:
                ops = [records.get(i) for i in launch.ops]
                apart = fused.taken_apart(placed.module, ops, launch, f"XLA:TPU {self.target.name}")
                programs.append(replace(apart, groups=tuple(self._bounded(placed, g, many) for g in apart.groups)))
        return fused.finished(sorted(programs, key=lambda p: p.launch.index), records)

    @functools.cached_property
    def cpu_groups(self) -> tuple[fused.Group, ...] | None:
        """The groups that XLA:CPU, which ran them, made of the same launches; None when it did not."""
        if self._beside is None or self.trace.meta.get("platform") != "cpu":
            return None
        ours = {launch.index for part in self.parts for launch in part.launches}
        return tuple(g for g in fused.of(self._beside) if g.launch in ours)

    def _bounded(self, placed: Placed, group: fused.Group, many: int) -> fused.Group:
        moving = sum(placed.moved.get(group.name, (0, 0))) / self.target.bandwidth
        return replace(group, ns=1e9 * max(moving, group.flops / many / self.target.flops), timing="bound")

    @functools.cached_property
    def fusions(self):
        """The groups on the source's lines; those of the CPU that ran the same code on the left, if it did."""
        from tpu_lab.metrics import Metrics
        from tpu_lab.viz import fusions as drawn

        note = f"{self.target.name} compiled ahead of time by libtpu {self.main.answer.libtpu}, nothing ran on a TPU"
        if self._beside is not None:
            return drawn.draw(self._beside, groups=self.cpu_groups, right=self.groups, note=note)
        return drawn.draw(Metrics(self.trace), groups=self.groups, note=note)

    @functools.cached_property
    def estimates(self) -> dict[str, int]:
        """With deep=True: the compiler's own estimate for each instruction, in cycles; it has none for gathers,
        scatters, collectives, copies and Pallas kernels. RuntimeError without deep=True."""
        texts = [p.answer.deep for p in self.parts]
        if not all(texts):
            raise RuntimeError("the compiler estimates only what it makes machine code of: compile_for(..., deep=True)")
        return {name: int(cycles) for text in texts for name, cycles in _ESTIMATE.findall(text) if int(cycles)}

    def __getattr__(self, name: str):
        if name.startswith("_") or name not in ("text", "lines", "html", "title", "finding", "body"):
            raise AttributeError(f"Compiled has no {name!r}: it has view, rows, parts, hlo, fits, hbm, vmem, bound_ns, groups")
        return getattr(self.view, name)

    def __repr__(self) -> str:
        return repr(self.view)

    def __str__(self) -> str:
        return str(self.view)

    def _repr_html_(self) -> str:
        return self.view.html

    def _mime_(self) -> tuple[str, str]:
        return self.view._mime_()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return self.view._repr_mimebundle_(include, exclude)


def compile_for(
    fn: Callable, *args, chip: str = "v6e", deep: bool = False, limit: float | None = None, name: str | None = None, **kwargs
) -> Compiled:  # fmt: skip
    """What XLA:TPU makes of `fn(*args, **kwargs)`, a training step or a forward pass on "tpu". Nothing runs on any device.

    chip: v4, v5e, v5p, v6e, v7x, or a slice such as "v6e:2x4": then the batch is split over its devices, and all sizes
    are those of one. deep: go on to machine code, for the compiler's own
    estimate of each fusion (slow). limit: seconds a program may take. name: what the report calls it.

    fn is called twice with tensors that have shapes and no values, and the second call is compiled: in the first an
    optimizer makes its state. Parameters, gradients and optimizer state are afterwards what they were before. Reading a
    value inside fn (`loss.item()`, print) raises. A model too big for this machine is made without memory:
    `with torch.device("meta"): model = Model()`, then `model.to_empty(device="tpu")`.

    ValueError for an unknown chip; CompileError when there is no answer. A program that does not fit is an answer.
    """
    from tpu_lab.backend import rehearsal
    from tpu_lab.session import describe, where

    goal = target(chip)
    aot_compiler.versions()
    if not callable(fn):
        raise TypeError(f"compile_for(fn, *args) needs a function to call, not a {type(fn).__name__}")
    with rehearsal.rehearse() as trace, kept(fn, args, kwargs):
        trace.meta.update({**describe(), **where(None, fn), "mode": "fused"})
        fn(*args, **kwargs)
        _flush()
        first = len(trace.launches), time.perf_counter_ns()
        value = fn(*args, **kwargs)  # held until its program is recorded
        _flush()
        del value
    if name:
        trace.meta["name"] = name
    if len(trace.launches) > first[0]:
        trace = _since(trace, *first)
    if not trace.launches:
        raise ValueError(
            "no op of the function reached device 'tpu': move the model and its inputs there first, model.to('tpu')"
        )
    return _compile(trace, trace.launches, goal, deep, limit)


def _since(trace: Trace, launch: int, start: int) -> Trace:
    """The part of a rehearsal from a moment and a launch on: one call, so that what the views count is one step's."""
    return replace(
        trace, start_ns=start, launches=trace.launches[launch:], ops=[r for r in trace.ops if r.time_ns >= start],
        compiles=[r for r in trace.compiles if r.launch >= launch], waits=[r for r in trace.waits if r.time_ns >= start],
        steps=[ns for ns in trace.steps if ns >= start], live=[], held=[],
    )  # fmt: skip


def on(profile, chip: str = "v6e", deep: bool = False, limit: float | None = None) -> Compiled:
    """What XLA:TPU makes of the programs that a profile's typical step launched; see `compile_for`."""
    goal = target(chip)
    aot_compiler.versions()
    m = profile.metrics
    launches = m.launches_in(m.span) or list(profile.trace.launches)
    if not launches:
        raise ValueError("the profile has no launch: nothing ran on 'tpu' in it")
    return _compile(profile.trace, launches, goal, deep, limit, m)


@garbage.paused()
def _compile(trace: Trace, launches, goal: Target, deep: bool, limit: float | None, beside=None) -> Compiled:
    by_index = {op.index: op for op in trace.ops}
    first: dict[str, LaunchRecord] = {}
    every: dict[str, list[LaunchRecord]] = {}
    for launch in launches:
        every.setdefault(launch.key, []).append(launch)
        first.setdefault(launch.key, launch)
    if len(first) > MOST:
        modes = ", ".join(sorted({r.mode for r in first.values()}))
        raise ValueError(
            f"the step runs {len(first)} different programs ({modes} mode): record it in fused mode, "
            'tpu_lab.profile(step, mode="fused"), then it is one or a few'
        )
    first = _worth(first)
    parts = []
    for key, launch in first.items():
        program: Any = trace.programs.get(key)
        if program is None or not hasattr(program, "lower"):
            raise ValueError("the profile was read from a file: its programs are not there any more, record it again")
        ops = tuple(by_index.get(i) for i in launch.ops)
        split, whole = _inputs(program, goal, launch.mode)
        many = goal.devices if split else 1
        answer = aot_compiler.ask(_bytecode(program, split, many), goal, _options(program), deep, limit, many)
        placed = None
        if answer.hlo and answer.buffers:
            leaves = [name for name, _ in program.view.leaves]
            placed = Placed(answer.hlo, answer.buffers, goal, ops, launch.flops // many, leaves)
        if beside is None:
            program.compiled = _Text(answer.hlo)  # it never ran: this is what was made of it
        parts.append(Part(tuple(every[key]), ops, answer, placed, split, whole))
    return Compiled(trace, goal, tuple(parts), beside)


@dataclass(frozen=True)
class _Text:
    """Stands for an executable where only its text is wanted."""

    hlo: str

    def as_text(self) -> str:
        return self.hlo


def _worth(first: dict[str, LaunchRecord]) -> dict[str, LaunchRecord]:
    """Without the programs of a few scalars that surround a step, if there is a real one: by its FLOPs, ops or bytes."""
    most = max(r.bytes for r in first.values())
    return {k: r for k, r in first.items() if r.flops or len(r.ops) > 8 or 10 * r.bytes >= most}


def _inputs(program, goal: Target, mode: str) -> tuple[tuple[int, ...], str]:
    """(arguments that hold a batch, which a slice of chips splits, why there is none): data parallelism by XLA's own
    partitioner. An input is read as data, is not written, and has a first dimension that divides."""
    if goal.devices <= goal.chip.devices:
        return (), ""
    if mode != "fused":
        return (), "only what fused mode records is split" if mode == "compiled" else "a single op is not split"
    found, sizes = [], set()
    for i, (name, _) in enumerate(program.view.leaves):
        shape = program.avals[2 + i].shape
        if i not in program.view.donated and is_data(name) and shape and shape[0]:
            sizes.add(shape[0])
            if shape[0] % goal.devices == 0:
                found.append(i)
    if found:
        return tuple(found), ""
    first = " or ".join(map(str, sorted(sizes)[:3]))
    return (), f"no input's first dimension ({first}) divides by {goal.devices}" if sizes else "the program reads no input"


def _bytecode(program, split: tuple[int, ...] = (), many: int = 1) -> bytes:
    """StableHLO for a TPU as MLIR bytecode. split: arguments whose first dimension is split over `many` devices; all
    others are whole on each. Its locations carry the scopes of the ops, and no Python lines: these would
    make a new program of an old one when a line above it is added."""
    import jax
    from jax._src import config
    from jax.sharding import AbstractMesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    buffer = io.BytesIO()
    with config.traceback_in_locations_limit(0):
        if split:
            mesh = AbstractMesh((many,), ("devices",))
            avals = [
                jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P("devices" if n - 2 in split else None)))
                if a.shape else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P()))
                for n, a in enumerate(program.avals)
            ]  # fmt: skip
            lowered = program.call.trace(*avals).lower(lowering_platforms=("tpu",))
        else:
            lowered = program.lower("tpu")
        module = lowered.compiler_ir("stablehlo")
    module.operation.write_bytecode(file=buffer)
    return buffer.getvalue()


def _options(program) -> dict:
    """The XLA options of the program, those that a user asked for."""
    return {k: v for k, v in dict(getattr(program.view, "options", ())).items() if str(k).startswith("xla_")}


def _flush() -> None:
    from tpu_lab.backend import executor

    executor.flush("synchronize")

