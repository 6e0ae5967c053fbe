"""Where things stand in the roofline's picture: two logarithmic axes, the roof, points whose area is time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpu_lab.chips import Peak
from tpu_lab.roofline import Point, Roofline
from tpu_lab.viz import number, theme

WIDTH, HEIGHT = 640, 410  # user units; the picture keeps its aspect ratio
LEFT, RIGHT, TOP, BOTTOM = 46, 4, 22, 44  # margins around the axes
RADIUS = 13.0  # of the point with most time
INSIDE = 7.5  # from this radius on the number stands inside
UNITS = (("PB/s", 1e15), ("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A point: hollow when its place is a bound. The label stands inside when `inside`."""

    label: str
    paint: str
    x: float
    y: float
    r: float
    hollow: bool
    lx: float
    ly: float
    inside: bool
    tip: str
    line: str


@dataclass(frozen=True)
class Plot:
    width: int
    height: int
    box: tuple[float, float, float, float]  # left, top, right, bottom
    xs: tuple[Tick, ...]
    ys: tuple[Tick, ...]
    roof: str  # SVG path
    ridge: tuple[float, float]  # where the roofs meet
    ridge_words: str
    ridge_end: bool  # its words stand left of it
    slope: tuple[float, float, float]  # x, y and angle of the words along the memory roof
    slope_words: str
    flat_words: tuple[str, str]
    marks: tuple[Mark, ...]
    unit: str
    label: str


def bandwidth(value: float) -> str:
    """`21.4 GB/s`."""
    name, factor = number.unit(value, UNITS)
    return f"{number.sig(value / factor)}{number.NBSP}{name}"


def plot(r: Roofline, labelled: list[tuple[str, Point]]) -> Plot:
    """labelled: (number, point), most important first. Points without FLOPs have no place on a logarithmic axis."""
    drawn = [(label, p) for label, p in labelled if p.work and p.cost.bytes]
    x_low, x_high = _decades([0.1, 8 * r.ridge, *(p.intensity for _, p in drawn)], 3)
    rates = [p.rate if p.rate is not None else p.possible for _, p in drawn]
    y_low, _ = _decades([r.peak, 0.5 * min([r.peak, *rates])], 2)
    y_high = max(math.log10(r.peak) + 0.32, *(math.log10(v) + 0.2 for v in rates), y_low + 1)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at_x(value: float) -> float:
        return LEFT + (right - LEFT) * (math.log10(value) - x_low) / (x_high - x_low)

    def at_y(value: float) -> float:
        return bottom - (bottom - TOP) * (math.log10(value) - y_low) / (y_high - y_low)

    start = max(10**x_low, 10**y_low / r.bandwidth)
    first, ridge = (at_x(start), at_y(start * r.bandwidth)), (at_x(r.ridge), at_y(r.peak))
    roof = f"M{_n(first[0])} {_n(first[1])}L{_n(ridge[0])} {_n(ridge[1])}H{_n(right)}"
    angle = math.degrees(math.atan2(ridge[1] - first[1], ridge[0] - first[0]))
    spots = [(at_x(p.intensity), at_y(rate)) for (_, p), rate in zip(drawn, rates)]
    slope = _clear(first, ridge, spots)
    unit, factor = number.work_unit(r.peak)
    most = max((_weight(p) for label, p in drawn if label != "all"), default=1.0) or 1.0
    along = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    ridge_end = ridge[0] > 0.7 * right
    words: list[tuple[float, float]] = [(right - 20 * k, ridge[1] + 20) for k in range(6)]
    words += [(slope[0] + k * along[0] + 11 * along[1], slope[1] + k * along[1] - 11 * along[0]) for k in (-24, -12, 0, 12, 24)]
    words += [(ridge[0] + (-1 if ridge_end else 1) * (10 + 15 * k), bottom - 10) for k in range(7)]
    marks = _marks(drawn, at_x, at_y, most, (LEFT, TOP, right, bottom), words)
    xs = tuple(Tick(round(at_x(10**k), 1), _power(k)) for k in range(x_low, x_high + 1))
    ys = tuple(Tick(round(at_y(10**k), 1), number.sig(10**k / factor, 1)) for k in range(y_low, math.floor(y_high) + 1))
    label = f"{number.plural(len(drawn), 'point')} under two roofs: {bandwidth(r.bandwidth)} and {number.rate(r.peak)}, ridge at {number.sig(r.ridge)} FLOP/B"
    assert r.m.peak is not None
    return Plot(
        WIDTH, HEIGHT, (LEFT, TOP, right, bottom), xs, ys, roof, (round(ridge[0], 1), round(ridge[1], 1)),
        f"ridge {number.sig(r.ridge)} FLOP/B", ridge_end, (round(slope[0], 1), round(slope[1], 1), round(angle, 1)), bandwidth(r.bandwidth),
        (number.rate(r.peak), _source(r.m.peak)), marks, f"{unit}/s", label,
    )  # fmt: skip


