"""One recording from its begin to its end: what `tpu_lab.profile(...)` starts, as a block, a decorator or a call.

The session sets the mode, starts the trace, samples the clock, and puts everything back, whatever happened between.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import linecache
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Callable

from tpu_lab import errors
from tpu_lab import trace as _trace
from tpu_lab.trace import Trace

if TYPE_CHECKING:
    from tpu_lab.profile import Profile


class Session:
    """What `profile(...)` gives without a function: a context manager and a decorator with the same options."""

    def __init__(
        self, steps: int, warmup: int, mode: str | None, limit: int, lines: bool, name: str | None, new: Callable
    ) -> None:
        self._steps, self._warmup, self._mode, self._name = steps, warmup, mode, name
        self._limit, self._lines = limit, lines
        self._new = new  # makes the Profile
        self.where: dict | None = None  # file, line, end_line for the report, when the caller knows better
        self._stack: contextlib.ExitStack | None = None
        self._profile: Profile | None = None

    def __enter__(self) -> Profile:
        if self._steps != 1 or self._warmup:
            raise TypeError(
                "a with block runs once: give steps= and warmup= with a function, tpu_lab.profile(fn, steps=3)"
            )
        return self._begin(sys._getframe(1))

    def __exit__(self, kind, error, traceback) -> None:
        self._end(error)

    def __getattr__(self, name: str):
        """`p = tpu_lab.profile()`, then `with p:`: p stands for its Profile."""
        profile = self.__dict__.get("_profile")
        if name.startswith("_") and not name.startswith(("_repr", "_mime_")) or profile is None:
            raise AttributeError(f"{type(self).__name__!r} has no {name!r} before its block has run: with p: ...")
        return getattr(profile, name)

    def __repr__(self) -> str:
        return object.__repr__(self) if self._profile is None else repr(self._profile)

    def __call__(self, fn: Callable) -> Callable:
        """As a decorator: each call is profiled, `fn.profile` is the last one, the value goes through."""
        _runs_when_called(fn)

        @functools.wraps(fn)
        def profiled(*args, **kwargs):
            session = Session(
                self._steps, self._warmup, self._mode, self._limit, self._lines, self._name or fn.__name__, self._new
            )
            profiled.profile = session.run(fn, args, kwargs, keep=profiled)  # type: ignore[attr-defined]
            return profiled.profile.value  # type: ignore[attr-defined]

        profiled.profile = None  # type: ignore[attr-defined]
        return profiled

    def run(self, fn: Callable, args=(), kwargs=None, keep=None) -> Profile:
        """Call fn warmup + steps times, each call a step. keep: gets `.profile` even if fn raises."""
        _runs_when_called(fn)
        profile = self._begin(None, fn)
        trace = profile.trace
        if keep is not None:
            keep.profile = profile
        error: BaseException | None = None
        try:
            for call in range(self._warmup + self._steps):
                profile.value = fn(*args, **(kwargs or {}))
                last = call + 1 == self._warmup + self._steps
                _ended(trace, "call end", wait=last)  # the steps together take what their work takes
                if call + 1 == self._warmup:
                    _hook("launches", "drain")()  # the warm-up's device work is not the first step's
                    trace.marks.append(("warmup end", time.perf_counter_ns()))
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(error)
        return profile

    def _begin(self, frame, fn: Callable | None = None) -> Profile:
        importlib.import_module("torch._dynamo")  # seconds, once: PyTorch's meta kernels ask for it, and would inside the block
        profile = self._new()
        stack = contextlib.ExitStack()
        with stack:
            if self._mode is not None:
                stack.enter_context(_hook("state", "mode_scope")(self._mode))
            stack.enter_context(_hook("where", "watch_modules")())
            meta = {**describe(), "recording": True, **(self.where or where(frame, fn))}
            if self._name:
                meta["name"] = self._name
            profile.trace = _trace.start(self._limit, self._lines)
            profile.trace.meta.update(meta, cpu=[])
            _hook("live", "begin")(profile.trace)  # what is alive now is older than the profile
            stack.enter_context(_step_marks(profile.trace))
            stack.enter_context(_quick_switch())
            _cpu(profile.trace)
            self._stack, self._profile = stack.pop_all(), profile
        return profile

    def _end(self, error: BaseException | None) -> None:
        """Stop recording, wait for the last device times, restore the mode: whatever happened before, or happens here."""
        assert self._stack is not None and self._profile is not None
        trace = self._profile.trace
        if error is None and trace.unlaunched:  # the block's own deferred work belongs to the block
            with contextlib.suppress(Exception):  # its error belongs to whoever reads the value
                _hook("executor", "flush")("synchronize")
        elif trace.unlaunched:  # it runs later, if somebody reads its values: not within the block
            with contextlib.suppress(Exception):
                _hook("launches", "dropped")(trace)
        trace.marks.append(("block end", time.perf_counter_ns()))
        _cpu(trace)
        try:
            if error is not None:
                trace.meta["error"] = errors.named(error)
            _hook("launches", "drain")()
            _hook("live", "finish")(trace)
        finally:
            try:
                if _trace.active is trace:
                    _trace.stop()
                trace.close()
            finally:
                trace.meta.pop("recording", None)
                self._profile.forget_drawn()
                self._stack.close()
                self._stack = None


def step_ended(trace: Trace) -> None:
    """A step of a block has ended, says the user; RuntimeError when the block is not running."""
    if _trace.active is not trace:
        raise RuntimeError("p.step() ends a step of a block that runs: with tpu_lab.profile() as p: ... p.step()")
    _ended(trace, "step end")


def _ended(trace: Trace, what: str, wait: bool = False) -> None:
    _hook("executor", "flush")("call end" if what == "call end" else "mark")  # what was deferred is this step's
    if wait:
        _hook("launches", "drain")()
    trace.marks.append((what, time.perf_counter_ns()))
    _cpu(trace)


def _cpu(trace: Trace) -> None:
    """A sample of this thread's CPU time, by which metrics tell idle from Python."""
    trace.meta["cpu"].append((time.perf_counter_ns(), time.thread_time_ns()))


