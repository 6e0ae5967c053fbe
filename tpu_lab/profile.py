"""`tpu_lab.profile()`: record a block, a function or a call, and get a report that shows itself.

    with tpu_lab.profile() as p:        p = tpu_lab.profile(step, x, y, steps=10)        @tpu_lab.profile()
        train()                                                                          def train(): ...
    p

A `Profile` holds a Trace (tpu_lab/trace.py) and its views; it never holds a tensor. What is shown is computed from
the records when it is asked for.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import linecache
import sys
import time
from typing import Any, Callable

from tpu_lab import trace as _trace
from tpu_lab.trace import Trace

MODES = ("fused", "strict", "debug")
VIEWS = ("summary", "ops", "fusions", "cache", "memory", "roofline")


class Profile:
    """One recording and its views: `summary`, `ops`, `cache`. Alone on a cell's last line it shows the summary.

    trace: the records. value: what the profiled function returned, in the call form. The block's exception, if one
    ended it, is named in the report; it is never swallowed.
    """

    def __init__(
        self, trace: Trace | None = None, *, flops: float | None = None, peak_flops: float | None = None
    ) -> None:
        self.trace = Trace(meta={"recording": True}) if trace is None else trace
        self.value: Any = None
        self._flops, self._peak_flops = flops, peak_flops

    @functools.cached_property
    def metrics(self):
        """The numbers (tpu_lab.metrics.Metrics): times in ns, sizes in bytes, work in FLOPs."""
        from tpu_lab.metrics import Metrics

        return Metrics(self.trace, self._peak(), self._flops)

    def _peak(self):
        from tpu_lab import chips

        meta = self.trace.meta
        if self._peak_flops is not None:
            return chips.given(self._peak_flops, meta.get("platform", "cpu"), meta.get("device", ""))
        if "peak" in meta:
            return chips.Peak(**meta["peak"])
        if not any(r.flops for r in self.trace.launches) and self._flops is None:
            return None  # nothing to divide: no reason to measure this machine
        return chips.peak(meta.get("platform", "cpu"), meta.get("device", ""))

    def view(self, name: str, limit: int | None = None, sort: str | None = None):
        """A view by name, with at most `limit` rows before a fold, sorted by `sort` (views that have orders)."""
        if name == "diff":
            raise ValueError("the diff view compares two profiles: before.diff(after)")
        if name not in VIEWS:
            raise ValueError(f"no view {name!r}: there are {', '.join(VIEWS)}")
        drawn_by = importlib.import_module(f"tpu_lab.viz.{name}")
        return drawn_by.draw(self.metrics, limit=limit, sort=sort)

    @staticmethod
    def orders(name: str) -> tuple[str, ...]:
        """The values of `sort` that a view knows."""
        return tuple(getattr(importlib.import_module(f"tpu_lab.viz.{name}"), "SORTS", ()))

    @functools.cached_property
    def summary(self):
        """Where the time went, in one screen."""
        return self.view("summary")

    @functools.cached_property
    def ops(self):
        """Every ATen call in order; `p.ops.rows` is the DataFrame."""
        return self.view("ops")

    @functools.cached_property
    def fusions(self):
        """The source lettered by fusion group; what each group holds, what it saved, and why it ended."""
        return self.view("fusions")

    def fusions_measured(self, runs: int = 5):
        """The fusions view with measured times (CPU): the step's programs run again on zeros under jax's profiler."""
        from tpu_lab import measured

        return measured.fusions_view(self.metrics, runs)

    @functools.cached_property
    def cache(self):
        """Hits, misses and disk hits by call site, and why each miss happened."""
        return self.view("cache")

    def marked(self, picked: dict | None = None):
        """Every view in one page, with what is picked marked in each: `p.marked({"op": 17})`, `{"line": "model.py:54"}`,
        `{"fusion": "A"}`. An op brings its line and its fusion along."""
        from tpu_lab.viz import linked

        return linked.draw(self.metrics, [self.view(name) for name in VIEWS if name != "summary"], picked)

    def ui(self, picked: dict | None = None):
        """For marimo: tables to pick an op, a line or a fusion from; its value goes to `marked`.

        `picked = p.ui()` in one cell, `p.marked(picked.value)` in the next. The value is a dict: op, line, fusion."""
        from tpu_lab import ui

        return ui.picker(self, picked)

    def diff(self, other: Profile):
        """What changed from this profile to `other`, and what of it is above noise; its `title` says it in a sentence."""
        from tpu_lab.viz import diff

        if not isinstance(other, Profile):
            raise TypeError(f"diff compares two profiles, before.diff(after), not a profile and a {type(other).__name__}")
        return diff.draw(self.metrics, other.metrics)

    def to_text(self, path) -> None:
        """What a terminal shows, without colours."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{self}\n")

    @functools.cached_property
    def memory(self):
        """Live bytes over program order, and who holds what at the peak."""
        return self.view("memory")

    @functools.cached_property
    def roofline(self):
        """FLOPs per byte of each cost, under this machine's measured roofs or the chip's published ones."""
        return self.view("roofline")

    def on(self, chip: str = "v6e", deep: bool = False, limit: float | None = None):
        """What XLA:TPU makes of the same programs, without a TPU: a tpu_lab.aot.Compiled that shows itself.

        chip: v4, v5e, v5p, v6e, v7x, or a slice such as "v6e:2x4". deep, limit: see `tpu_lab.compile_for`.
        """
        from tpu_lab import aot

        return aot.on(self, chip, deep, limit)

    def chip_view(self, chip: str, rows: int | None = None):
        """The view of `on(chip)` with at most `rows` kinds of buffers; when there is none, a view that says why."""
        from tpu_lab import aot
        from tpu_lab.viz import v6e

        try:
            return v6e.draw(self.on(chip), limit=rows)
        except (aot.CompileError, ValueError) as error:
            return v6e.said(str(error))

    def to_html(self, path) -> None:
        """One file: works offline, holds no script."""
        from tpu_lab import export

        export.to_html(self, path)

    def to_json(self, path) -> None:
        """All records and the summary's numbers, with a schema version. `Profile.from_json` reads it back."""
        from tpu_lab import export

        export.to_json(self, path)

    @classmethod
    def from_json(cls, path) -> Profile:
        """The profile that `to_json` wrote; ValueError for another file or a newer schema."""
        from tpu_lab import export

        trace = export.read_json(path)
        return cls(trace, flops=trace.meta.get("flops"))

    def to_csv(self, path, view: str = "ops") -> None:
        """The rows of a view."""
        self.view(view).rows.to_csv(path, index=False)

    def to_parquet(self, path, view: str = "ops") -> None:
        """The rows of a view; needs pyarrow."""
        self.view(view).rows.to_parquet(path, index=False)

    def to_perfetto(self, path) -> None:
        """A timeline in Chrome's trace format for ui.perfetto.dev; a path that ends in .gz is compressed."""
        from tpu_lab import perfetto

        perfetto.write(self.trace, self.metrics, path)

    def __repr__(self) -> str:
        return repr(self._shown())

    def __str__(self) -> str:
        return str(self._shown())

    def _shown(self):
        """A recording that goes on is drawn, not kept."""
        return Profile(Trace(meta={"recording": True})).summary if self.trace.meta.get("recording") else self.summary

    def _repr_html_(self) -> str:
        return self._shown().html

    def _mime_(self) -> tuple[str, str]:
        return self._shown()._mime_()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return self._shown()._repr_mimebundle_(include, exclude)


