"""Arithmetic of two and three tensors, with PyTorch's rules for integers, signs and zeros."""

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend import dtypes
from tpu_lab.backend.bounds import never
from tpu_lab.backend.lowering import cast
from tpu_lab.backend.opmath import rounded
from tpu_lab.backend.ops.unary import convert, is_float
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def is_one(x) -> bool:
    """True for a static 1: the usual `alpha`, which then costs nothing."""
    return isinstance(x, (int, float)) and x == 1


def scaled(x, alpha):
    """alpha * x, and x itself for the usual alpha."""
    return x if is_one(alpha) else jnp.asarray(alpha, x.dtype) * x


def number_rounded(x, dtype: torch.dtype):
    """A 0-dim x (a Python number, most of the time) `rounded`: sums and remainders do that on the CPU, products do not."""
    return rounded(x, dtype) if jnp.ndim(x) == 0 else x


@op(aten.add.Tensor, aten.add.Scalar, promote="result", runtime_ints=True, out=True)
def add(a, b, alpha=1, out=None):
    a, b, alpha = (number_rounded(v, out[0][1]) for v in (a, b, alpha))
    return jnp.add(a, scaled(jnp.asarray(b), alpha))


@op(aten.sub.Tensor, aten.sub.Scalar, promote="result", runtime_ints=True, out=True)
def sub(a, b, alpha=1, out=None):
    a, b, alpha = (number_rounded(v, out[0][1]) for v in (a, b, alpha))
    return jnp.subtract(a, scaled(jnp.asarray(b), alpha))


@op(aten.rsub, promote="result", runtime_ints=True, out=True)
def rsub(a, b, alpha=1, out=None):
    a, b, alpha = (number_rounded(v, out[0][1]) for v in (a, b, alpha))
    return jnp.subtract(b, scaled(a, alpha))


@op(aten.mul.Tensor, aten.mul.Scalar, promote="result", runtime_ints=True)
def mul(a, b):
    return jnp.multiply(a, b)


@op(aten._add_relu.Tensor, aten._add_relu.Scalar, promote="result", out=True)
def add_relu(a, b, alpha=1, out=None):
    return jnp.maximum(add(a, b, alpha, out), 0)


@op(aten.div.Tensor, aten.div.Scalar, promote="float", runtime_ints=True)
def div(a, b):
    return a / b


def _divisor(a, b, *_, **__):
    """An integer divided by a tensor of integers: no zeros, if there is anything to divide. (A number to divide by is
    looked at before: refusals.py.)"""
    whole = isinstance(b, jax.Array) and all(v is int or (v is not float and jnp.result_type(v).kind in "iub") for v in (a, b))
    return [never(b == 0, "ZeroDivisionError")] if whole and 0 not in jnp.broadcast_shapes(_shape(a), b.shape) else []


def _shape(v) -> tuple[int, ...]:
    return () if isinstance(v, type) else jnp.shape(v)


def _divisor_rounded(a, b, rounding_mode=None, **__):
    return _divisor(a, b) if rounding_mode is not None else []


@op(aten.div.Tensor_mode, aten.div.Scalar_mode, promote="result", runtime_ints=True, out=True, bounds=_divisor_rounded)
def div_mode(a, b, rounding_mode=None, out=None):
    if rounding_mode is None:
        return a / b
    if rounding_mode == "floor":
        return floor_divide(a, b)
    a, b = _same(a, b)
    return jnp.trunc(rounded(a / b, out[0][1])) if is_float(a) else lax.div(a, b)


@op(aten.floor_divide, promote="result", runtime_ints=True, bounds=_divisor)
def floor_divide(a, b):
    a, b = _same(a, b)
    if not is_float(a):
        return jnp.floor_divide(a, b)
    mod = lax.rem(a, b)
    quotient = (a - mod) / b
    quotient = jnp.where((mod != 0) & ((b < 0) != (mod < 0)), quotient - 1, quotient)
    floor = jnp.floor(quotient)
    floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
    return jnp.where(b == 0, a / b, jnp.where(quotient == 0, jnp.copysign(0, a / b), floor))


@op(aten.remainder, promote="result", out=True, bounds=_divisor)
def remainder(a, b, out=None):
    return jnp.remainder(*(number_rounded(v, out[0][1]) for v in _same(a, b, spread=False)))


@op(aten.fmod, promote="result", out=True, bounds=_divisor)
def fmod(a, b, out=None):
    return lax.rem(*jnp.broadcast_arrays(*(number_rounded(v, out[0][1]) for v in _same(a, b, spread=False))))


@op(aten.gcd, promote="result")
def gcd(a, b):
    return jnp.gcd(a, b)


@op(aten.lcm, promote="result")
def lcm(a, b):
    return jnp.lcm(a, b)


