"""Which XLA platform runs the device: a TPU chip where one is, else the CPU; `TPU_LAB_PLATFORM=cpu|tpu` chooses.

Decided before jax is imported: with libtpu installed and no chip, a plain `import jax` would try to start it.
"""

from __future__ import annotations

import os
from pathlib import Path

from tpu_lab.backend.chip_files import has_chip


def chip_present() -> bool:
    """Does this machine have a TPU that can be reached? Not an NPU's /dev/accel/ or some /dev/vfio/."""
    return has_chip(Path("/"))


def choose() -> str:
    """"tpu" or "cpu", by TPU_LAB_PLATFORM or by looking. ValueError for another name."""
    wanted = os.environ.get("TPU_LAB_PLATFORM", "").strip().lower()
    if wanted not in ("", "cpu", "tpu"):
        raise ValueError(f"TPU_LAB_PLATFORM={wanted!r}: use cpu or tpu, or leave it unset to look for a chip")
    return wanted or ("tpu" if chip_present() else "cpu")


def prepare() -> str:
    """Tell jax the platform, unless the user told it himself. Returns the platform's name."""
    name = choose()
    os.environ.setdefault("JAX_PLATFORMS", "cpu" if name == "cpu" else "tpu,cpu")
    if "cpu" == name:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    return name