class _Profiler:
    """What `profile(...)` gives without a function: a context manager and a decorator with the same options."""

    def __init__(
        self, steps: int, warmup: int, mode: str | None, limit: int, lines: bool, name: str | None, options: dict
    ) -> None:
        self._steps, self._warmup, self._mode, self._name = steps, warmup, mode, name
        self._limit, self._lines = limit, lines
        self._options = options
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

        @functools.wraps(fn)
        def profiled(*args, **kwargs):
            profiler = _Profiler(
                self._steps, self._warmup, self._mode, self._limit, self._lines, self._name or fn.__name__, self._options
            )
            profiled.profile = profiler.run(fn, args, kwargs, keep=profiled)  # type: ignore[attr-defined]
            return profiled.profile.value  # type: ignore[attr-defined]

        profiled.profile = None  # type: ignore[attr-defined]
        return profiled

    def run(self, fn: Callable, args=(), kwargs=None, keep=None) -> Profile:
        """Call fn warmup + steps times, each call a step. keep: gets `.profile` even if fn raises."""
        profile = self._begin(None, fn)
        trace = profile.trace
        if keep is not None:
            keep.profile = profile
        error: BaseException | None = None
        try:
            for call in range(self._warmup + self._steps):
                profile.value = fn(*args, **(kwargs or {}))
                trace.marks.append(("call end", time.perf_counter_ns()))
                _cpu(trace)
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
        profile = Profile(**self._options)
        stack = contextlib.ExitStack()
        with stack:
            if self._mode is not None:
                stack.enter_context(_hook("state", "mode_scope")(self._mode))
            stack.enter_context(_hook("where", "watch_modules")())
            meta = {**_describe(), "recording": True, **(self.where or _where(frame, fn))}
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
        trace.marks.append(("block end", time.perf_counter_ns()))
        _cpu(trace)
        if error is not None:
            trace.meta["error"] = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        try:
            _hook("launches", "drain")()
            _hook("live", "finish")(trace)
        finally:
            try:
                if _trace.active is trace:
                    _trace.stop()
            finally:
                trace.meta.pop("recording", None)
                for name in ("metrics", *VIEWS):  # drawn inside the block: half a recording
                    self._profile.__dict__.pop(name, None)
                self._stack.close()
                self._stack = None