@contextlib.contextmanager
def _step_marks(trace: Trace):
    """CPU samples at the end of each optimizer step on this thread."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    owner = threading.get_ident()

    def sample(*_):
        if threading.get_ident() == owner and len(trace.meta["cpu"]) < trace.limit:
            _cpu(trace)

    handle = register_optimizer_step_post_hook(sample)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _quick_switch():
    """The thread that notes when a launch is ready needs the interpreter for a moment: Python's default lets it wait
    5 ms, which would be counted as device time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, 5e-5))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _hook(module: str, name: str) -> Callable:
    """A function of the backend, looked up when needed, so that importing this file starts no device."""
    return getattr(importlib.import_module(f"tpu_lab.backend.{module}"), name)


def describe() -> dict:
    """What runs the ops: mode, platform, compiler, versions, cores; words for the line of provenance."""
    import jax

    import tpu_lab
    from tpu_lab.backend import state

    device = jax.devices()[0]
    return {
        "mode": state.WORDS[state.mode()],
        "platform": device.platform,
        "device": device.device_kind,
        "compiler": f"XLA:{device.platform.upper()}",
        "jax": jax.__version__,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "version": tpu_lab.__version__,
    }


def where(frame, fn: Callable | None) -> dict:
    """File and lines of the block or the function, for the line of provenance."""
    if fn is not None:
        code = getattr(inspect.unwrap(fn), "__code__", None)
        if code is None:
            return {"name": getattr(fn, "__name__", type(fn).__name__)}
        lines = [line for _, _, line in code.co_lines() if line]
        where = {
            "file": code.co_filename,
            "line": code.co_firstlineno,
            "end_line": max(lines, default=code.co_firstlineno),
        }
        return where if code.co_name == "<lambda>" else {"name": code.co_name, **where}
    file, line = frame.f_code.co_filename, frame.f_lineno
    return {"file": file, "line": line, "end_line": _block_end(file, line)}


def _runs_when_called(fn: Callable) -> None:
    """A generator or a coroutine function runs nothing when it is called: say so, instead of "no op ran"."""
    for is_one, what in ((inspect.iscoroutinefunction, "an async function"), (inspect.isgeneratorfunction, "a generator function")):
        if is_one(fn):
            raise TypeError(
                f"tpu_lab.profile({getattr(fn, '__name__', 'fn')}): {what} runs nothing when it is called. Profile the code "
                "that drives it: with tpu_lab.profile() as p: ..."
            )


_parsing = threading.Lock()  # CPython 3.11's parser counts its depth for all threads as one


def _block_end(file: str, line: int) -> int:
    """The last line of the with statement that begins at `line`; `line` when the source is not to be had."""
    try:
        with _parsing:
            tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, SystemError):  # the last: a thread of the user's parsed at that moment
        return line
    ends = [n.end_lineno for n in ast.walk(tree) if isinstance(n, (ast.With, ast.AsyncWith)) and n.lineno == line]
    return max((e for e in ends if e), default=line)
