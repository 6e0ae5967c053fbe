"""The roofline view: each cost at its FLOPs per byte, under this machine's two roofs or the chip's published ones."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tpu_lab.metrics import Metrics
from tpu_lab.place import place
from tpu_lab.roofline import Point, Roofline, missing, of
from tpu_lab.viz import frame, number, roof_plot, theme
from tpu_lab.viz.view import View, template

TOP = 8
NEAR = 0.3  # of its roof: below it neither arithmetic nor memory explains the time
SORTS = {"time": lambda p: p.ns, "flops": lambda p: p.work, "bytes": lambda p: p.cost.bytes}
COLUMNS = ["number", "cost", "place", "phase", "kind", "ops", "device_ms", "measured", "flops", "bytes", "intensity",
           "gflop_s", "bound", "least_ms", "of_roof"]  # fmt: skip


def rows(m: Metrics, order: str = "time"):
    """One row a cost, and a last one for all launches: number (as in the plot), cost, place, phase, kind, ops, device_ms a
    step, measured (else a share), flops, bytes, intensity (FLOP/B), gflop_s (None unless measured), bound, least_ms
    (what the roof allows), of_roof (0 to 1, over 1 when caches helped; None unless measured)."""
    import pandas as pd

    if missing(m):
        return pd.DataFrame([], columns=COLUMNS)
    r = of(m)
    ordered = [*sorted(r.points, key=SORTS[order], reverse=True), r.total]
    return pd.DataFrame([_row(i, p) for i, p in enumerate(ordered, 1)], columns=COLUMNS)


def _row(i: int, p: Point) -> tuple:
    c = p.cost
    return (i, c.name, place(c.file, c.line), c.phase, c.kind, c.ops, c.ns / 1e6, p.measured, p.work, c.bytes, p.intensity,
            p.rate and p.rate / 1e9, p.bound, p.least_ns / 1e6, p.reached)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One cost as the table prints it. figures: FLOP/B, ms, and GFLOP/s or the least ms; last: of its roof, and the bound."""

    number: str
    paint: str
    name: str
    place: str
    way: str
    figures: tuple[str, str, str]
    reached: str
    bound: str
    tip: str


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    hint: str = ""
    plot: roof_plot.Plot | None = None
    heads: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    others: Line | None = None
    total: Line | None = None
    remarks: tuple[str, ...] = ()
    roofs: tuple[str, ...] = ()


def draw(m: Metrics, limit: int | None = None, sort: str | None = None) -> View:
    """limit: how many costs are numbered; sort: by time (the default), flops or bytes."""
    if sort is not None and sort not in SORTS:
        raise ValueError(f"the roofline sorts by {', '.join(SORTS)}, not by {sort!r}")
    store: dict = {}

    def model() -> Model:
        if "model" not in store:
            store["model"] = _model(m, limit or TOP, sort or "time")
        return store["model"]

    return View(
        "roofline", _title(m), _finding(m), lambda: rows(m, sort or "time"), lambda: _text(model()),
        lambda: template("roofline.html", v=model()),
    )  # fmt: skip


def _why(m: Metrics) -> str:
    return frame.nothing(m) or missing(m)


def _finding(m: Metrics) -> str:
    if why := _why(m):
        return why[0].lower() + why[1:]
    title = _title(m)
    return title[0].lower() + title[1:]


def _title(m: Metrics) -> str:
    if why := _why(m):
        return why
    assert m.peak is not None
    r = of(m)
    whose = "this CPU\u2019s peak" if m.peak.label.startswith("this CPU") else "the peak"
    top = [p for p in r.points[:TOP] if p.measured]
    fast = sorted(p.reached for p in top if p.bound == "compute" and p.reached is not None)
    slow = [p for p in top if p.bound == "memory"]
    if not all(p.measured for p in r.points[:TOP]):
        t, at = r.total, number.percent(r.total.reached, 2)
        what = "The launch reaches" if t.cost.name == "the launch" else "The launches reach"
        return f"{what} {at} of the roof: {number.time(t.ns)}, where {number.time(t.least_ns)} would be possible"
    best = max((p.reached or 0.0 for p in top), default=0.0)
    if (r.total.reached or 0.0) < NEAR:
        return f"All costs together reach {number.percent(r.total.reached, 2)} of their roof, the best of them {number.percent(best, 2)}"
    waits = sum(p.ns for p in r.points if p.bound == "memory" and (p.reached or 0.0) >= NEAR) / r.total.ns
    if fast and slow:
        return f"The matmuls run at {_span(fast)} of {whose}; {number.percent(waits, 2)} of the time waits for memory"
    if fast:
        return f"All of the top costs are bound by compute and run at {_span(fast)} of {whose}"
    return f"{number.percent(waits, 2)} of the device time waits for memory, at {number.percent(best, 2)} of its bandwidth at best"