def profile(
    fn: Callable | None = None,
    *args,
    steps: int = 1,
    warmup: int = 0,
    mode: str | None = None,
    flops: float | None = None,
    peak_flops: float | None = None,
    name: str | None = None,
    limit: int = 200_000,
    lines: bool = True,
    **kwargs,
):
    """Record what runs on "tpu": `with profile() as p:`, `@profile()`, or `p = profile(fn, *args, **kwargs)`.

    steps, warmup: how often fn is called, and how often before that without being averaged.
    mode: "fused", "strict" or "debug" inside; None leaves the mode as it is.
    flops: model FLOPs a step, when you know better than the sum of the matmuls. peak_flops: FLOP/s that MFU divides by.
    name: what the report calls the model. limit: records kept of each kind; more are counted as dropped.
    lines: look for the user's line behind each op; False makes recording cheaper, and views by line say less.
    Returns a Profile (call form), or what gives one. RuntimeError when a profile is already active.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"mode={mode!r}: choose one of {', '.join(MODES)}")
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps={steps}, warmup={warmup}: at least one step and no negative warm-up")
    profiler = _Profiler(steps, warmup, mode, limit, lines, name, {"flops": flops, "peak_flops": peak_flops})
    if fn is None:
        if kwargs:
            raise TypeError(f"tpu_lab.profile() has no option {next(iter(kwargs))!r}")
        return profiler
    if not callable(fn):
        raise TypeError(
            f"tpu_lab.profile(fn, ...) needs a function to call, not a {type(fn).__name__}: use a with block"
        )
    if not args and not kwargs:
        _needs_nothing(fn)
    return profiler.run(fn, args, kwargs)


def _needs_nothing(fn: Callable) -> None:
    """`@tpu_lab.profile` without parentheses would call the function at once: say so when that cannot work."""
    try:
        needed = [
            p.name for p in inspect.signature(fn).parameters.values() if p.default is p.empty and p.kind in (0, 1, 3)
        ]
    except (TypeError, ValueError):
        return
    if needed:
        called = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"tpu_lab.profile({called}) calls {called}, which needs {', '.join(needed)}: give them, "
            f"tpu_lab.profile({called}, ...), or decorate with parentheses, @tpu_lab.profile()"
        )


def _cpu(trace: Trace) -> None:
    """A sample of this thread's CPU time, by which metrics tell idle from Python."""
    trace.meta["cpu"].append((time.perf_counter_ns(), time.thread_time_ns()))


@contextlib.contextmanager
def _step_marks(trace: Trace):
    """CPU samples at the end of each optimizer step on this thread."""
    import threading

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


def _describe() -> dict:
    """What runs the ops: mode, platform, compiler, versions, cores; words for the line of provenance."""
    import os

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


def _where(frame, fn: Callable | None) -> dict:
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


def _block_end(file: str, line: int) -> int:
    """The last line of the with statement that begins at `line`; `line` when the source is not to be had."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return line
    ends = [n.end_lineno for n in ast.walk(tree) if isinstance(n, (ast.With, ast.AsyncWith)) and n.lineno == line]
    return max((e for e in ends if e), default=line)
