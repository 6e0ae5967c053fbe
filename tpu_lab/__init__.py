"""TPU Lab: see what your PyTorch does on a TPU, from any laptop. Importing it registers the device "tpu"."""

from __future__ import annotations

__version__ = "0.1.0"

from tpu_lab.backend import platform as _platform

_platform.prepare()  # before jax is imported

from tpu_lab.backend import device as _device  # noqa: E402

_device.register()

from tpu_lab import check  # noqa: E402
from tpu_lab.aot import compile_for  # noqa: E402
from tpu_lab.backend.fallback import FallbackWarning  # noqa: E402
from tpu_lab.coverage import coverage  # noqa: E402
from tpu_lab.guards import no_recompile  # noqa: E402
from tpu_lab.modes import compare_modes  # noqa: E402
from tpu_lab.numerics import compare, find_nonfinite  # noqa: E402
from tpu_lab.profile import Profile, profile  # noqa: E402


def load_ipython_extension(ipython) -> None:
    """`%load_ext tpu_lab`: adds %tpu_profile and %%tpu_profile."""
    from tpu_lab import magic

    magic.load_ipython_extension(ipython)


__all__ = ["FallbackWarning", "Profile", "check", "compare", "compare_modes", "compile_for", "coverage", "find_nonfinite", "no_recompile", "profile"]
