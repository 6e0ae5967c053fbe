"""The modes view: the same step in several modes on one time axis, the figures of each, and whether the losses agree."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_lab.difference import Spread, counted, differ, mfu, noise, peak_live, typical
from tpu_lab.metrics import Metrics
from tpu_lab.trace import REASONS
from tpu_lab.viz import frame, mode_lanes, number
from tpu_lab.viz.nonfinite import figure
from tpu_lab.viz.view import View, template

SHORT = {
    "debug": "launch each op and wait",
    "strict": "launch each op",
    "fused": "record, launch when a value is needed",
    "compiled": "torch.compile(step)",
}
EPSILON = {"f64": 2.0**-52, "bf16": 2.0**-8, "f16": 2.0**-11}  # else f32's


@dataclass(frozen=True)
class Run:
    """The step in one mode. results: a number a call, or the arrays that the last call gave. failed: why it did not run."""

    mode: str
    metrics: Metrics | None
    results: tuple[Any, ...] = ()
    failed: str = ""
    times: tuple[int, ...] = ()  # ns, of the native CPU, which has no records

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


def rows(c: Compared):
    """One row a mode: mode, step_ms (median), spread_ms, n, against_fused, launches, programs, ops, compile_s,
    first_step_s, mfu, live_bytes, loss (of the last step), what, failed."""
    import pandas as pd

    fused = c.run("fused")
    out = []
    for r in (*c.runs, *([c.native] if c.native else [])):
        spread, m = r.spread, r.metrics
        step = typical(m) if m is not None else None
        out.append(
            {
                "mode": r.mode,
                "step_ms": spread.median / 1e6 if spread.n else math.nan,
                "spread_ms": math.nan if spread.half is None else spread.half / 1e6,
                "n": spread.n,
                "against_fused": spread.median / fused.spread.median if fused and spread.n else math.nan,
                "launches": None if m is None else len(m.launches_in(step)),
                "programs": None if m is None else len({x.key for x in m.launches_in(step)}),
                "ops": None if m is None else step.ops[1] - step.ops[0],
                "compile_s": math.nan if m is None else sum(x.compile_ns for x in m.trace.launches) / 1e9,
                "first_step_s": m.steps[0].ns / 1e9 if m is not None and m.steps else math.nan,
                "mfu": math.nan if m is None or (used := mfu(m)) is None else used,
                "live_bytes": None if m is None else peak_live(m),
                "loss": r.results[-1] if r.results and isinstance(r.results[-1], float) else math.nan,
                "what": what(c, r),
                "failed": r.failed,
            }
        )
    table = pd.DataFrame(out)
    return table.astype({k: "Int64" for k in ("launches", "programs", "ops", "live_bytes")})


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
        head = f"The same step, {_launches(worst)} or {number.count(_count(best))}"
        return f"{head}: {_faster(best, worst)}"
    return f"The same step, {_launches(strict)} or {number.count(_count(fused))}: {_faster(fused, strict)}"


def _count(r: Run) -> int:
    assert r.metrics is not None
    return len(r.metrics.launches_in(typical(r.metrics)))


def _launches(r: Run) -> str:
    return number.plural(_count(r), "launch", "launches")


def _faster(a: Run, b: Run) -> str:
    x, y = a.spread, b.spread
    if not differ(x, y):
        limit = noise(x, y)
        if limit is None:
            return f"{a.mode} {number.time(x.median)}, {b.mode} {number.time(y.median)}"
        return f"no difference in time above noise, \u00b1 {number.percent(limit, 2)}"
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


# --- the page ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """One mode beside the axis."""

    mode: str
    short: str
    time: tuple[str, str]
    count: tuple[str, str]
    lanes: mode_lanes.Lanes | None
    failed: str


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    mode: str
    time: str
    around: str
    against: str
    launches: str
    programs: str
    compile: str
    mfu: str
    live: str
    what: str
    strong: bool


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    bands: tuple[Band, ...]
    marks: tuple[tuple[str, str], ...]  # (percent, label) of the axis
    native: tuple[str, str, str] | None  # (percent, label, where it hangs)
    lines: tuple[Line, ...]
    units: tuple[str, str]
    legend: tuple[str, ...]
    agree: bool | None
    losses: str
    foot: str
    hint: str = ""


def draw(c: Compared) -> View:
    """The view of a comparison."""
    cache: dict = {}

    def model() -> Model:
        if "model" not in cache:
            cache["model"] = _model(c, view.rows)
        return cache["model"]

    head = title(c)
    view = View("modes", head, head, lambda: rows(c), lambda: _text(c, model()), lambda: template("modes.html", v=model()))
    return view


def axis(c: Compared) -> float:
    """The length of the time axis in ns: the longest step and a little more."""
    return 1.07 * max([typical(r.metrics).ns for r in c.ran if r.metrics] + list(_native_ns(c)))


def _native_ns(c: Compared) -> tuple[float, ...]:
    return (c.native.spread.median,) if c.native is not None and c.native.times else ()


def _model(c: Compared, table) -> Model:
    if not c.ran:
        hint = "Move the model and its inputs with .to(\"tpu\"): the modes are about ops on that device."
        return Model(title(c), (), (), (), None, (), ("ms", "MiB"), (), None, "", "", hint)
    first = c.ran[0].metrics
    assert first is not None
    length = axis(c)
    unit, factor = number.time_unit(length)
    marks = mode_lanes.nice(length / factor)
    native = None
    for ns in _native_ns(c):
        share = ns / length
        native = (f"{100 * share:.2f}", f"native CPU {number.time(ns)}", "left" if share > 0.85 else "right" if share < 0.12 else "")
    bands = tuple(_band(r, length) for r in c.runs)
    paints = {p for b in bands if b.lanes for lane in (b.lanes.host, b.lanes.device) for p in _paints(lane)}
    size = number.size_unit(float(table.live_bytes.max()) if table.live_bytes.notna().any() else 1.0)
    lines = tuple(_line(r, unit, factor, size[1]) for r in table.itertuples(index=False))
    agree, losses = agreement(c)
    cached = " \u00b7 compile: 0 when an earlier mode or run had made the programs" if (table.compile_s == 0).any() else ""
    peak = f" \u00b7 MFU of {number.rate(first.peak.flops)}, {first.peak.label}" if first.peak and first.mfu is not None else ""
    foot = f"median \u00b1 half of the middle half, n = {c.steps}{cached}{peak} \u00b7 live: tensors, not what a program needs inside"
    return Model(
        title(c), tuple(_meta(c, first)), bands, tuple((f"{100 * x * factor / length:.2f}", f"{x:g}" + (f" {unit}" if not x else "")) for x in marks),
        native, lines, (unit, size[0]), tuple(k for k in mode_lanes.WORDS if k in paints), agree, losses, foot,
    )  # fmt: skip


def _meta(c: Compared, m: Metrics) -> list[tuple[str, bool]]:
    """The frame's words, but for the mode, the steps and the dtype's place."""
    kept = [(t, b) for t, b in frame.provenance(m) if not b and " step" not in t]
    return [*kept[:-1], (f"{number.plural(c.steps, 'step')} in each mode after {c.warmup}, one mode after the other", False), *kept[-1:]]


def _paints(lane: mode_lanes.Lane) -> set[str]:
    return {b.paint for b in lane.boxes} | {p for p, _ in lane.paths}


def _band(r: Run, length: float) -> Band:
    if r.metrics is None or not (r.metrics.trace.ops or r.metrics.trace.launches):
        return Band(r.mode, SHORT[r.mode], (number.NONE, ""), ("", ""), None, r.failed or "No op ran on 'tpu'")
    n = _count(r)
    return Band(
        r.mode, SHORT[r.mode], number.time_pair(r.spread.median), (number.count(n), "launch" if n == 1 else "launches"),
        mode_lanes.lanes(r.metrics, typical(r.metrics), length), "",
    )  # fmt: skip


def _line(r, unit: str, factor: float, size: float) -> Line:
    ns = r.step_ms * 1e6
    known = math.isfinite(ns)
    around = f"\u00b1 {number.error_like(r.spread_ms * 1e6, ns, factor)}" if known and math.isfinite(r.spread_ms) else ""

    def whole(value) -> str:
        return number.count(int(value)) if _known(value) else number.NONE

    live = number.sig(int(r.live_bytes) / size) if _known(r.live_bytes) else number.NONE
    return Line(
        r.mode, number.sig(ns / factor if known else None), around,
        number.NONE if not math.isfinite(r.against_fused) else f"{r.against_fused:.2f}\u00d7", whole(r.launches), whole(r.programs),
        number.sig(r.compile_s if math.isfinite(r.compile_s) else None), number.sig(100 * r.mfu if math.isfinite(r.mfu) else None),
        live, r.what, r.mode == "fused",
    )  # fmt: skip


def _known(value) -> bool:
    return str(value) not in ("<NA>", "nan", "None")


# --- the terminal -----------------------------------------------------------------------------------------------------

WIDTH = 72
GLYPH = {"matmul": "\u2588", "other": "/", "move": "=", "dispatch": "\u2593", "python": "-", "wait": " "}


def _text(c: Compared, v: Model) -> list:
    """At most 25 lines of 100 columns."""
    out: list = [[(line, "b")] for line in textwrap.wrap(v.title, 98)] + frame.meta_lines(v.meta)[:2]
    if v.hint:
        return [*out, [], *([line] for line in textwrap.wrap(v.hint, 98))]
    out.append([])
    length = axis(c)
    mark = [min(WIDTH - 1, int(WIDTH * ns / length)) for ns in _native_ns(c)]
    for r, band in zip(c.runs, v.bands, strict=True):
        figures = f"{' '.join(band.time):>9}"
        if band.lanes is None or r.metrics is None:
            out.append([f"  {band.mode:<10}", (band.failed, "dim")])
            continue
        step = typical(r.metrics)
        at = {min(WIDTH - 1, int(WIDTH * t / length)) for t in mode_lanes.launch_times(r.metrics, step)}
        line = [("|" if i in at else "\u250a" if i in mark else " ") for i in range(WIDTH)]
        out.append([f"  {band.mode:<10}", "".join(line), (f"{' '.join(band.count):>15}", "")])
        out.append(["  " + " " * 10, *_bar(r.metrics, step, length, mark), (f"{figures:>15}", "b")])
    words = ["| launch"] + [f"{GLYPH[k]} {mode_lanes.WORDS[k]}" for k in v.legend if k != "wait"]
    out.append([("            " + "  ".join(words), "dim"), ("  \u250a native CPU" if mark else "", "dim")])
    head = f"  {'mode':<11}{v.units[0] + ' a step':>16}{'vs fused':>10}{'launches':>10}{'programs':>10}{'compile s':>11}{'MFU %':>8}{'live ' + v.units[1]:>11}"
    out += [[], [(head, "dim")]]
    for x in v.lines:
        time = f"{x.time} {x.around}".strip()
        row = f"{time:>16}{x.against:>10}{x.launches:>10}{x.programs:>10}{x.compile:>11}{x.mfu:>8}{x.live:>11}"
        out.append([(f"  {x.mode:<11}", "b" if x.strong else ""), row])
    if v.losses:
        glyph = {True: ("\u2713 ", "hit"), False: ("\u2717 ", "miss"), None: ("", "")}[v.agree]
        said = textwrap.wrap(v.losses, 96)[:2]
        out += [[], [glyph, said[0]], *([f"  {line}"] for line in said[1:])]
    return out


def _bar(m: Metrics, step, length: float, mark) -> list:
    """The device's work, and where it does nothing what the host does."""
    device = mode_lanes.columns(mode_lanes.device_pieces(m, step), length, WIDTH)
    host = mode_lanes.columns(mode_lanes.host_pieces(m, step), length, WIDTH)
    out: list = []
    for i, (d, h) in enumerate(zip(device, host, strict=True)):
        paint = d or h
        glyph = GLYPH[paint] if paint else " "
        if glyph == " " and i in mark:
            glyph = "\u250a"
        style = {"dispatch": "host", "python": "", "wait": "", "": ""}.get(paint, paint)
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + glyph, style)
        else:
            out.append((glyph, style))
    return out
