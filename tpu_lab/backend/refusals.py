"""Numbers that PyTorch refuses by their value: `x.fill_(200)` in int8, `x // 0`. The host knows them: no launch is needed.
And matrices that a factorisation refuses when it is asked to check.

A number is a runtime input, so the signature, which is made once, cannot look at it.
"""

from __future__ import annotations

import functools
import math

import torch

from tpu_lab.backend import native
from tpu_lab.backend.meta import tensors_in

# Ops that convert a number to the dtype of their result, and where the number stands.
CONVERTED = {
    "fill_.Scalar": (1,), "fill.Scalar": (1,), "full.default": (1,), "full_like.default": (1,), "new_full.default": (2,),
    "scalar_tensor.default": (0,), "masked_fill.Scalar": (2,), "masked_fill_.Scalar": (2,), "index_fill.int_Scalar": (3,),
    "index_fill_.int_Scalar": (3,), "clamp.default": (1, 2), "clamp_.default": (1, 2), "constant_pad_nd.default": (2,),
    "threshold.default": (2,), "threshold_.default": (2,), "clamp_min.default": (1,), "clamp_min_.default": (1,),
    "clamp_max.default": (1,), "clamp_max_.default": (1,), "scatter.value": (3,), "scatter_.value": (3,),
}  # fmt: skip
DIVIDING = {
    "floor_divide.default", "floor_divide.Scalar", "floor_divide_.Tensor", "floor_divide_.Scalar", "remainder.Scalar",
    "remainder_.Scalar", "fmod.Scalar", "fmod_.Scalar", "div.Tensor_mode", "div.Scalar_mode", "div_.Tensor_mode",
}  # fmt: skip
SUBTRACTING = {"sub.Tensor", "sub.Scalar", "sub_.Tensor", "sub_.Scalar", "rsub.Tensor", "rsub.Scalar"}


def overflows(value, dtype: torch.dtype) -> bool:
    """Is the number outside of what the dtype can hold? The rule of c10::overflows: unsigned types take negative integers."""
    if type(value) not in (int, float, complex) or dtype is torch.bool:
        return False
    if type(value) is complex:
        parts = (value.real, value.imag)
        if dtype.is_complex:
            return any(overflows(part, dtype.to_real()) for part in parts)
        return bool(value.imag) or overflows(value.real, dtype)
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype.is_floating_point:
        return math.isfinite(value) and abs(value) > torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    low = -limits.max if limits.min == 0 and type(value) is int else limits.min
    return not low <= value <= limits.max


def _convert(args, kwargs, name: str) -> None:
    """RuntimeError in PyTorch's words if a number does not fit the dtype of the result."""
    given = kwargs.get("dtype") or (args[0].dtype if isinstance(args[0], torch.Tensor) else torch.get_default_dtype())
    for at in CONVERTED[name]:
        value = args[at] if at < len(args) else None
        dtype = torch.result_type(args[0], value) if name.startswith("clamp") and value is not None else given
        if overflows(value, dtype):
            torch.empty(1 if _lenient(name, args) else 2, dtype=dtype).fill_(value)


def _lenient(name: str, args) -> bool:
    """One element that is filled may become infinite; two may not."""
    if name.startswith(("fill", "full_like")):
        return args[0].numel() == 1
    return name == "scalar_tensor.default"


def _divide(args, kwargs) -> None:
    """RuntimeError in PyTorch's words if integers are divided by the number 0."""
    a, b = args[0], args[1] if len(args) > 1 else None
    rounds = kwargs.get("rounding_mode", "floor") is not None
    if type(b) in (int, bool) and b == 0 and rounds and a.numel() and not (a.is_floating_point() or a.is_complex()):
        raise RuntimeError("ZeroDivisionError")


def _subtract(args, kwargs) -> None:
    """RuntimeError in PyTorch's words if True or False is subtracted, or subtracted from."""
    if any(type(a) is bool for a in args[:2]):
        a, b = (torch.empty(0, dtype=v.dtype) if isinstance(v, torch.Tensor) else v for v in args[:2])
        a - b


def _probability(args, kwargs) -> None:
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    if not 0 <= p <= 1:
        torch.empty(0).bernoulli_(p)


def _checking(record, kernel):
    """A factorisation that is told `check_errors=True`: the host waits for its info and raises in LAPACK's words."""
    at = record.names["check_errors"]
    called = record.base.replace("linalg_", "linalg.").removeprefix("_")
    called = called if called in ("linalg.cholesky_ex", "linalg.inv_ex") else f"torch.{called}"

    @functools.wraps(kernel)
    def run(*args, **kwargs):
        out = kernel(*args, **kwargs)
        if kwargs.get("check_errors", at < len(args) and args[at]):
            torch._linalg_check_errors(out[-1], called, is_matrix=args[0].dim() == 2)
        return out

    return run


def refusing(record, kernel):
    """The kernel for an overload, behind a look at its number; as it is where no number can be wrong."""
    name = record.name.removeprefix("aten.")
    if "check_errors" in record.names:
        return _checking(record, kernel)
    if name in CONVERTED:
        look = functools.partial(_convert, name=name)
    elif name in DIVIDING:
        look = _divide
    elif name in SUBTRACTING:
        look = _subtract
    elif name in ("bernoulli_.float", "bernoulli.p"):
        look = _probability
    else:
        return kernel

    @functools.wraps(kernel)
    def run(*args, **kwargs):
        look(args, kwargs)
        return kernel(*args, **kwargs)

    return run


def within_int64(record, args, kwargs):
    """The arguments with integers from 2**63 up as PyTorch's C code takes them: two's complement among integers, else floats.

    Raises what the CPU raises where it refuses them.
    """
    wrong = native.error(record, args, kwargs)
    if wrong is not None:
        raise wrong
    dtypes = {t.dtype for t in tensors_in([*args, *kwargs.values()], [])} | {kwargs.get("dtype")} - {None}
    promote = record.lowering.promote if record.lowering is not None else None
    real = not dtypes or promote == "float" or any(d.is_floating_point or d.is_complex for d in dtypes)

    whole = [d for d in dtypes if d is not torch.bool]
    low, end = torch.iinfo(torch.int64).min, 1 << 63
    if whole and not real:
        limits = torch.iinfo(functools.reduce(torch.promote_types, whole))
        if limits.max < end:  # uint64 takes an int64's bits
            low, end = limits.min, limits.max + 1
    numbers = {a.name for a in record.schema.arguments if any(w in str(a.type) for w in ("Tensor", "Scalar", "number"))}

    def fit(name, value):
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return [fit(name, v) for v in value]
        if name not in numbers or type(value) is not int or low <= value < end:
            return value
        return float(value) if real else (value - low) % (end - low) + low

    return list(map(fit, record.names, args)), {name: fit(name, value) for name, value in kwargs.items()}
