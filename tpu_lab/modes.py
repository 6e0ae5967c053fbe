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

from tpu_lab import snapshot
from tpu_lab import trace as _trace
from tpu_lab.profile import Profile, profile
from tpu_lab.viz import modes as drawn
from tpu_lab.viz.modes import Run
from tpu_lab.viz.view import View

MODES = ("debug", "strict", "fused", "compiled")


class Comparison(View):
    """The view of the modes; `.profiles["fused"]` is the Profile of one, `.rows` the table as a DataFrame."""

    def __init__(self, record: drawn.Compared, profiles: dict[str, Profile]) -> None:
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
    modes: tuple[str, ...] = MODES,
    name: str | None = None,
    flops: float | None = None,
    peak_flops: float | None = None,
    **kwargs,
) -> Comparison:
    """Call fn(*args, **kwargs) warmup + steps times in each mode, one mode after the other, and compare them.

    fn: one step, best one that returns its loss. "compiled" runs torch.compile(fn); where that fails, its row says why.
    state: what fn changes (modules, optimizers, tensors, containers of them) beyond what is found in fn's closure, the
    globals it names and its arguments. All of it, and the random states, are put back before each mode and at the end.
    cpu: None runs a copy of the step on the native CPU, if fn can be copied; a function of yours that runs the same
    step on the CPU, called with the same arguments' copies; False for no CPU line.
    modes: which of debug, strict, fused, compiled. name, flops, peak_flops: as for tpu_lab.profile.
    An exception of fn goes through, state restored. RuntimeError inside an active profile; ValueError for a wrong mode.
    """
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"compare_modes(modes=...): {mode!r} is none of {', '.join(MODES)}")
    if steps < 1 or warmup < 0:
        raise ValueError(f"compare_modes(steps={steps}, warmup={warmup}): at least one step and no negative warm-up")
    if not callable(fn):
        raise TypeError(f"compare_modes(fn, ...) needs a function to call, not a {type(fn).__name__}")
    if _trace.active is not None:
        raise RuntimeError("compare_modes inside an active profile: end the profile first, each mode has its own")
    options = {"steps": steps, "warmup": warmup, "name": name or _name(fn), "flops": flops, "peak_flops": peak_flops}
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)  # what torch.compile wrapped
    torch.tpu.synchronize()
    found = snapshot.find(fn, args, kwargs, state, cpu)
    restore = snapshot.save(found)
    runs: list[Run] = []
    profiles: dict[str, Profile] = {}
    try:
        for mode in modes:
            restore()
            run, made = _run(mode, fn, args, kwargs, options)
            runs.append(run)
            if made is not None:
                profiles[mode] = made
        restore()
        native = None if cpu is False else _native(cpu or None, fn, args, kwargs, warmup + steps, warmup)
    finally:
        restore()
    record = drawn.Compared(tuple(runs), native, steps, warmup, _optimizer(found), len(found.iterators))
    return Comparison(record, profiles)


def _name(fn) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _optimizer(found: snapshot.Found) -> str:
    """`AdamW`, when there is one kind."""
    kinds = {type(o).__name__ for o in found.optimizers}
    return kinds.pop() if len(kinds) == 1 else "optimizer"


def _run(mode: str, fn, args, kwargs, options) -> tuple[Run, Profile | None]:
    """One mode; a failure of torch.compile is its result."""
    if mode != "compiled":
        with _nothing_compiled():
            made, results = _profiled(fn, args, kwargs, mode, options)
        return Run(mode, made.metrics, results), made
    try:
        made, results = _profiled(torch.compile(fn), args, kwargs, "strict", options)
    except Exception as error:
        return Run(mode, None, (), _why(error)), None
    made.trace.meta["mode"] = "compiled"
    return Run(mode, made.metrics, results), made


def _profiled(fn, args, kwargs, mode, options) -> tuple[Profile, tuple]:
    results: list = []

    def step():
        value = fn(*args, **kwargs)
        torch.tpu.synchronize()  # a step ends when its work is done, in each mode
        results.append(_number(value))
        return value

    made = profile(step, mode=mode, **options)
    made.trace.meta.update(_place(fn))
    return made, _compared(results, made.value)


def _place(fn) -> dict:
    """The user's lines: the step that was profiled is a wrapper of ours."""
    from tpu_lab.profile import _where

    where = {k: v for k, v in _where(None, getattr(fn, "_torchdynamo_orig_callable", fn)).items() if k != "name"}
    return {"file": "", "line": 0, "end_line": 0, **where}


def _number(value) -> float | None:
    """The loss: what the step returned, if it is one number, or the first such in what it returned."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and not leaf.is_complex():
            return float(leaf.item())
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            return float(leaf)
    return None


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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = lines[1] if len(lines) > 1 and lines[0].endswith("raised:") else lines[0]
    return told if told.startswith(type(error).__name__) else f"{type(error).__name__}: {told}"


def _native(cpu, fn, args, kwargs, calls: int, warmup: int) -> Run:
    """The step on the CPU: the caller's function, else a copy of fn."""
    from tpu_lab import twin

    results: list = []
    times: list[int] = []
    try:
        copied, args, kwargs = twin.on_cpu(fn if cpu in (None, True) else (lambda: None), args, kwargs)
        run = copied if cpu in (None, True) else cpu
        with _nothing_compiled():
            trace = _trace.start()
            try:
                for _ in range(calls):
                    start = time.perf_counter_ns()
                    value = run(*args, **kwargs)
                    times.append(time.perf_counter_ns() - start)
                    results.append(_number(value))
                    if trace.ops or trace.launches:
                        raise RuntimeError("the step made tensors on 'tpu' by itself")
            finally:
                _trace.stop()
    except Exception as error:
        if cpu not in (None, True):
            raise
        hint = "give cpu=, a function that runs the same step on the CPU"
        return Run("native CPU", None, (), f"{str(error).splitlines()[0] if str(error) else type(error).__name__}: {hint}")
    return Run("native CPU", None, _compared(results, value), times=tuple(times[warmup:]))
