"""What XLA:TPU can compile for: a chip or a slice of chips, by the name people use: "v6e", "v5p", "v6e:2x4".

Memory per device: `hbm` is what XLA:TPU leaves a program, from its own message for one that is too big (libtpu
0.0.42: "exceeds available HBM (31.25G)"); `vmem` is jax's `pltpu.get_tpu_info` (jax 0.10.2). Peaks are in chips.py.

Slices that there are: docs.cloud.google.com/tpu/docs/v5e, v6e (the same two-dimensional ones), v4, v5p, tpu7x (three
dimensions: a few within a cube of 4x4x4 chips, from there on multiples of 4). Their dimensions have no order.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tpu_lab.chips import CHIPS, Chip

_GIB, _MIB = 1 << 30, 1 << 20
# name -> (libtpu's name, dimensions of a topology, usable HBM and VMEM of a device in bytes)
_KNOWN = {
    "v4": ("v4", 3, int(15.25 * _GIB), 16 * _MIB),
    "v5e": ("v5e", 2, int(15.75 * _GIB), 128 * _MIB),
    "v5p": ("v5p", 3, int(95.74 * _GIB), 64 * _MIB),
    "v6e": ("v6e", 2, int(31.25 * _GIB), 128 * _MIB),
    "v7x": ("tpu7x", 3, int(94.75 * _GIB), 64 * _MIB),
}
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_WITHIN_A_CUBE = ((1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_LARGEST = {"v4": 4096, "v5p": 6144, "v7x": 9216}  # chips
_OTHER = {"tpu7x": "v7x", "ironwood": "v7x", "v6": "v6e", "trillium": "v6e", "v5litepod": "v5e"}


@dataclass(frozen=True)
class Target:
    """One device of a chip or a slice. Figures are per device: v4 and v7x have two a chip (JAX's count)."""

    name: str  # "v6e", "v6e:2x4"
    chip: Chip
    topology: str  # libtpu's name: "v6e:1x1"
    bounds: tuple[int, ...] | None  # chips a host, where the default does not divide the topology
    devices: int  # in the whole topology
    hbm: int  # bytes a program may use
    vmem: int  # bytes

    @property
    def flops(self) -> float:
        """Dense bf16 FLOP/s at most."""
        return self.chip.bf16 / self.chip.devices

    @property
    def bandwidth(self) -> float:
        """Bytes/s of HBM at most."""
        return self.chip.bandwidth / self.chip.devices


def target(name: str) -> Target:
    """The target of a name; ValueError that lists the names."""
    match = re.fullmatch(r"([a-z0-9]+)(?::(\d+(?:x\d+)*))?", str(name).strip().lower())
    chip = match and _OTHER.get(match[1], match[1])
    if not match or chip not in _KNOWN:
        raise ValueError(f"chip={name!r}: choose {', '.join(_KNOWN)}, or a slice such as v6e:2x4")
    theirs, dimensions, hbm, vmem = _KNOWN[chip]
    shape = sorted(int(n) for n in match[2].split("x")) if match[2] else [1] * dimensions
    if problem := _none_such(chip, dimensions, shape):
        raise ValueError(f"chip={name!r}: {problem}")
    if shape[0] == 1 and dimensions == 3:
        shape = [*shape[1:], 1]  # 2x2x1, as everybody writes it
    chips = math.prod(shape)
    text = "x".join(map(str, shape))
    bounds = (1, 1, 1) if chips == 1 else None
    short = chip if chips == 1 else f"{chip}:{text}"
    return Target(short, CHIPS[chip], f"{theirs}:{text}", bounds, chips * CHIPS[chip].devices, hbm, vmem)


def _none_such(chip: str, dimensions: int, shape: list[int]) -> str:
    """Why no slice of this chip has these dimensions, in ascending order; "" if there is one."""
    if len(shape) != dimensions:
        return f"a slice of {chip} has {dimensions} dimensions, such as {chip}:{'2x4' if dimensions == 2 else '2x2x1'}"
    if dimensions == 2:
        few = ", ".join(f"{a}x{b}" for a, b in _FLAT)
        return "" if tuple(shape) in _FLAT else f"there is no such slice of {chip}, but {few}"
    large = not any(n % 4 or not n for n in shape) and math.prod(shape) <= _LARGEST[chip]
    if large or tuple(shape) in _WITHIN_A_CUBE:
        return ""
    return (
        f"there is no such slice of {chip}, but 1x1x1, 2x2x1, 2x2x2, 2x2x4, 2x4x4 and multiples of 4 in all three "
        f"dimensions, such as 4x4x8, up to {_LARGEST[chip]} chips"
    )
