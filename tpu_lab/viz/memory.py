"""The memory view: live bytes over program order in bands, the peak with its op, and who holds it there."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import numpy as np

from tpu_lab.memory_use import BANDS, Holding, MemoryUse, of
from tpu_lab.metrics import Metrics
from tpu_lab.place import place
from tpu_lab.viz import frame, lanes, memory_plot, number
from tpu_lab.viz.memory_plot import HEIGHT, WIDTH
from tpu_lab.viz.view import View, template

TOP = 8
SORTS = {"bytes": "bytes"}
SMALL = 0.05  # of the peak: what programs take inside is drawn from here on
LETTER = {"weights": "W", "optimizer": "O", "gradients": "G", "activations": "A", "other": ""}


def rows(m: Metrics):
    """part "held": who holds what at the step's peak: name, band, place, phase, tensors, bytes, share. part "curve": live
    bytes after each launch of the step: op, bytes, and by band weights, optimizer, gradients, activations, other."""
    import pandas as pd

    columns = ["part", "name", "band", "place", "phase", "tensors", "bytes", "share", "op", *BANDS]
    if _why(m):
        return pd.DataFrame([], columns=columns)
    use = of(m)
    top = int(use.bytes[use.peak])
    held = [
        ("held", h.name, h.band, place(h.file, h.line), h.phase, h.tensors, h.bytes, h.bytes / top if top else 0.0, None, *[None] * len(BANDS))
        for h in use.holdings(use.peak)
    ]
    curve = [
        ("curve", "", "", "", "", None, int(use.bytes[i]), None, int(use.at[i]), *(int(use.bands[b][i]) for b in BANDS))
        for i in range(use.first, use.last + 1)
    ]
    return pd.DataFrame([*held, *curve], columns=columns)


@dataclass(frozen=True)
class Band:
    name: str
    letter: str
    words: str  # "weights"
    size: str  # at the peak
    path: str


@dataclass(frozen=True)
class Row:
    letter: str
    band: str
    name: str
    place: str
    way: str
    tensors: str
    size: str
    share: str
    bar: float
    tip: str


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    hint: str = ""
    bands: tuple[Band, ...] = ()
    line: str = ""
    scratch: str = ""  # SVG path of what programs take while they run
    scratch_words: str = ""
    ticks: tuple[tuple[float, str], ...] = ()  # (percent from below, text)
    peak: tuple[float, float] = (0.0, 0.0)  # percent from the left, and how high the curve is there
    peak_size: str = ""
    peak_words: str = ""
    phases: tuple = ()
    unit: str = "MiB"
    rows: tuple[Row, ...] = ()
    others: Row | None = None
    notes: tuple[str, ...] = ()
    label: str = ""
    spark: str = ""  # the curve for a terminal


def draw(m: Metrics, limit: int | None = None, sort: str | None = None) -> View:
    """limit: how many holders are listed. The view has one order, by bytes."""
    if sort not in (None, "bytes"):
        raise ValueError(f"the memory view sorts by bytes, not by {sort!r}")
    store: dict = {}

    def model() -> Model:
        if "model" not in store:
            store["model"] = _model(m, limit or TOP)
        return store["model"]

    title, finding = _sentences(m)
    return View("memory", title, finding, lambda: rows(m), lambda: _text(model()), lambda: template("memory.html", v=model()))


def _why(m: Metrics) -> str:
    if why := frame.nothing(m):
        return why
    return "" if m.trace.live else "No launch ran, so no memory was looked at"


def _sentences(m: Metrics) -> tuple[str, str]:
    """(title, what a closed fold says)."""
    if why := _why(m):
        return why, why[0].lower() + why[1:]
    use = of(m)
    if use.last < use.first:
        return "No launch ran in the step that is drawn", "no launch ran in the step that is drawn"
    top = int(use.bytes[use.peak])
    head = f"Memory peaks at {number.size(top)}"
    inside = max((n for _, n in use.scratch), default=0)
    op, launch = use.op_at(use.peak), use.launch_at(use.peak)
    if inside > SMALL * top and launch is not None and len(launch.ops) > 1:
        return (
            f"{head} between launches; {number.size(inside)} more inside a program",
            f"peak {number.size(top)}, and {number.size(inside)} more inside a program",
        )
    at_peak = {b: int(use.bands[b][use.peak]) for b in BANDS}
    called = use.optimizer if len(use.optimizer) <= 10 else "optimizer state"
    state = f"weights and {called}" if at_peak["optimizer"] else "weights"
    shares = {state: at_peak["weights"] + at_peak["optimizer"], "gradients": at_peak["gradients"], "activations": at_peak["activations"]}
    whole = launch is not None and len({o.phase for o in map(use.op, launch.ops) if o is not None}) > 1
    if op is not None and op.phase == "optimizer" and not whole:
        known = sum(h.bytes for h in use.holdings(use.peak) if h.band == "other" and not h.line)  # from the host, or older
        shares["its temporary results"] = at_peak["other"] - known
    what, most = max(shares.items(), key=lambda pair: pair[1])
    rest = f"; {what} are {number.percent(most / top, 2)} of it" if most else ""
    if whole:
        return f"{head} between launches{rest}", f"peak {number.size(top)}, between launches"
    where = _when(m, use)
    at = f", at {op.module or place(op.file, op.line)}" if op is not None and (op.module or op.file) else ""
    way = {"backward": " on the way back", "optimizer": ""}.get(op.phase, "") if op is not None else ""
    at = ", in the optimizer step" if op is not None and op.phase == "optimizer" else at
    return f"{head}{where}{rest}", f"peak {number.size(top)}{at}{way}"


def _when(m: Metrics, use: MemoryUse) -> str:
    """`, early in backward`: by thirds of the run of ops of its phase."""
    ops, op = m.ops_in(m.span), use.op_at(use.peak)
    if op is None or not ops:
        return ""
    if op.phase == "optimizer":
        return " in the optimizer step"
    own = [o.index for o in ops if o.phase == op.phase]
    if len({o.phase for o in ops}) == 1 or op.index < own[0]:
        return ""
    part = (op.index - own[0]) / max(1, own[-1] - own[0])
    return f", {'early in' if part < 1 / 3 else 'late in' if part > 2 / 3 else 'halfway through'} {op.phase}"


def _model(m: Metrics, top: int) -> Model:
    title, _ = _sentences(m)
    if _why(m) or title.startswith("No launch"):
        hint = "" if m.trace.meta.get("recording") else frame.nothing_hint(m)
        return Model(title, tuple(frame.provenance(m)), hint if frame.nothing(m) else "Memory is looked at after each launch.")
    use = of(m)
    peak = int(use.bytes[use.peak])
    unit, factor = number.size_unit(float(peak))
    meta: list[tuple[str, bool]] = [("live bytes in program order", False)]
    meta.append((f"step {m.span.number} of {len(m.steps)}" if m.steady else "the whole block", False))
    if m.trace.meta.get("mode"):
        meta.append((m.trace.meta["mode"], True))
    points = use.last - use.first + 1
    meta.append((f"measured after each of {number.count(points)} launches" if points > 1 else "measured after its launch", False))
    if m.trace.meta.get("compiler"):
        meta.append((m.trace.meta["compiler"], False))
    low, high = _span(m, use)
    inside = [box for box in memory_plot.inside(use) if box[-1] > SMALL * peak]
    ceiling = max([float(peak), *(float(base + n) for _, _, base, n in inside)])
    step = memory_plot.tick(ceiling / factor)
    ceiling = max(ceiling * 1.04, factor * step)

    def x(op):
        return np.clip(WIDTH * (op - low) / max(1, high - low), 0.0, WIDTH)  # of one op or of many

    def y(nbytes: float) -> float:
        return HEIGHT * (1 - nbytes / ceiling)

    edges, picked = memory_plot.columns(use, x)
    total = np.zeros(len(picked))
    bands = []
    for name in BANDS:
        own = np.array([(use.kept if after else use.bands)[name][p] for p, after in picked])
        if own.any():
            bands.append(Band(name, LETTER[name], _words(name, use), _sig(int(use.bands[name][use.peak]), factor), memory_plot.area(edges, total, total + own, y)))
        total = total + own
    ticks = tuple((100 * k * step * factor / ceiling, f"{k * step:g}") for k in range(1, int(ceiling / factor / step) + 1))
    op, launch = use.op_at(use.peak), use.launch_at(use.peak)
    words = f"after op {number.count(int(use.at[use.peak]))}"
    if launch is not None and len(launch.ops) > 1:
        where = place(*m.site(launch)[:2])
        words = f"after the launch of {number.plural(len(launch.ops), 'op')}" + (f", {where}" if where else "")
    elif op is not None:
        words = ", ".join(w for w in (f"at op {number.count(op.index)}", op.module, place(op.file, op.line)) if w)
    holdings = use.holdings(use.peak)
    longest = max((h.bytes for h in holdings), default=1) or 1
    n = min(top, sum(h.bytes >= 0.001 * peak for h in holdings))
    n = n + 1 if len(holdings) == n + 1 else n  # a fold of one row is no fold
    shown, rest = holdings[:n], holdings[n:]
    return Model(
        title, tuple(meta), "", tuple(bands), memory_plot.outline(edges, total, y), memory_plot.boxes(inside, x, y), _scratch_words(use) if inside else "",
        ((0.0, f"0 {unit}"), *ticks), (round(x(_left(use, use.peak, low)) / WIDTH * 100, 2), round(100 * peak / ceiling, 1)), number.size(peak), words,
        lanes.phases(m, m.span) if m.steady or low == _first(m) else (), unit, tuple(_row(h, peak, factor, longest) for h in shown),
        _others(rest, peak, factor, longest) if rest else None, tuple(_notes(m, use)),
        f"live bytes over {number.plural(points, 'launch', 'launches')}: {title}", memory_plot.spark(edges, total, ceiling),
    )  # fmt: skip


def _first(m: Metrics) -> int:
    return m.trace.ops[0].index if m.trace.ops else 0


def _span(m: Metrics, use: MemoryUse) -> tuple[int, int]:
    """The op indices that the picture spans: those of the step."""
    ops = m.ops_in(m.span)
    low = ops[0].index if ops else int(use.at[use.first])
    return low, max(low + 1, (ops[-1].index if ops else int(use.at[use.last])) + 1)


def _left(use: MemoryUse, point: int, low: int) -> float:
    """Where a point's level begins: at the newest op when it was taken."""
    return max(float(use.at[point]), float(low))


