"""Reductions: sums, extrema, moments, norms. Half types add up in float32, integers in int64, as in PyTorch."""

import math

import jax.numpy as jnp
import torch
from jax.scipy import special

from tpu_lab.backend import dtypes
from tpu_lab.backend.ops.unary import convert, is_complex
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def axes(dim):
    """jax's axis argument for PyTorch's `dim`: None and [] mean all."""
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


def at_least_1d(x):
    """x, with a dimension to reduce over if it has none (`dim=0` is allowed for a 0-dim tensor)."""
    return x if x.ndim else x.reshape(1)


def reduced(fn, x, dim, keepdim):
    """fn over `dim`, where a 0-dim x counts as one element and stays 0-dim."""
    if x.ndim == 0:
        return fn(x.reshape(1), axis=None, keepdims=False)
    return fn(x, axis=axes(dim), keepdims=keepdim)


def accumulated(x, out, i=0):
    """x in the dtype in which PyTorch adds up for output i."""
    return convert(x, dtypes.opmath(out[i][1]))


@op(aten.sum.default, aten.sum.dim_IntList, kind="reduce", out=True)
def sum_(x, dim=None, keepdim=False, dtype=None, out=None):
    return reduced(jnp.sum, accumulated(x, out), dim, keepdim)


@op(aten.nansum, kind="reduce", out=True)
def nansum(x, dim=None, keepdim=False, dtype=None, out=None):
    return reduced(jnp.sum, jnp.where(jnp.isnan(x), 0, accumulated(x, out)), dim, keepdim)


@op(aten.mean.default, aten.mean.dim, kind="reduce", out=True)
def mean(x, dim=None, keepdim=False, dtype=None, out=None):
    return reduced(jnp.mean, accumulated(x, out), dim, keepdim)


@op(aten.prod.default, aten.prod.dim_int, kind="reduce", out=True)
def prod(x, dim=None, keepdim=False, dtype=None, out=None):
    return reduced(jnp.prod, accumulated(x, out), dim, keepdim)


@op(aten.amax, kind="reduce")
def amax(x, dim=(), keepdim=False):
    return reduced(jnp.max, x, dim, keepdim)


@op(aten.amin, kind="reduce")
def amin(x, dim=(), keepdim=False):
    return reduced(jnp.min, x, dim, keepdim)


op(aten.max.default, kind="reduce")(amax)
op(aten.min.default, kind="reduce")(amin)


@op(aten.aminmax, kind="reduce")
def aminmax(x, dim=None, keepdim=False):
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


def _with_index(arg):
    """(values, indices) along dim: the first among equals, and the first NaN before all."""

    def extremum(x, dim, keepdim=False):
        shape, x = x.shape, at_least_1d(x)
        index = arg(x, axis=dim, keepdims=True)
        values = jnp.take_along_axis(x, index, axis=dim)
        if keepdim and shape:
            return values, index
        return jnp.squeeze(values, dim), jnp.squeeze(index, dim)

    return extremum


op(aten.max.dim, kind="reduce")(_with_index(jnp.argmax))
op(aten.min.dim, kind="reduce")(_with_index(jnp.argmin))


@op(aten.argmax, kind="reduce")
def argmax(x, dim=None, keepdim=False):
    return reduced(jnp.argmax, x, dim, keepdim)


@op(aten.argmin, kind="reduce")
def argmin(x, dim=None, keepdim=False):
    return reduced(jnp.argmin, x, dim, keepdim)


def _truth(fn):
    """all and any; an empty list of dims reduces nothing."""

    def truth(x, dim=None, keepdim=False):
        x = x != 0
        return x if isinstance(dim, (list, tuple)) and not dim else reduced(fn, x, dim, keepdim)

    return truth


op(aten.all, kind="reduce")(_truth(jnp.all))
op(aten.any, kind="reduce")(_truth(jnp.any))


@op(aten._is_all_true, kind="reduce")
def is_all_true(x):
    return jnp.all(x)


@op(aten._is_any_true, kind="reduce")
def is_any_true(x):
    return jnp.any(x)


@op(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, kind="reduce")
def count_nonzero(x, dim=None):
    return reduced(jnp.sum, (x != 0).astype(jnp.int64), dim, False)


def moments(x, dim, correction, keepdim):
    """(variance, mean); the variance is NaN where nothing is left to divide by.

    A mean is right to its last digit, but numbers that lie close together differ by less than that: what is left of the
    mean after a first pass is taken off in a second one, as the CPU keeps digits by counting in float64.
    """
    x = at_least_1d(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    axis = axes(dim)
    mean = jnp.mean(x, axis=axis, keepdims=True)
    count = x.size if axis is None else math.prod(x.shape[a] for a in (axis if isinstance(axis, tuple) else (axis,)))
    rest = jnp.mean(x - mean, axis=axis, keepdims=True)
    distance = x - mean - rest
    square = jnp.real(distance * jnp.conj(distance)) if is_complex(x) else distance * distance
    left = max(0.0, count - (1 if correction is None else correction))
    variance = jnp.sum(square, axis=axis, keepdims=keepdim) / left
    mean = mean + rest
    return variance, mean if keepdim else jnp.squeeze(mean, axis)


def _moment(pick):
    def moment(x, dim=None, correction=None, keepdim=False):
        return pick(*moments(x, dim, correction, keepdim and x.ndim > 0))

    return moment


MOMENTS = {
    aten.var.correction: lambda variance, mean: variance,
    aten.std.correction: lambda variance, mean: jnp.sqrt(variance),
    aten.var_mean.correction: lambda variance, mean: (variance, mean),
    aten.std_mean.correction: lambda variance, mean: (jnp.sqrt(variance), mean),
}
for _target, _pick in MOMENTS.items():
    op(_target, kind="reduce", static=("correction",))(_moment(_pick))


@op(aten.linalg_vector_norm, kind="reduce", out=True, static=("ord",))
def vector_norm(x, ord=2, dim=None, keepdim=False, dtype=None, out=None):
    """(sum |x|^ord)^(1/ord), with its limits at 0 (how many are not zero), inf and -inf."""
    real = dtypes.to_jax(dtypes.opmath(out[0][1]))
    size = jnp.abs(x).astype(real)
    if ord == 2:  # squares need no root of a complex number first
        square = jnp.real(x * jnp.conj(x)).astype(real) if is_complex(x) else x.astype(real) ** 2
        return jnp.sqrt(reduced(jnp.sum, square, dim, keepdim))
    if ord in (math.inf, -math.inf):
        return reduced(jnp.max if ord > 0 else jnp.min, size, dim, keepdim)
    if ord == 0:
        return reduced(jnp.sum, (size != 0).astype(real), dim, keepdim)
    total = reduced(jnp.sum, size if ord == 1 else size**ord, dim, keepdim)
    return total if ord == 1 else total ** (1 / ord)


@op(aten.norm, aten.native_norm, kind="reduce", out=True, static=("p",))
def norm(x, p=2, dim=None, keepdim=False, dtype=None, out=None):
    return vector_norm(x, 2 if p is None else p, dim, keepdim, out=out)


@op(aten.logsumexp, kind="reduce", promote="float")
def logsumexp(x, dim, keepdim=False):
    return reduced(special.logsumexp, x, dim, keepdim)


@op(aten.trace, kind="reduce", out=True)
def trace(x, out=None):
    return jnp.trace(accumulated(x, out))


@op(aten._aminmax, kind="reduce")
def aminmax_along(x, dim=None, keepdim=False):
    return aminmax(x, dim, keepdim)
