"""What XLA:TPU can compile for: a chip or a slice of chips, by the name people use: "v6e", "v5p", "v6e:2x4".

Memory per device: `hbm` is what XLA:TPU leaves a program, from its own message for one that is too big (libtpu
0.0.42: "exceeds available HBM (31.25G)"); `vmem` is jax's `pltpu.get_tpu_info` (jax 0.10.2). Peaks are in chips.py.
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
    shape = [int(n) for n in match[2].split("x")] if match[2] else [1] * dimensions
    if len(shape) != dimensions or 0 in shape:
        example = "2x4" if dimensions == 2 else "2x2x1"
        raise ValueError(f"chip={name!r}: a slice of {chip} has {dimensions} dimensions, such as {chip}:{example}")
    chips = math.prod(shape)
    text = "x".join(map(str, shape))
    bounds = (1, 1, 1) if chips == 1 else None
    short = chip if chips == 1 else f"{chip}:{text}"
    return Target(short, CHIPS[chip], f"{theirs}:{text}", bounds, chips * CHIPS[chip].devices, hbm, vmem)