def _scratch_words(use: MemoryUse) -> str:
    launch, most = max(use.scratch, key=lambda pair: pair[1])
    return f"inside the program{'s' if len(use.scratch) > 1 else ''}: temporary buffers, {number.size(most)} by the compiler\u2019s plan"


def _notes(m: Metrics, use: MemoryUse):
    launch = use.launch_at(use.peak)
    if launch is not None and len(launch.ops) > 1:
        yield "What the ops of one launch pass to each other lives inside its program and is no array: only the compiler knows its size."
    if m.trace.meta.get("mode") == "strict" and launch is not None and launch.mode == "strict":
        yield "Strict mode does not wait for results: what the device has not finished is held a little longer."
    highest = int(use.bytes[use.highest])
    if m.steady and highest > 1.01 * int(use.bytes[use.peak]):
        number_of = next((s.number for s in m.steps if s.start_ns <= _time(use, use.highest) < s.end_ns), None)
        yield f"The whole block peaked at {number.size(highest)}" + (f", in step {number_of}." if number_of else ".")
    if not m.trace.held:
        yield "This recording has no holders: it was made by an earlier version."


def _time(use: MemoryUse, point: int) -> int:
    launch = use.launch_at(point)
    return launch.time_ns if launch is not None else use.m.end_ns


