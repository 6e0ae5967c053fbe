"""The memory view's picture: stepped bands over program order, as SVG paths that hold no words."""

from __future__ import annotations

import math

import numpy as np

from tpu_lab.memory_use import MemoryUse

WIDTH, HEIGHT = 1000, 170  # user units; the height is also its pixels
LEVELS = 500  # at most: beyond it a level is the highest of several


def inside(use: MemoryUse) -> list[tuple[int, int, int, int]]:
    """(first op, last op, bytes before, bytes that the program adds while it runs) of launches with temporary buffers."""
    position = {id(launch): i for i, launch in enumerate(use.m.trace.launches)}
    out = []
    for launch, nbytes in use.scratch:
        i = position[id(launch)]
        if i < len(use.bytes):
            last = int(use.at[i])
            before = sum(int(own[i - 1]) for own in use.kept.values()) if i else int(use.bytes[i])
            grown = max(0, int(use.bytes[i]) - before)
            out.append((launch.ops[0] if launch.ops else last, last, before, grown + nbytes))
    return out


def columns(use: MemoryUse, x) -> tuple[list[float], list[tuple[int, bool]]]:
    """([edges of the levels], [the point that each level shows, and whether after it]).

    A point's level lasts one op; then what nobody holds any more is gone, until the next point. The step begins with
    what the one before it left.
    """
    own = np.arange(use.first, use.last + 1)
    left, after = x(use.at[own]), x(use.at[own] + 1)
    following = np.append(left[1:], float(WIDTH))
    if len(own) > LEVELS:
        bucket = (left * (LEVELS / WIDTH)).astype(int)
        order = np.lexsort((use.bytes[own], bucket))
        highest = order[np.append(bucket[order][1:] != bucket[order][:-1], True)]
        return [0.0, *left[highest][1:].tolist(), float(WIDTH)], [(int(own[i]), False) for i in highest]
    points: list[tuple[int, bool]] = [(use.first - 1, True)] if use.first else []
    lefts = [0.0] if use.first else []
    for i, p in enumerate(own.tolist()):
        lefts.append(float(left[i]) if lefts else 0.0)
        points.append((p, False))
        if after[i] < following[i]:
            lefts.append(float(after[i]))
            points.append((p, True))
    if len(lefts) > 1 and lefts[1] == 0.0:
        del lefts[1], points[0]
    return [*lefts, float(WIDTH)], points


def area(edges, low, high, y) -> str:
    """A stepped band as a closed path."""
    up = "".join(f"H{_n(edges[i])}V{_n(y(high[i]))}" for i in range(len(high)))
    down = "".join(f"V{_n(y(low[i]))}H{_n(edges[i])}" for i in range(len(low) - 1, -1, -1))
    return f"M{_n(edges[0])} {_n(y(high[0]))}{up}H{_n(edges[-1])}{down}z"


def outline(edges, total, y) -> str:
    return f"M{_n(edges[0])} {_n(y(total[0]))}" + "".join(f"H{_n(edges[i])}V{_n(y(total[i]))}" for i in range(1, len(total))) + f"H{_n(edges[-1])}"


def boxes(found, x, y) -> str:
    return "".join(
        f"M{_n(x(a))} {_n(y(base + n))}H{_n(x(b + 1))}V{_n(y(base))}H{_n(x(a))}z" for a, b, base, n in found
    )


def tick(value: float) -> float:
    """A round distance between two or three ticks."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value / 2))
    return next(power * k for k in (5, 2, 1) if power * k <= value / 2 * 1.001)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def spark(edges, total, ceiling: float, width: int = 88) -> str:
    """The curve in blocks of eighths."""
    out = []
    for k in range(width):
        a, b = WIDTH * k / width, WIDTH * (k + 1) / width
        inside = [total[i] for i in range(len(total)) if edges[i] < b and edges[i + 1] > a] or [0.0]
        out.append(" \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"[min(8, math.ceil(8 * max(inside) / ceiling))])
    return "".join(out)
