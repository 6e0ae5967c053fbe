"""`torch.Generator(device="tpu")`: torch asks a C++ hook for it that Python cannot give, so it is one clear error.

CPU generators serve instead: `torch.randn(3, generator=torch.Generator().manual_seed(0), device="tpu")`.
"""

from __future__ import annotations

import torch

REFUSED = (
    "torch.Generator(device='tpu') is not possible: the device has one random sequence, seeded by torch.manual_seed. For a "
    "sequence of your own pass a CPU generator: torch.randn(3, generator=torch.Generator().manual_seed(0), device='tpu')"
)
_Generator = torch._C.Generator


class _Kind(type(_Generator)):
    """Every generator is an instance, also those that C++ makes."""

    def __instancecheck__(cls, value):
        return isinstance(value, _Generator)

    def __subclasscheck__(cls, other):
        return issubclass(other, _Generator)


def apply() -> None:
    """Install it."""

    class Generator(_Generator, metaclass=_Kind):
        __doc__ = _Generator.__doc__

        def __new__(cls, device="cpu"):
            if torch.device(device).type == "tpu":
                raise RuntimeError(REFUSED)
            return _Generator(device)

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    torch.Generator = Generator
