"""The lanes of one step on a common time axis: launches as ticks, the host, the device.

A lane of few pieces is drawn as boxes with edges and hatches. One of many becomes a barcode: an axis has COLUMNS
columns, each holds one paint, and what a column rounds away goes to the next, so that each paint keeps its length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpu_lab.metrics import Metrics, Step
from tpu_lab.viz import number, theme

COLUMNS = 720
FEW = 48  # pieces that are drawn one by one
KINDS = ("matmul", "other", "move")
WORDS = {"dispatch": "dispatch", "wait": "waiting", "python": "Python", "matmul": "matmul", "other": "elementwise", "move": "data movement"}


@dataclass(frozen=True)
class Piece:
    """From `start` to `end`, in ns since the step began."""

    start: float
    end: float
    paint: str


@dataclass(frozen=True)
class Box:
    """A piece on the page, in percent of the axis."""

    left: str
    width: str
    paint: str
    tip: str


@dataclass(frozen=True)
class Lane:
    """Boxes, or paths by paint over an SVG COLUMNS wide inside an outline, whose length is in percent of the axis."""

    boxes: tuple[Box, ...]
    paths: tuple[tuple[str, str], ...]
    label: str
    outline: str = ""


@dataclass(frozen=True)
class Lanes:
    """The three lanes of one mode."""

    ticks: str  # an SVG path, 1000 wide
    wide: bool  # few ticks: they may be thick
    launches: str
    host: Lane
    device: Lane


def lanes(m: Metrics, step: Step, axis: float) -> Lanes:
    """The drawing of one step; axis: its length in ns."""
    at = sorted({round(1000 * t / axis, 1) for t in launch_times(m, step)})
    n = len(m.launches_in(step))
    ticks = "".join(f"M{x:g} 0V14" for x in at)
    host, device = host_pieces(m, step), device_pieces(m, step)
    return Lanes(
        ticks, n <= 12, f"{number.plural(n, 'launch', 'launches')} in {number.time(step.ns)}",
        _lane("host", host, axis), _lane("device", device, axis),
    )  # fmt: skip


def launch_times(m: Metrics, step: Step) -> list[float]:
    """When each launch called into XLA, in ns since the step began."""
    return [r.time_ns + r.lookup_ns + r.compile_ns - step.start_ns for r in m.launches_in(step)]


def host_pieces(m: Metrics, step: Step) -> list[Piece]:
    """Waiting for the device, our own work (dispatch), and the rest (Python), in this order where they overlap."""
    trace = m.trace
    waits = [(w.time_ns, w.time_ns + w.wait_ns + w.copy_ns) for w in trace.waits]
    launches = m.launches_in(step)
    waits += [(r.ready_ns - r.device_ns, r.ready_ns) for r in launches if r.reason == "debug" and r.ready_ns]
    busy = [(r.time_ns, r.time_ns + r.lookup_ns + r.compile_ns + r.dispatch_ns) for r in launches]
    busy += [(o.time_ns, o.time_ns + (o.host_ns or o.record_ns)) for o in m.ops_in(step)]
    return _cover(step, [("wait", waits), ("dispatch", busy)], "python")


def device_pieces(m: Metrics, step: Step) -> list[Piece]:
    """The device's time by launch, in each first matmuls, then the others: by the shares of its ops."""
    starts, ends = m.timeline.device
    position = {op.index: i for i, op in enumerate(m.trace.ops)}
    out: list[Piece] = []
    free = 0.0
    for i, launch in enumerate(m.launches_in(step), step.launches[0]):
        start, end = max(float(starts[i]) - step.start_ns, free), min(float(ends[i]), step.end_ns) - step.start_ns
        if end <= start:
            continue
        share = dict.fromkeys(KINDS, 0.0)
        for index in launch.ops:
            if index in position:
                share[_kind(m.trace.ops[position[index]].kind)] += float(m.ops_time[position[index]])
        total = sum(share.values())
        if not total:
            share, total = {"matmul" if launch.flops else "other": 1.0}, 1.0
        for paint, part in share.items():
            if part:
                out.append(Piece(start, start + (end - start) * part / total, paint))
                start, end, total = out[-1].end, end, total - part
        free = end
    return out


