"""What tiles cost: buffers of one kind in all layers together, useful bytes against held ones, and the dimension at fault.

XLA:TPU lays the last two dimensions of an array's layout out in tiles, `T(8,128)`: 8 sublanes of 128 lanes. A dimension
that is no multiple is rounded up, and the rest of its tiles is held, moved and computed with for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tpu_lab import hlo
from tpu_lab.place import family, place, stem
from tpu_lab.placement import Buffer

_TILE = re.compile(r"T\((\d+),(\d+)\)")


@dataclass(frozen=True)
class Kind:
    """Buffers alike but for the number of their layer."""

    what: str
    where: str  # "model.py:45", "" when the compiler made it
    module: str  # "h.0–5.attn"
    owner: str
    shape: str
    layout: str
    count: int
    logical: int  # bytes of all together
    held: int

    @property
    def factor(self) -> float:
        return self.held / self.logical if self.logical else 1.0

    @property
    def waste(self) -> int:
        return self.held - self.logical


@dataclass(frozen=True)
class Tile:
    """How one tile of a buffer is filled. lanes, sublanes: used ones, of `width` and `height`."""

    lanes: int
    width: int
    sublanes: int
    height: int
    dimension: int  # position in the shape of the dimension that leaves most of it empty
    size: int  # of that dimension
    better: int  # the next size that fills its tiles

    @property
    def by_lanes(self) -> bool:
        """Is it the lanes that stay empty?"""
        return self.lanes / self.width <= self.sublanes / self.height


def kinds(buffers: Iterable[Buffer]) -> list[Kind]:
    """The buffers by kind, those that hold most first. An array that lies in both memories counts once a place."""
    groups: dict[tuple, list[Buffer]] = {}
    for b in buffers:
        if b.held:
            groups.setdefault((b.what, stem(b.module), b.file, b.line, b.owner, b.shape, b.layout), []).append(b)
    out = []
    for (what, _, file, line, owner, shape, layout), many in groups.items():
        out.append(Kind(
            what, place(file, line), family(sorted({b.module for b in many})), owner, shape, layout, len(many),
            sum(b.logical for b in many), sum(b.held for b in many),
        ))  # fmt: skip
    return sorted(out, key=lambda k: (-k.held, k.what, k.shape))


def tile(shape: str, layout: str) -> Tile | None:
    """The last tile of an array, where the padding is; None for arrays without tiles of two dimensions."""
    match = _TILE.search(layout)
    sizes = hlo.dims(shape)
    order = [int(i) for i in re.findall(r"\d+", layout.split(":")[0])]
    if not match or len(order) < 2 or len(order) != len(sizes):
        return None
    height, width = int(match[1]), int(match[2])
    lane, sublane = order[0], order[1]  # the minor dimension first
    lanes, sublanes = (sizes[lane] - 1) % width + 1, (sizes[sublane] - 1) % height + 1
    by_lanes = _fill(sizes[lane], width) <= _fill(sizes[sublane], height)
    dimension, side = (lane, width) if by_lanes else (sublane, height)
    size = sizes[dimension]
    return Tile(lanes, width, sublanes, height, dimension, size, -(-size // side) * side)


def _fill(size: int, side: int) -> float:
    return size / (-(-size // side) * side) if size else 1.0
