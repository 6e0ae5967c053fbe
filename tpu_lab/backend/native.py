"""PyTorch's own words for a wrong call: ask its CPU kernel, on zeros of the same shapes, what it would say.

The meta kernels find the same mistakes, but some word them in their own way.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

LIMIT = 1 << 20  # elements of all arguments together; above it the meta kernel's words have to do


def error(record, args, kwargs) -> Exception | None:
    """What the CPU raises for this call; None if it raises nothing or the arguments are too big to try."""
    seen = 0

    def stand_in(value):
        nonlocal seen
        if isinstance(value, torch.Tensor):
            seen += value.numel()
            if seen > LIMIT:
                raise MemoryError
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return [stand_in(v) for v in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    with _disable_current_modes(), torch.no_grad():
        try:
            record.overload(*[stand_in(a) for a in args], **{k: stand_in(v) for k, v in kwargs.items()})
        except MemoryError:
            return None
        except Exception as found:
            return found.with_traceback(None)
    return None
