"""`tpu_lab.compare_modes(step)`: the same step in debug, strict, fused and compiled, from the same start.

Each mode begins with the same weights, optimizer state and random numbers, so that the losses can be compared; at the
end everything is as it was before the call. The native CPU runs a copy of the step, if the step can be copied.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Callable

import torch

from tpu_lab import errors, snapshot, splice, twin
from tpu_lab import trace as _trace
from tpu_lab.backend import forget
from tpu_lab.profile import Profile, profile
from tpu_lab.viz import modes as drawn
from tpu_lab.viz.mode_runs import Compared, Run
from tpu_lab.viz.view import View

MODES = ("debug", "strict", "fused", "compiled")


class Comparison(View):
    """The view of the modes; `.profiles["fused"]` is the Profile of one, `.rows` the table as a DataFrame."""

    def __init__(self, record: Compared, profiles: dict[str, Profile]) -> None:
        view = drawn.draw(record)
        super().__init__(view.name, view.title, view.finding, view._rows, view._lines, view._body)
        self.profiles = profiles


def compare_modes(
    fn: Callable,
    *args,
    steps: int = 5,
    warmup: int = 2,
    state: Any = None,
    cpu: Callable | bool | None = None,
    modes: str | tuple[str, ...] = MODES,
    name: str | None = None,
    flops: float | None = None,
    peak_flops: float | None = None,
    **kwargs,
) -> Comparison:
    """Call fn(*args, **kwargs) warmup + steps times in each mode, and compare them: after the
    warm-up the modes take turns, step by step, each from where its last step ended.

    fn: one step, best one that returns its loss. "compiled" runs torch.compile(fn); where that fails, its row says why.
    state: what fn changes (modules, optimizers, tensors, containers of them) beyond what is found in fn's closure, the
    globals it names and its arguments. All of it, and the random states, are put back before each mode and at the end.
    cpu: None runs a copy of the step on the native CPU, if fn can be copied; a function of yours that runs the same
    step on the CPU, called with the same arguments' copies; False for no CPU line.
    modes: which of debug, strict, fused, compiled. name, flops, peak_flops: as for tpu_lab.profile.
    An exception of fn goes through, state restored. RuntimeError inside an active profile; ValueError for a wrong mode.
    """
    if isinstance(modes, str):
        modes = (modes,)
    if not modes:
        raise ValueError(f"compare_modes(modes=()): choose some of {', '.join(MODES)}")
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"compare_modes(modes=...): {mode!r} is none of {', '.join(MODES)}")
    if steps < 1 or warmup < 0:
        raise ValueError(f"compare_modes(steps={steps}, warmup={warmup}): at least one step and no negative warm-up")
    if not callable(fn):
        raise TypeError(f"compare_modes(fn, ...) needs a function to call, not a {type(fn).__name__}")
    if _trace.active is not None:
        raise RuntimeError("compare_modes inside an active profile: end the profile first, each mode has its own")
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)  # what torch.compile wrapped
    torch.tpu.synchronize()
    found = snapshot.find(fn, args, kwargs, state, cpu)
    restore = snapshot.save(found)
    every = (fn, args, kwargs, state)
    turns = [_Turns(mode, every, restore, {"name": name or _name(fn), "flops": flops, "peak_flops": peak_flops}) for mode in modes]
    native = None if cpu is False else _Native(cpu or None, fn, args, kwargs)
    try:
        # All compile before any step is timed; the last warm-up call is a turn by itself, begun from a put-back state as
        # the timed ones are, for which there may be another program.
        for calls in (warmup - 1, 1) if warmup > 1 else (warmup,):
            for each in (*turns, native):
                if each is not None and calls:
                    each.run(calls, warm=True)
        for _ in range(steps):  # then they take turns: a busy machine is busy for all
            for each in (*turns, native):
                if each is not None:
                    each.run(1)
    finally:
        restore()
        for turn in turns:
            turn.close()
    profiles = {t.mode: t.profile() for t in turns if t.traces}
    record = Compared(
        tuple(t.result(profiles.get(t.mode), sum(o.own for o in turns if o is not t)) for t in turns), None if native is None else native.result(warmup), steps, warmup,
        _optimizer(found), len(found.iterators),
    )  # fmt: skip
    return Comparison(record, profiles)


def _name(fn) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _optimizer(found: snapshot.Found) -> str:
    """`AdamW`, when there is one kind."""
    kinds = {type(o).__name__ for o in found.optimizers}
    return kinds.pop() if len(kinds) == 1 else "optimizer"


def _bytes(found: snapshot.Found) -> int:
    """Device bytes of what a mode has for itself: optimizer state and gradients; the weights are one set for all."""
    own = [v for o in found.optimizers for state in o.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    own += [t.grad for t in found.tensors.values() if t.is_leaf and t.grad is not None]
    return sum(t.nbytes for t in own if t.device.type == "tpu")


class _Turns:
    """One mode: its own state between its turns, and the traces of them."""

    def __init__(self, mode: str, every, restore, options) -> None:
        self.mode, self.every, self.restore, self.options = mode, every, restore, options
        self.fn, self.args, self.kwargs, _ = every
        self.call = forget.compiled(self.fn) if mode == "compiled" else self.fn
        self.traces: list[_trace.Trace] = []
        self.given: list = []  # what the step gave, not read yet
        self.results: list = []
        self.last: Any = None
        self.failed = ""
        self.own = 0  # device bytes of its state while others run

    def run(self, calls: int, warm: bool = False) -> None:
        """Put this mode's state in place, call the step, and keep what came of it."""
        if self.failed:
            return
        self.restore()
        try:
            with contextlib.nullcontext() if self.mode == "compiled" else _nothing_compiled():
                made = profile(self._step, steps=calls, mode="strict" if self.mode == "compiled" else self.mode, **self.options)
        except Exception as error:
            if self.mode != "compiled":
                raise
            self.failed, self.traces = _why(error), []
            return
        self.results += [_read(one) for one in self.given]  # after the recording: the step itself reads nothing
        self.given.clear()
        if warm:
            made.trace.marks.append(("warmup end", made.trace.marks[-2][1]))
        self.traces.append(made.trace)
        self.last = made.value
        found = snapshot.find(*self.every)
        self.restore = snapshot.save(found)
        self.own = _bytes(found)

    def _step(self):
        value = self.call(*self.args, **self.kwargs)
        torch.tpu.synchronize()  # a step ends when its work is done, in each mode
        self.given.append(_one(value))
        return value

    def close(self) -> None:
        """It is not called again."""
        if self.call is not self.fn:
            forget.forget(self.call)
            self.call = self.fn

    def profile(self) -> Profile:
        """All turns as one profile."""
        made = Profile(splice.join(self.traces), flops=self.options["flops"], peak_flops=self.options["peak_flops"])
        made.trace.meta.update(_place(self.fn), mode=self.mode)
        made.value = self.last
        return made

    def result(self, made: Profile | None, parked: int) -> Run:
        """What the view shows of it; parked: device bytes that other modes' state held meanwhile."""
        if made is None:
            return Run(self.mode, None, failed=self.failed)
        return Run(self.mode, made.metrics, _compared(self.results, self.last), parked=parked)


