"""Out of memory, said before anything runs: which op or program, how much, of how much, and the way out.

XLA allocates while the program runs. By then a fused step has given its weights away, and on a CPU the system may end
the process instead of refusing. So a result that the device can never hold is refused at its op, in each mode, and a
program that needs more than is free now is refused at its launch. Nothing has run then, and no value is lost.
"""

from __future__ import annotations

import functools
import math

import torch

from tpu_lab.backend import dtypes, memory
from tpu_lab.viz import number

LARGE = 64 << 20  # bytes; what needs less is not worth a question to the system


@functools.cache
def _most() -> int:
    """Bytes that the device has."""
    return memory.mem_get_info()[1]


def check_op(name: str, fresh, site) -> None:
    """torch.OutOfMemoryError when the results of one op are larger than the device.

    fresh: signature.Fresh, all of them; site: a function that gives the user's line (where.Site).
    """
    total = sum(math.prod(f.base.shape) * f.base.jdtype.itemsize for f in fresh)
    if total > LARGE and total > _most():
        made = " and ".join(dtypes.aval(f.size, f.dtype) for f in fresh)
        raise torch.OutOfMemoryError(
            f"out of memory: {name.removesuffix('.default')} makes {made}, {number.size(total)}, and the device has "
            f"{number.size(_most())}{_at(site())}. Way out: fewer rows (a smaller batch), or smaller sizes"
        )


def check_program(program, site) -> None:
    """torch.OutOfMemoryError when a program's results and temporary buffers need more than is free now."""
    if program.needs <= LARGE:
        return
    free = memory.mem_get_info()[0]
    if program.needs > free:
        raise torch.OutOfMemoryError(
            f"out of memory: this launch needs {number.size(program.needs)} for its results and temporary buffers, and "
            f"{number.size(free)} of {number.size(_most())} are free{_at(site())}. Nothing of it has run. Way out: a smaller "
            "batch, torch.utils.checkpoint, bfloat16, or let go of tensors that are no longer needed (del, None)"
        )


def _at(site) -> str:
    return f", at {site.file}:{site.line}: {site.code}" if site.file else ""