@op(aten.pow, promote="result", static=("exponent",))
def pow_(a, b):
    """Small whole powers multiply and powers of a half take roots, as in PyTorch; integers go through `int_power`."""
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        if b < 0 and type(b) is int and not _inexact(a):
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        if abs(b) <= 8 and b == int(b) and (b >= 0 or _inexact(a)) and a.dtype != bool:
            return lax.integer_pow(a, int(b))
        if b in (0.5, -0.5) and is_float(a):  # pow(-inf, 0.5) is inf, sqrt(-inf) is NaN: PyTorch, too, takes the root
            return jnp.sqrt(a) if b > 0 else 1 / jnp.sqrt(a)
    a, b = _same(a, b)
    return int_power(a, b) if not _inexact(a) else jnp.power(a, b)


def int_power(a, b):
    """a ** b in integers; with a negative b only 1 and -1 give something else than 0."""
    a, b = _same(a, b)
    if a.dtype == bool:
        return a | ~b
    if not jnp.issubdtype(b.dtype, jnp.signedinteger):
        return _squared(a, b)
    sign = jnp.where(b % 2 == 0, 1, -1).astype(a.dtype)
    negative = jnp.where(a == 1, 1, jnp.where(a == -1, sign, 0))
    return jnp.where(b < 0, negative, _squared(a, jnp.maximum(b, 0)))


def _squared(a, b):
    """a ** b for b >= 0 by squaring: jax looks at six bits of b, and odd numbers have powers that wrap beyond the 63rd."""

    def higher(state):
        b, base, found = state
        return b >> 1, base * base, jnp.where(b & 1 == 1, found * base, found)

    base = a
    for _ in range(6):
        base = base * base
    return lax.while_loop(lambda state: (state[0] != 0).any(), higher, (b >> 6, base, jnp.power(a, b & 63)))[2]


def _inexact(x) -> bool:
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)


def _same(a, b, spread=True):
    """Both as arrays of one dtype (a Python number takes the other's) and, with `spread`, of one shape."""
    dtype = jnp.result_type(a, b)
    a, b = (jnp.asarray(v, jnp.int64 if type(v) is int else None).astype(dtype) for v in (a, b))  # -3 is 253 as uint8
    return jnp.broadcast_arrays(a, b) if spread else (a, b)


@op(aten.atan2, promote="float")
def atan2(a, b):
    return jnp.arctan2(a, b)


@op(aten.hypot, promote="result")
def hypot(a, b):
    return jnp.hypot(a, b)


@op(aten.copysign, promote="float")
def copysign(a, b):
    return jnp.copysign(a, b)


@op(aten.nextafter, out=True)
def nextafter(a, b, out=None):
    """In the dtype of the result itself: the next float32 is none that a half could hold."""
    return lax.nextafter(*jnp.broadcast_arrays(*(cast(v, dtypes.to_jax(out[0][1])) for v in (a, b))))


@op(aten.heaviside, promote="result")
def heaviside(a, values):
    return jnp.where(a == 0, values, (a > 0).astype(a.dtype))


@op(aten.logaddexp, promote="float")
def logaddexp(a, b):
    return jnp.logaddexp(a, b)


@op(aten.logaddexp2, promote="float")
def logaddexp2(a, b):
    return jnp.logaddexp2(a, b)


@op(aten.ldexp.Tensor, promote="float")
def ldexp(a, b):
    return a * jnp.exp2(b)


@op(aten.xlogy, promote="float")
def xlogy(a, b):
    return jnp.where(jnp.isnan(b), jnp.nan, jnp.where(a == 0, 0, a * jnp.log(b)))


@op(aten.special_xlog1py, promote="float")
def xlog1py(a, b):
    return jnp.where(jnp.isnan(b), jnp.nan, jnp.where(a == 0, 0, a * jnp.log1p(b)))


@op(aten.lerp, promote="result")
def lerp(a, end, weight):
    """Counted from the nearer end, so that weight 1 gives `end` exactly."""
    return jnp.where(jnp.abs(weight) < 0.5, a + weight * (end - a), end - (end - a) * (1 - weight))


@op(aten.addcmul, promote="result")
def addcmul(a, x, y, value=1):
    return a + scaled(x, value) * y


@op(aten.addcdiv, promote="result")
def addcdiv(a, x, y, value=1):
    return a + scaled(x, value) / y


@op(aten.where.self, out=True)
def where(condition, a, b, out=None):
    dtype = dtypes.to_jax(out[0][1])
    return jnp.where(condition != 0, jnp.asarray(a).astype(dtype), jnp.asarray(b).astype(dtype))


@op(aten.fill, out=True)
def fill(x, value, out=None):
    return jnp.full(x.shape, convert(jnp.asarray(value), out[0][1]))


@op(aten.zero)
def zero(x):
    return jnp.zeros_like(x)
