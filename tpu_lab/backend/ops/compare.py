"""Comparisons, minima and maxima, logic and bits."""

import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend import dtypes
from tpu_lab.backend.ops.unary import is_complex, is_float
from tpu_lab.backend.registry import op

aten = torch.ops.aten
COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}


def _rank(dtype) -> int:
    return (
        3 if jnp.issubdtype(dtype, jnp.complexfloating) else 2 if jnp.issubdtype(dtype, jnp.floating) else int(dtype != jnp.bool_)
    )


def _with_number(fn):
    """Tensor against number: the number is rounded to the tensor's dtype first, so 0.1 equals bfloat16's 0.1."""

    def compare(a, number):
        number = jnp.asarray(number)
        if _rank(number.dtype) <= _rank(a.dtype):
            return fn(a, number.astype(a.dtype))
        dtype = jnp.promote_types(a.dtype, number.dtype)
        if _rank(dtype) == 2:
            dtype = dtypes.to_jax(torch.get_default_dtype())
        return fn(a.astype(dtype), number.astype(dtype))

    return compare


def _with_tensor(fn):
    """Tensor against tensor: a 0-dim one counts only if it is of a higher category."""

    def compare(a, b):
        a, b = jnp.asarray(a), jnp.asarray(b)
        if a.ndim and not b.ndim and _rank(b.dtype) <= _rank(a.dtype):
            dtype = a.dtype
        elif b.ndim and not a.ndim and _rank(a.dtype) <= _rank(b.dtype):
            dtype = b.dtype
        else:
            dtype = dtypes.to_jax(torch.promote_types(dtypes.to_torch(a.dtype), dtypes.to_torch(b.dtype)))
        return fn(a.astype(dtype), b.astype(dtype))

    return compare


for _name, _fn in COMPARISONS.items():
    op(getattr(aten, _name).Scalar)(_with_number(_fn))
    op(getattr(aten, _name).Tensor)(_with_tensor(_fn))

BINARY = {  # NaN wins in minimum and maximum, loses in fmin and fmax
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
}
for _name, _fn in BINARY.items():
    op(getattr(aten, _name), promote="result")(_fn)


def _shift(fn):
    """Shifts of integers; a count below 0 or beyond the width shifts everything out, which is what XLA defines."""

    def shift(a, b):
        dtype = jnp.result_type(a, b)
        a, b = jnp.broadcast_arrays(jnp.asarray(a, dtype), jnp.asarray(b, dtype))
        if is_float(a):  # `__lshift__` of floats multiplies by a power of two
            return a * jnp.exp2(b if fn is lax.shift_left else -b)
        return fn(a, b)

    return shift


def _right(a, b):
    signed = jnp.issubdtype(a.dtype, jnp.signedinteger)
    return lax.shift_right_arithmetic(a, b) if signed else lax.shift_right_logical(a, b)


op(aten.bitwise_left_shift, aten.__lshift__, promote="result")(_shift(lax.shift_left))
op(aten.bitwise_right_shift, aten.__rshift__, promote="result")(_shift(_right))
for _name, _fn in (("__ilshift__", lax.shift_left), ("__irshift__", _right)):  # their twins have another name
    op(getattr(aten, _name), promote="result")(_shift(_fn))


@op(aten.clamp, promote="result")
def clamp(x, min=None, max=None):
    """min(max(x, min), max): a NaN in any of the three wins, and `max` wins over a `min` above it."""
    x = x if min is None else jnp.maximum(x, min)
    return x if max is None else jnp.minimum(x, max)


@op(aten.clamp_min, promote="result")
def clamp_min(x, min):
    return jnp.maximum(x, min)


@op(aten.clamp_max, promote="result")
def clamp_max(x, max):
    return jnp.minimum(x, max)


@op(aten.logical_and)
def logical_and(a, b):
    return (a != 0) & (b != 0)


@op(aten.logical_or)
def logical_or(a, b):
    return (a != 0) | (b != 0)


@op(aten.logical_xor)
def logical_xor(a, b):
    return (a != 0) ^ (b != 0)


@op(aten.logical_not)
def logical_not(x):
    return x == 0


@op(aten.isnan)
def isnan(x):
    return jnp.isnan(x)


@op(aten.isinf)
def isinf(x):
    return jnp.isinf(x)


@op(aten.isposinf)
def isposinf(x):
    return x == jnp.inf if is_float(x) else jnp.zeros(x.shape, bool)


@op(aten.isneginf)
def isneginf(x):
    return x == -jnp.inf if is_float(x) else jnp.zeros(x.shape, bool)


@op(aten.signbit)
def signbit(x):
    if is_float(x):
        return jnp.signbit(x)
    return x < 0 if not is_complex(x) and x.dtype != bool else jnp.zeros(x.shape, bool)
