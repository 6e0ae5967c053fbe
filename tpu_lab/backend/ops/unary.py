"""Elementwise functions of one tensor: a table, one line an op, then those that need more than a name."""

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import special

from tpu_lab.backend import dtypes
from tpu_lab.backend.lowering import cast
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.ops.gamma import zeta
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def is_float(x) -> bool:
    """True for real floating arrays, half types included."""
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)


def is_complex(x) -> bool:
    """True for complex arrays."""
    return jnp.iscomplexobj(x)


def _digamma(x):  # at the pole 0 PyTorch gives an infinity with the sign of zero turned over, XLA a NaN
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


def _reciprocal(x):
    return 1 / x


def _rsqrt(x):
    return 1 / jnp.sqrt(x) if is_complex(x) else lax.rsqrt(x)


FLOAT = {  # of a float or complex number; integers are taken to the default dtype first
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": _rsqrt,
    "reciprocal": _reciprocal,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "tanh": jnp.tanh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "lgamma": lax.lgamma,
    "digamma": _digamma,
    "sigmoid": jax.nn.sigmoid,
    "sinc": jnp.sinc,
    "i0": special.i0,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_ndtri": special.ndtri,
    "special_log_ndtr": special.log_ndtr,
    "special_entr": special.entr,
    "rad2deg": jnp.rad2deg,
    "deg2rad": jnp.deg2rad,
}
for _name, _fn in FLOAT.items():
    op(getattr(aten, _name), promote="float")(_fn)


def _rounding(fn):
    """floor and its kind: integers stay as they are."""
    return lambda x: fn(x) if is_float(x) else x


def _sign(x):  # PyTorch's sign of NaN is 0
    return x if x.dtype == bool else (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _sgn(x):
    if not is_complex(x):
        return _sign(x)
    size = jnp.abs(x)
    return jnp.where(size == 0, 0, x / jnp.where(size == 0, 1, size))


SAME = {  # the dtype stays (a complex `abs` is real)
    "abs": lambda x: x if x.dtype == bool else jnp.abs(x),
    "neg": jnp.negative,
    "sign": _sign,
    "sgn": _sgn,
    "floor": _rounding(jnp.floor),
    "ceil": _rounding(jnp.ceil),
    "trunc": _rounding(jnp.trunc),
    "round": _rounding(jnp.round),
    "frac": lambda x: x - jnp.trunc(x),
    "conj_physical": jnp.conj,
    "bitwise_not": jnp.invert,
}
for _name, _fn in SAME.items():
    if _name != "round":
        op(getattr(aten, _name), promote="result")(_fn)
op(aten.round.default, promote="result")(SAME["round"])


@op(aten.round.decimals, promote="result")
def round_decimals(x, decimals):
    ten = 10.0 ** abs(decimals)
    return jnp.round(x / ten) * ten if decimals < 0 else jnp.round(x * ten) / ten


@op(aten.polygamma)
def polygamma(n, x):
    """n-th derivative of digamma. jax's series holds only to the right: n = 1 by reflection left of 1/2."""
    x = x if is_float(x) else x.astype(jnp.float32)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if n == 0:
        return _digamma(x)
    if n > 1:
        return jnp.where(x == jnp.inf, 0, (-1) ** (n + 1) * math.factorial(n) * zeta(n + 1.0, x))
    reflect = x < 0.5
    right = special.polygamma(1, jnp.where(reflect, 1 - x, x))
    right = jnp.where(x == jnp.inf, 0, right)
    return jnp.where(reflect, jnp.pi**2 / jnp.sin(jnp.pi * x) ** 2 - right, right)


@op(aten.mvlgamma, promote="float")
def mvlgamma(x, p):
    return special.multigammaln(x, p)


@op(aten.frexp.Tensor)
def frexp(x):
    """(mantissa in [0.5, 1), exponent) from the bits: XLA may take the smallest numbers for zeros."""
    x = wide(x)
    kind, digits = (jnp.int64, 52) if x.dtype == jnp.float64 else (jnp.int32, 23)
    bits = lax.bitcast_convert_type(x, kind)
    width, one = 8 * x.dtype.itemsize, kind(1)
    top = (one << (width - 1 - digits)) - 1  # the exponent of inf and NaN
    exponent, fraction = (bits >> digits) & top, bits & ((one << digits) - 1)
    plain = (exponent == top) | ((exponent == 0) & (fraction == 0))
    tiny = (exponent == 0) & ~plain
    shift = jnp.where(tiny, lax.clz(fraction) - (width - 1 - digits), 0)
    fraction = (fraction << shift) & ((one << digits) - 1)
    exponent = jnp.where(tiny, 1 - shift, exponent) - (top // 2 - 1)
    half = (bits & (one << (width - 1))) | ((top // 2 - 1) << digits) | fraction
    return jnp.where(plain, x, lax.bitcast_convert_type(half, x.dtype)), jnp.where(plain, 0, exponent)


@op(aten.angle, promote="float")
def angle(x):
    if is_complex(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.asarray(jnp.pi, x.dtype), 0))


@op(aten.complex)
def complex_(real, imag):
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@op(aten.polar)
def polar(size, angle):
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


def convert(x, dtype: torch.dtype):
    """x as a torch dtype with C's rules: complex drops the imaginary part, float truncates toward zero.

    Narrow integers go through a wider one, since XLA saturates where PyTorch's CPU kernels wrap (-1.0 is 255 as uint8).
    """
    target = dtypes.to_jax(dtype)
    if target == jnp.bool_:
        return x != 0
    if is_complex(x) and not jnp.issubdtype(target, jnp.complexfloating):
        x = x.real
    if is_float(x) and jnp.issubdtype(target, jnp.integer) and target.itemsize < 8:
        x = x.astype(jnp.int32 if target.itemsize < 4 else jnp.int64)
    return cast(x, target)


@op(aten._to_copy, kind="movement", out=True)
def to_copy(x, dtype=None, out=None):
    return convert(x, dtype or out[0][1])


@op(aten.copy, kind="movement", out=True)
def copy(x, src, out=None):
    return jnp.broadcast_to(convert(src, out[0][1]), x.shape)


@op(aten.clone, aten.alias_copy, aten.lift, aten.lift_fresh, aten.lift_fresh_copy, kind="movement")
def clone(x):
    return x


@op(aten._unsafe_view, kind="movement", out=True)
def unsafe_view(x, size, out=None):
    return x.reshape(out[0][0])


@op(aten.nan_to_num)
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    if not (is_float(x) or is_complex(x)):
        return x
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)
