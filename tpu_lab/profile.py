"""`tpu_lab.profile()`: record a block, a function or a call, and get a report that shows itself.

    with tpu_lab.profile() as p:        p = tpu_lab.profile(step, x, y, steps=10)        @tpu_lab.profile()
        train()                                                                          def train(): ...
    p

A `Profile` holds a Trace (tpu_lab/trace.py) and its views; it never holds a tensor. What is shown is computed from
the records when it is asked for.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from typing import Any, Callable

from tpu_lab.session import Session
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

        trace = self.trace.now() if self.trace.meta.get("recording") else self.trace
        return Metrics(trace, self._peak(), self._flops)

    def step(self) -> None:
        """A step ends here: `with tpu_lab.profile() as p:`, a loop, and p.step() at the end of its body. Steps of a block
        otherwise end with optimizer.step(), which then no longer counts. What fused mode has deferred is launched.
        RuntimeError outside of the block."""
        from tpu_lab import session

        session.step_ended(self.trace)

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
        except (aot.CompileError, ValueError, LookupError) as error:
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

    def forget_drawn(self) -> None:
        """What was drawn while the recording went on shows half of it."""
        for name in ("metrics", *VIEWS):
            self.__dict__.pop(name, None)

    def _shown(self):
        """A recording that goes on is drawn, not kept."""
        return Profile(Trace(meta={"recording": True})).summary if self.trace.meta.get("recording") else self.summary

    def _repr_html_(self) -> str:
        return self._shown().html

    def _mime_(self) -> tuple[str, str]:
        return self._shown()._mime_()

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return self._shown()._repr_mimebundle_(include, exclude)


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
    for option, value, least in (("steps", steps, 1), ("warmup", warmup, 0), ("limit", limit, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{option}={value!r}: a whole number from {least} on")
    for option, number in (("flops", flops), ("peak_flops", peak_flops)):
        if number is not None and not (isinstance(number, (int, float)) and 0 < number < math.inf):
            raise ValueError(f"{option}={number!r}: a number above 0, or leave it out")
    session = Session(
        steps, warmup, mode, limit, lines, name, functools.partial(Profile, flops=flops, peak_flops=peak_flops)
    )
    if fn is None:
        if kwargs:
            raise TypeError(f"tpu_lab.profile() has no option {next(iter(kwargs))!r}")
        return session
    if not callable(fn):
        raise TypeError(
            f"tpu_lab.profile(fn, ...) needs a function to call, not a {type(fn).__name__}: use a with block"
        )
    if not args and not kwargs:
        _needs_nothing(fn)
    return session.run(fn, args, kwargs)


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