def _span(values: list[float]) -> str:
    """`83 to 86%`, `83%`."""
    first, last = number.sig(100 * values[0], 2), number.sig(100 * values[-1], 2)
    return f"{last}%" if first == last else f"{first} to {last}%"


def _model(m: Metrics, top: int, order: str) -> Model:
    title = _title(m)
    if why := _why(m):
        return Model(title, tuple(frame.provenance(m)), _hint(m, why))
    assert m.peak is not None and m.peak.bandwidth is not None
    r = of(m)
    ordered = sorted(r.points, key=SORTS[order], reverse=True)
    shown, rest = ordered[:top], ordered[top:]
    shared = not all(p.measured for p in shown)
    per = " a step" if m.steady else ""
    meta: list[tuple[str, bool]] = [
        (f"{number.plural(len(shown), 'cost')}, {number.time(sum(p.ns for p in shown))} of {number.time(r.total.ns)}{per}", False)
    ]
    if m.trace.meta.get("mode"):
        meta.append((m.trace.meta["mode"], True))
    meta.append(("area is time, of hollow points the least" if shared else "area is time", False))
    meta.append(("FLOPs on paper, bytes from shapes, " + ("launches measured" if shared else "times measured"), False))
    if m.trace.meta.get("compiler"):
        meta.append((m.trace.meta["compiler"] + frame.cores(m.trace.meta), False))
    unit = number.time_unit(max(p.ns for p in [*shown, r.total]))
    lines = tuple(_line(str(i), p, unit, shared) for i, p in enumerate(shown, 1))
    others = _others(rest, unit, shared) if rest else None
    total = _line("", r.total, unit, shared)
    marks = [(str(i), p) for i, p in enumerate(shown, 1)] + ([("all", r.total)] if shared else [])
    return Model(
        title, tuple(meta), "", roof_plot.plot(r, marks), _heads(shared, unit[0]), lines, others, total,
        tuple(_remarks(r, shown, shared)), _roofs(m),
    )  # fmt: skip


def _hint(m: Metrics, why: str) -> str:
    if frame.nothing(m):
        return "" if m.trace.meta.get("recording") else frame.nothing_hint(m)
    if why.startswith("No roof"):
        return "Its peak is not in chips.py: give it, tpu_lab.profile(..., peak_flops=), on a chip whose memory bandwidth is known."
    if why.startswith("No matmul"):
        return f"{number.size(m.bytes)} went in and out of the launches. Give peak_flops= to draw them under a roof all the same."
    return "The launches were recorded, but nobody saw when their results were ready."


def _heads(shared: bool, unit: str) -> tuple[str, ...]:
    return ("FLOP/B", unit, f"alone {unit}" if shared else "GFLOP/s", "% of its roof")


def _line(label: str, p: Point, unit: tuple[str, float], shared: bool) -> Line:
    """shared: the table holds times that are shares, so it has a column for the least time of ops alone instead of the rate."""
    least = f"\u2265 {number.sig(p.least_ns / unit[1])}"
    third = least if shared else number.sig(p.rate / 1e9 if p.rate is not None else None)
    reached = number.sig(100 * p.reached, 2) if p.reached else ""
    tip = (
        f"{p.cost.name}: {number.sig(p.intensity)} FLOP/B, {number.work(p.work)}, {number.size(p.cost.bytes)}, "
        + (f"{number.time(p.ns)}, {number.rate(p.rate)}" if p.measured else f"at least {number.time(p.least_ns)}")
        + f" \u00b7 bound by {p.bound}"
    )
    return Line(
        label, theme.paint(p.cost.kind), p.cost.name.removesuffix(", backward"), place(p.cost.file, p.cost.line),
        frame.WAY.get(p.cost.phase, ("", ""))[0] if p.cost.file else "",
        (number.sig(p.intensity), number.sig(p.ns / unit[1]), third), reached, p.bound, tip,
    )  # fmt: skip


