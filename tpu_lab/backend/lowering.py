"""Call one lowering on arrays: promotion before, PyTorch's output dtype after. Used by every mode and by the tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from tpu_lab.backend import dtypes
from tpu_lab.backend.opmath import rounded
from tpu_lab.backend.registry import Lowering


def call(lowering: Lowering, args, kwargs, outputs, compute: torch.dtype | None = None, key=None):
    """Run `lowering.fn` on jax arrays.

    args, kwargs: as the schema has them; arrays for tensors, Python values or 0-d arrays for numbers.
    outputs: ((shape, torch dtype), ...) by PyTorch's meta kernel, or None when it has none.
    compute: the promoted dtype when `lowering.promote` is set.
    Returns a list of arrays, each cast to its output dtype.
    """
    if lowering.promote and compute is not None:
        args = [_promoted(a, compute) for a in args]
        kwargs = {k: _promoted(v, compute) for k, v in kwargs.items()}
    if lowering.rng:
        kwargs = {**kwargs, "key": key}
    if lowering.out:
        kwargs = {**kwargs, "out": outputs}
    results = flat(lowering.fn(*args, **kwargs), [])
    if outputs is not None:
        results = [
            cast(r, dtypes.to_jax(outputs[i][1])) if i < len(outputs) else jnp.asarray(r) for i, r in enumerate(results)
        ]
    return results


def flat(value, found: list) -> list:
    """The arrays of a nested tuple or list in order; None (an output nobody asked for) is left out."""
    if isinstance(value, (tuple, list)):
        for v in value:
            flat(v, found)
    elif value is not None:
        found.append(value)
    return found


def promoted(lowering: Lowering, args, kwargs) -> torch.dtype | None:
    """The common dtype of the operands by PyTorch's rules.

    args, kwargs hold meta tensors (or any torch tensors) and Python numbers. Numbers in kwargs (`alpha`) take no part.
    """
    if not lowering.promote:
        return None
    operands = [a for a in args if isinstance(a, torch.Tensor) or type(a) in (int, float, bool, complex)]
    if not operands:
        return None
    dtype = _result_type(operands)
    if lowering.promote == "float" and not (dtype.is_floating_point or dtype.is_complex):
        return torch.get_default_dtype()
    return dtype


def _result_type(operands) -> torch.dtype:
    """torch.result_type over any number of operands: dimensioned tensors, then 0-dim tensors, then Python numbers."""
    state = None
    for group in (
        [o for o in operands if isinstance(o, torch.Tensor) and o.dim()],
        [o for o in operands if isinstance(o, torch.Tensor) and not o.dim()],
    ):
        found = None
        for o in group:
            found = o.dtype if found is None else torch.promote_types(found, o.dtype)
        if found is not None:
            state = found if state is None else _lower_priority(state, found)
    for number in (o for o in operands if not isinstance(o, torch.Tensor)):
        default = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}.get(type(number))
        if default is None:  # complex
            default = torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
        state = default if state is None else _lower_priority(state, default)
    return state


def _category(dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def _lower_priority(state, other):
    """`other` counts only if it is of a higher category (bool < int < float < complex)."""
    if _category(other) <= _category(state):
        return state
    if _category(other) == 3 and _category(state) == 2:  # float tensor with a complex number keeps its width
        return torch.complex128 if state == torch.float64 else torch.complex64
    return other


def _promoted(value, compute: torch.dtype):
    """Arrays in the dtype that the op computes in; Python numbers as they are.

    A tensor of integers that meets a half type is rounded to it first: 2049 is 2048 in float16.
    """
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, jax.Array) for v in value):
        return [_promoted(v, compute) for v in value]
    target = dtypes.to_jax(dtypes.opmath(compute))
    if not isinstance(value, (jax.Array, jnp.ndarray)) or value.dtype == target:
        return value
    found = cast(value, target)
    return rounded(found, compute) if value.ndim and value.dtype.kind in "iu" else found


def cast(value, dtype):
    """Cast as C does: complex to real drops the imaginary part without jax's warning.

    A bool becomes a float through int8: XLA turns float(mask) * x into where(mask, x, 0), and 0 * inf would not be NaN.
    """
    value = jnp.asarray(value)
    if value.dtype == jnp.bool_ and jnp.issubdtype(dtype, jnp.inexact):
        value = value.astype(jnp.int8)
    if jnp.iscomplexobj(value) and not jnp.issubdtype(dtype, jnp.complexfloating):
        value = value.real if dtype != jnp.bool_ else (value != 0)
    return value.astype(dtype)
