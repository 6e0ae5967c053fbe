"""PyTorch's own words for a wrong call: ask its CPU kernel, on zeros of the same shapes, what it would say.

The meta kernels find the same mistakes, but some word them in their own way.
"""

from __future__ import annotations

import re
import warnings

import torch
from torch.utils._python_dispatch import _disable_current_modes

LIMIT = 1 << 20  # elements of all arguments together; above it the meta kernel's words have to do
ABOUT_OUT = re.compile("shape|dtype|scalar type|cast|memory location")  # not: that a matrix of zeros is singular

ABOUT_KIND = re.compile(
    "(?i)expected.*(type|dimension|range|index)|same (d?type|dtype)|must (not )?(have|be)|only support|not supported|no longer supported"
    "|out of (range|bounds)|complex|without overflow|dtypes match|slice size|supposed to be|not yet implemented"
)
NO_KERNEL = re.compile("not implemented for '(Bool|Complex)|does not support bool")  # half types are another matter: CPU kernels come late
ABOUT_VALUES = re.compile("singular|MKL|distribution|rows of lengths|[Pp]ivots|ZeroDivision")  # of zeros that stand in; of MKL itself
# No meta kernel checks their arguments as the CPU does: it is asked for each signature.
ASKED = frozenset(
    "uniform uniform_ multinomial complex polar as_strided_scatter index_add index_add_ random random_ select_scatter slice_scatter "
    "index_select heaviside var std var_mean std_mean _histogramdd_bin_edges _histogramdd_from_bin_cts".split()
)


def about_nothing(record, args, kwargs) -> Exception | None:
    """What the CPU raises for a call with an empty tensor: where nothing is to be computed every kernel has its own rule."""
    found = error(record, args, kwargs)
    if found is None or isinstance(found, (NotImplementedError, torch.linalg.LinAlgError)) or ABOUT_VALUES.search(str(found)):
        return None
    return found


def error(record, args, kwargs) -> Exception | None:
    """What the CPU raises for this call; None if it raises nothing or the arguments are too big to try."""
    found = _call(record, args, kwargs)
    return found if isinstance(found, Exception) else None


def answer(record, args, kwargs):
    """What the CPU gives for this call, of zeros; None if it raises or the arguments are too big to try."""
    found = _call(record, args, kwargs)
    return None if isinstance(found, Exception) else found


def _call(record, args, kwargs):
    seen, made = 0, {}

    def stand_in(value):
        nonlocal seen
        if isinstance(value, torch.Tensor):
            if id(value) not in made:
                seen += value.numel()
                if seen > LIMIT:
                    raise MemoryError
                fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
                fresh.untyped_storage().fill_(0)
                made[id(value)] = fresh
            return made[id(value)]
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return [stand_in(v) for v in value]
        if isinstance(value, torch.Generator):  # asking must not draw from the user's
            return value.clone_state()
        return torch.device("cpu") if isinstance(value, torch.device) else value

    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")
        try:
            return record.overload(*[stand_in(a) for a in args], **{k: stand_in(v) for k, v in kwargs.items()})
        except MemoryError:
            return None
        except Exception as found:
            nowhere = isinstance(found, NotImplementedError) and str(found).startswith("Could not run")
            return None if nowhere else found.with_traceback(None)  # an op of the device alone: the CPU knows nothing