def _kind(kind: str) -> str:
    paint = theme.paint(kind)
    return paint if paint in KINDS else "other"


def _cover(step: Step, layers, rest: str) -> list[Piece]:
    """The step cut where any layer begins or ends; each part belongs to the first layer that covers it."""
    length = step.end_ns - step.start_ns
    clipped = []
    for name, intervals in layers:
        spans = np.array(intervals, dtype=np.float64).reshape(-1, 2) - step.start_ns
        spans = np.clip(spans, 0, length)
        clipped.append((name, spans[spans[:, 1] > spans[:, 0]]))
    edges = np.unique(np.concatenate([[0.0, length], *(s.ravel() for _, s in clipped)]))
    kind = np.full(len(edges) - 1, len(layers))
    for number_, (_, spans) in reversed(list(enumerate(clipped))):
        depth = np.zeros(len(edges))
        np.add.at(depth, np.searchsorted(edges, spans[:, 0]), 1)
        np.add.at(depth, np.searchsorted(edges, spans[:, 1]), -1)
        kind[np.cumsum(depth)[:-1] > 0] = number_
    names = [*(name for name, _ in layers), rest]
    out: list[Piece] = []
    for a, b, k in zip(edges[:-1], edges[1:], kind, strict=True):
        if out and out[-1].paint == names[k]:
            out[-1] = Piece(out[-1].start, float(b), names[k])
        else:
            out.append(Piece(float(a), float(b), names[k]))
    return out


def _lane(what: str, pieces: list[Piece], axis: float) -> Lane:
    sums: dict[str, float] = {}
    for p in pieces:
        sums[p.paint] = sums.get(p.paint, 0.0) + p.end - p.start
    label = f"{what}: " + (", ".join(f"{WORDS[k]} {number.time(v)}" for k, v in sums.items()) or "nothing measured")
    if len(pieces) <= FEW:
        boxes = tuple(
            Box(f"{100 * p.start / axis:.2f}", f"{100 * (p.end - p.start) / axis:.2f}", p.paint,
                f"{WORDS[p.paint]}: {number.time(p.end - p.start)}")
            for p in pieces
        )  # fmt: skip
        return Lane(boxes, (), label)
    whole = pieces[-1].end - pieces[0].start
    outline = f"{100 * pieces[-1].end / axis:.2f}" if sum(sums.values()) > 0.999 * whole and not pieces[0].start else ""
    return Lane((), _paths(columns(pieces, axis, COLUMNS)), label, outline)


def columns(pieces: list[Piece], axis: float, n: int) -> list[str]:
    """The paint of each of n columns over the axis, "" for nothing; the length of each paint is kept."""
    paints = list(dict.fromkeys(p.paint for p in pieces))
    cover = np.zeros((n, len(paints)))
    edges = np.linspace(0, axis, n + 1)
    for k, paint in enumerate(paints):
        x = np.array([(p.start, p.end) for p in pieces if p.paint == paint])
        done = np.concatenate([[0.0], np.cumsum(x[:, 1] - x[:, 0])])
        cover[:, k] = np.diff(np.interp(edges, x.ravel(), np.column_stack([done[:-1], done[1:]]).ravel()))
    cover *= n / axis
    owed = np.zeros(len(paints) + 1)
    out = []
    for row in cover:
        owed += [*row, max(0.0, 1 - row.sum())]
        k = int(owed.argmax())
        owed[k] -= 1
        out.append(paints[k] if k < len(paints) else "")
    return out


def _paths(paints: list[str]) -> tuple[tuple[str, str], ...]:
    out: dict[str, list[str]] = {}
    start = 0
    for i in range(1, len(paints) + 1):
        if i == len(paints) or paints[i] != paints[start]:
            if paints[start]:
                out.setdefault(paints[start], []).append(f"M{start} 0h{i - start}v16h-{i - start}z")
            start = i
    return tuple((paint, "".join(d)) for paint, d in out.items())


def nice(axis: float) -> list[float]:
    """Round times along an axis, from 0, at most seven of them."""
    rough = axis / 6
    power = 10 ** np.floor(np.log10(rough))
    gap = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough)
    return [float(i * gap) for i in range(int(axis / gap) + 1)]