def _others(rest: list[Point], unit: tuple[str, float], shared: bool) -> Line:
    ns, work = sum(p.ns for p in rest), sum(p.work for p in rest)
    nbytes, least = sum(p.cost.bytes for p in rest), sum(p.least_ns for p in rest)
    third = f"\u2265 {number.sig(least / unit[1])}" if shared else number.sig(work / ns if ns else None)
    memory = sum(p.least_ns for p in rest if p.bound == "memory")
    return Line(
        "", "", number.plural(len(rest), "other"), "", "", (number.sig(work / nbytes if nbytes else 0), number.sig(ns / unit[1]), third),
        "" if shared or not ns else number.sig(100 * least / ns, 2), "memory" if 2 * memory >= least else "compute", "",
    )  # fmt: skip


def _remarks(r: Roofline, shown: list[Point], shared: bool):
    names = [str(i) for i, p in enumerate(shown, 1) if p.bound == "memory" and (p.reached or 0.0) >= NEAR]
    far = [str(i) for i, p in enumerate(shown, 1) if (p.reached or 0.0) < NEAR]
    if shared:
        yield (
            "Inside one launch nobody measured the single line. Its time is a share by FLOPs and bytes, so dividing by it "
            "would say nothing: hollow points stand at their roof, and only the launch is measured. Strict mode measures each op."
        )
        yield (
            "alone: what the ops of a line take at least if they run one by one (\u2265). Fused, what one op writes for the next "
            "never moves, so together they can take less: the bytes of the launch are what goes in and out of its program."
        )
    elif names:
        be = "moves" if len(names) == 1 else "move"
        them = "it" if len(names) == 1 else "them"
        yield f"{_list(names)} {be} bytes rather than compute: fuse {them}, or hold {them} in bf16."
    if far and not shared:
        lie, they = ("lies", "it takes") if len(far) == 1 else ("lie", "they take")
        yield f"{_list(far)} {lie} far under both roofs: neither arithmetic nor memory explains the time {they}. Small ops, or a busy machine."
    if any((p.reached or 0) > 1 for p in shown):
        yield "Over 100%: the bytes came from the caches, which the memory roof does not count, or the peak was measured on a busy machine."


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _roofs(m: Metrics) -> tuple[str, ...]:
    """Where the two roofs come from."""
    p = m.peak
    assert p is not None and p.bandwidth is not None
    return (
        f"{number.rate(p.flops)}: {p.label}, {p.source}",
        f"{roof_plot.bandwidth(p.bandwidth)}: {p.bandwidth_label}, {p.bandwidth_source}" if p.bandwidth_label else roof_plot.bandwidth(p.bandwidth),
    )


def _text(v: Model) -> list:
    out: list = [[(v.title, "b")], *frame.meta_lines(v.meta), []]
    if v.hint or not v.heads:
        return [*out, *([part] for part in textwrap.wrap(v.hint, 98))]
    a, b, c, d = v.heads
    out.append([(f"      {'cost':<34}{'line':<18}{a:>8}{b:>8}{c:>10}  {d}", "dim")])
    for line in (*v.lines, *([v.others] if v.others else []), *([v.total] if v.total else [])):
        style = {"matmul": "matmul", "move": "move", "": "dim"}.get(line.paint, "other")
        x, y, z = line.figures
        words = f"{line.reached} {line.bound}".strip()
        out.append([(f"{line.number:>4}  ", style), f"{_fit(line.name, 26):<27}{line.way:<7}{_end(line.place, 17):<18}{x:>8}{y:>8}{z:>10}  {words}"])
    out.append([])
    for remark in (*v.remarks, *v.roofs):
        out += [[(part, "dim")] for part in textwrap.wrap(remark, 98)]
    return out


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"


def _end(text: str, width: int) -> str:
    """Cut at its front: a place ends with the line, which is what it is for."""
    return text if len(text) <= width else "\u2026" + text[1 - width :]