def _words(band: str, use: MemoryUse) -> str:
    return {"optimizer": f"{use.optimizer}\u2019s state" if use.optimizer != "optimizer" else "optimizer state", "other": "others"}.get(band, band)


def _row(h: Holding, peak: int, factor: float, longest: int) -> Row:
    share = number.cell(h.bytes / peak if peak else 0.0)
    tip = f"{h.name}: {number.size(h.bytes)}, {share}% \u00b7 {number.plural(h.tensors, 'array')}"
    return Row(LETTER[h.band], h.band, h.name, place(h.file, h.line), frame.WAY.get(h.phase, ("", ""))[0], number.count(h.tensors),
               _sig(h.bytes, factor), share, h.bytes / longest, tip)  # fmt: skip


def _others(rest: list[Holding], peak: int, factor: float, longest: int) -> Row:
    total = sum(h.bytes for h in rest)
    return Row("", "none", number.plural(len(rest), "other"), "", "", number.count(sum(h.tensors for h in rest)), _sig(total, factor),
               number.cell(total / peak if peak else 0.0), total / longest, "")  # fmt: skip


def _sig(nbytes: int, factor: float) -> str:
    return number.sig(nbytes / factor)


def _text(v: Model) -> list:
    out: list = [[(v.title, "b")], *frame.meta_lines(v.meta), []]
    if not v.bands:
        return [*out, *([part] for part in textwrap.wrap(v.hint, 98))]
    out += [[f"  {v.spark}"], [(f"  {v.peak_size} {v.peak_words}", "dim")]]
    if v.phases:
        out.append([("  " + "   ".join(f"{p.name} {p.count}" for p in v.phases), "dim")])
    if v.scratch_words:
        out.append([(f"  {v.scratch_words}", "dim")])
    out += [[], [(f"  {'held at the peak':<46}{'made at':<20}{'arrays':>7}{v.unit:>9}{'%':>7}", "dim")]]
    for r in (*v.rows, *([v.others] if v.others else [])):
        out.append([f"{r.letter or ' '} {_fit(r.name, 45):<46}{_fit(r.place, 13):<14}{r.way:<6}{r.tensors:>7}{r.size:>9}{r.share:>7}"])
    out.append([])
    for note in v.notes:
        out += [[(part, "dim")] for part in textwrap.wrap(note, 98)]
    return out[:-1] if not v.notes else out


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"