def _source(peak: Peak) -> str:
    """`f32 matmul, measured`, `v6e's bf16 peak, published`, `given as peak_flops`."""
    label = peak.label.removeprefix("this CPU\u2019s ")
    if label.startswith("given"):
        return label
    return f"{label}, {'measured' if peak.source.startswith('measured') else 'published'}"


def _decades(values: list[float], least: int) -> tuple[int, int]:
    """Whole decades that hold the values, at least so many."""
    low, high = math.floor(math.log10(min(values)) + 1e-9), math.ceil(math.log10(max(values)) - 1e-9)
    return (low, high) if high - low >= least else (low, low + least)


def _power(k: int) -> str:
    return f"{10**k:,d}" if k >= 0 else f"{10.0**k:.{-k}f}"


def _weight(p: Point) -> float:
    return p.ns if p.measured else p.least_ns


def _clear(first, ridge, spots) -> tuple[float, float]:
    """The place along the memory roof for its words: the farthest from any point, the middle if all are alike."""
    best, best_room = first, -1.0
    for share in (0.45, 0.35, 0.55, 0.25, 0.65, 0.75, 0.18):
        x, y = first[0] + share * (ridge[0] - first[0]), first[1] + share * (ridge[1] - first[1])
        room = min([math.hypot(x - a, y - 10 - b) for a, b in spots] + [48.0])
        if room > best_room + 1:
            best, best_room = (x, y), room
    return best


def _marks(drawn, at_x, at_y, most: float, box, words) -> tuple[Mark, ...]:
    """Large points first, so that small ones lie on top; each label where it hides least. words: places already written on."""
    spots = []
    for label, p in drawn:
        value = p.rate if p.rate is not None else p.possible
        r = max(3.0, RADIUS * math.sqrt(_weight(p) / most))
        if label == "all":
            r = 5.0
        spots.append((label, p, at_x(p.intensity), at_y(value), r))
    order = sorted(range(len(spots)), key=lambda i: -spots[i][4])
    taken: list[tuple[float, float]] = list(words)
    out = []
    for rank, i in enumerate(order):
        label, p, x, y, r = spots[i]
        later = [spots[k] for k in order[rank + 1 :]]
        inside = r >= INSIDE and all(math.hypot(x - o[2], y - o[3]) > o[4] + 5 for o in later)
        lx, ly = x, y
        if not inside:
            lx, ly = _free(x, y, r, label, spots, taken, box)
        taken.append((lx, ly))
        c = p.cost
        what = number.rate(p.rate) if p.rate is not None else f"at most {number.rate(p.possible)}"
        tip = f"{c.name}: {number.sig(p.intensity)} FLOP/B, {what}, {'' if p.measured else 'at least '}{number.time(_weight(p))}"
        line = f"{c.file.rsplit('/', 1)[-1]}:{c.line}" if c.file else ""
        out.append(Mark(label, "all" if label == "all" else theme.paint(c.kind), round(x, 1), round(y, 1), round(r, 1), not p.measured,
                        round(lx, 1), round(ly, 1), inside, tip, line))  # fmt: skip
    return tuple(out)


def _free(x, y, r, label, spots, taken, box) -> tuple[float, float]:
    """The place around a point that is farthest from other points and labels."""
    reach = r + 5 + 3 * len(label)
    best, best_room = (x, y), -1.0
    for angle in (90, 0, 180, 270, 45, 135, 225, 315):
        dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        lx, ly = x + (reach if abs(dx) > 0.1 else r + 8) * dx, y + (r + 8) * dy
        if not (box[0] + 6 < lx < box[2] - 6 and box[1] + 6 < ly < box[3] - 8):
            continue
        room = min(
            [math.hypot(lx - o[2], ly - o[3]) - o[4] for o in spots if (o[2], o[3]) != (x, y)]
            + [math.hypot(lx - a, ly - b) - 6 for a, b in taken]
            + [14.0]
        )
        if room > best_room + 0.5:
            best, best_room = (lx, ly), room
    return best


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
