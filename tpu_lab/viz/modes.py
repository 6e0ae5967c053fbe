"""The modes view: the same step in several modes on one time axis, the figures of each, and whether the losses agree."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from tpu_lab.difference import mfu, peak_live, typical
from tpu_lab.metrics import Metrics
from tpu_lab.viz import frame, mode_lanes, number
from tpu_lab.viz.mode_runs import Compared, Run, agreement, count, title, what
from tpu_lab.viz.view import View, template

FAR = 3  # times the longest mode: what takes longer is not drawn on its axis
SHORT = {
    "debug": "launch each op and wait",
    "strict": "launch each op",
    "fused": "record, launch when a value is needed",
    "compiled": "torch.compile(step)",
}


def rows(c: Compared):
    """One row a mode: mode, step_ms (median), spread_ms, n, against_fused, launches, programs, ops, compile_s,
    first_step_s, mfu, live_bytes, loss (of the last step), what, failed."""
    import pandas as pd

    fused = c.run("fused")
    out = []
    for r in (*c.runs, *([c.native] if c.native else [])):
        spread, m = r.spread, r.metrics
        known = {}
        if m is not None:
            step = typical(m)
            known = {
                "launches": count(r),
                "programs": len({x.key for x in m.launches_in(step)}),
                "ops": step.ops[1] - step.ops[0],
                "compile_s": sum(x.compile_ns for x in m.trace.launches) / 1e9,
                "first_step_s": m.steps[0].ns / 1e9 if m.steps else math.nan,
                "mfu": math.nan if (used := mfu(m, median=True)) is None else used,
                "live_bytes": None if (live := peak_live(m)) is None else max(0, live - r.parked),
            }
        none = {"launches": None, "programs": None, "ops": None, "compile_s": math.nan, "first_step_s": math.nan, "mfu": math.nan, "live_bytes": None}
        out.append(
            {
                "mode": r.mode,
                "step_ms": spread.median / 1e6 if spread.n else math.nan,
                "spread_ms": math.nan if spread.half is None else spread.half / 1e6,
                "n": spread.n,
                "against_fused": spread.median / fused.spread.median if fused and spread.n else math.nan,
                **none,
                **known,
                "loss": r.results[-1] if r.results and isinstance(r.results[-1], float) else math.nan,
                "what": what(c, r),
                "failed": r.failed,
            }
        )
    table = pd.DataFrame(out)
    return table.astype({k: "Int64" for k in ("launches", "programs", "ops", "live_bytes")})


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
    native: tuple[str, str, str, bool] | None  # (percent, label, where it hangs, whether the axis reaches it)
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
    return 1.07 * max([_longest(c), *(ns for ns in _native_ns(c) if not _beyond(c, ns))])


def _longest(c: Compared) -> float:
    return max(typical(r.metrics).ns for r in c.ran if r.metrics)


def _native_ns(c: Compared) -> tuple[float, ...]:
    return (c.native.spread.median,) if c.native is not None and c.native.times else ()


def _beyond(c: Compared, ns: float) -> bool:
    """Native PyTorch so slow (its threads wait for ours on a busy machine) that on its axis nobody would see the modes."""
    return ns > FAR * _longest(c)


def _model(c: Compared, table) -> Model:
    if not c.ran:
        hint = "Move the model and its inputs with .to(\"tpu\"): the modes are about ops on that device."
        return Model(title(c), (), (), (), None, (), ("ms", "MiB"), (), None, "", "", hint)
    first = c.ran[0].metrics
    assert first is not None
    length = axis(c)
    unit, factor = number.time_unit(min(r.spread.median for r in c.ran))
    marks = mode_lanes.nice(length / factor)
    native = None
    for ns in _native_ns(c):
        share, beyond = min(1.0, ns / length), _beyond(c, ns)
        said = f"native CPU {number.time(ns)}" + (", beyond this axis" if beyond else "")
        native = (f"{100 * share:.2f}", said, "left" if share > 0.85 else "right" if share < 0.12 else "", not beyond)
    bands = tuple(_band(r, length) for r in c.runs)
    paints = {p for b in bands if b.lanes for lane in (b.lanes.host, b.lanes.device) for p in _paints(lane)}
    size = number.size_unit(float(table.live_bytes.max()) if table.live_bytes.notna().any() else 1.0)
    lines = tuple(_line(r, unit, factor, size[1]) for r in table.itertuples(index=False))
    agree, losses = agreement(c)
    cached = " \u00b7 compile: 0 when an earlier mode or run had made the programs" if (table.compile_s == 0).any() else ""
    peak = f" \u00b7 MFU of {number.rate(first.peak.flops)}, {first.peak.label}" if first.peak and first.mfu is not None else ""
    sizes = sorted({r.spread.n for r in c.ran})
    n = number.count(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}, steps that compiled left out"
    foot = f"median \u00b1 half of the middle half, n = {n}{cached}{peak} \u00b7 live: tensors, not what a program needs inside"
    return Model(
        title(c), tuple(_meta(c, first)), bands, tuple((f"{100 * x * factor / length:.2f}", f"{x:,g}" + (f" {unit}" if not x else "")) for x in marks),
        native, lines, (unit, size[0]), tuple(k for k in mode_lanes.WORDS if k in paints), agree, losses, foot,
    )  # fmt: skip


def _meta(c: Compared, m: Metrics) -> list[tuple[str, bool]]:
    """The frame's words, but for the mode, the steps and the dtype's place."""
    kept = [(t, b) for t, b in frame.provenance(m) if not b and " step" not in t]
    return [*kept[:-1], (f"{number.plural(c.steps, 'step')} in each mode after {c.warmup}, interleaved", False), *kept[-1:]]


def _paints(lane: mode_lanes.Lane) -> set[str]:
    return {b.paint for b in lane.boxes} | {p for p, _ in lane.paths}


def _band(r: Run, length: float) -> Band:
    if r.metrics is None or not (r.metrics.trace.ops or r.metrics.trace.launches):
        return Band(r.mode, SHORT[r.mode], (number.NONE, ""), ("", ""), None, r.failed or "No op ran on 'tpu'")
    n = count(r)
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
        number.NONE if not math.isfinite(r.against_fused) else f"{number.sig(r.against_fused)}\u00d7", whole(r.launches), whole(r.programs),
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
    mark = [min(WIDTH - 1, int(WIDTH * ns / length)) for ns in _native_ns(c) if not _beyond(c, ns)]
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