def _place(fn) -> dict:
    """The user's lines: the step that was profiled is a wrapper of ours."""
    from tpu_lab.session import where

    place = {k: v for k, v in where(None, getattr(fn, "_torchdynamo_orig_callable", fn)).items() if k != "name"}
    return {"file": "", "line": 0, "end_line": 0, **place}

def _one(value):
    """The loss: what the step returned, if it is one number, or the first such in what it returned; else None."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and not leaf.is_complex():
            return leaf.detach()
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            return leaf
    return None


def _read(one) -> float | None:
    """A loss as a number of Python's."""
    return None if one is None else float(one)


def _compared(results: list, last) -> tuple:
    """A number a step; without one, the last call's tensors, copied."""
    if all(r is not None for r in results):
        return tuple(results)
    leaves = [v for v in torch.utils._pytree.tree_leaves(last) if isinstance(v, torch.Tensor) and v.dtype.is_floating_point]
    return tuple(v.detach().cpu().double().numpy() for v in leaves)


@contextlib.contextmanager
def _nothing_compiled():
    """What fn itself compiled runs eagerly inside: the eager modes are about ops."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _why(error: Exception) -> str:
    """The line of a compiler's error that says something."""
    lines = [line.strip() for line in errors.text(error).splitlines() if line.strip()] or [type(error).__name__]
    told = lines[1] if len(lines) > 1 and lines[0].endswith("raised:") else lines[0]
    return told if told.startswith(type(error).__name__) else f"{type(error).__name__}: {told}"


class _Native:
    """The step on the CPU: the caller's function, else a copy of fn."""

    def __init__(self, cpu, fn, args, kwargs) -> None:
        self.own = callable(cpu)
        self.times: list[int] = []
        self.results: list = []
        self.last: Any = None
        self.failed = ""
        try:
            copied, self.args, self.kwargs = twin.on_cpu((lambda: None) if self.own else fn, args, kwargs)
            self.call = cpu if self.own else copied
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        first = (errors.text(error).splitlines() or [type(error).__name__])[0]
        self.failed = f"{first}: give cpu=, a function that runs the same step on the CPU"

    def run(self, calls: int, warm: bool = False) -> None:
        """Call it; a copy that does not run, or that runs on "tpu", is no reference."""
        if self.failed:
            return
        try:
            with _nothing_compiled():
                trace = _trace.start()
                try:
                    for _ in range(calls):
                        start = time.perf_counter_ns()
                        self.last = self.call(*self.args, **self.kwargs)
                        self.times.append(time.perf_counter_ns() - start)
                        self.results.append(_read(_one(self.last)))
                finally:
                    _trace.stop()
            if trace.ops or trace.launches:
                raise RuntimeError("the step made tensors on 'tpu' by itself")
        except Exception as error:
            if self.own:
                raise
            self._fail(error)

    def result(self, warmup: int) -> Run:
        """Its times after the warm-up."""
        if self.failed:
            return Run("native CPU", None, failed=self.failed)
        return Run("native CPU", None, _compared(self.results, self.last), times=tuple(self.times[warmup:]))
