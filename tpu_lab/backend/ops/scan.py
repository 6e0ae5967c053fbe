"""Running sums, products and extrema along one dimension."""

import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.ops.reduce import accumulated
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _running(fn):
    def scan(x, dim, dtype=None, out=None):
        x = accumulated(x, out)
        return fn(x, axis=dim) if x.ndim else x

    return scan


op(aten.cumsum.default, kind="reduce", out=True)(_running(jnp.cumsum))
op(aten.cumprod.default, kind="reduce", out=True)(_running(jnp.cumprod))


@op(aten.logcumsumexp.default, aten._logcumsumexp, kind="reduce", promote="result")
def logcumsumexp(x, dim):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise NotImplementedError(f"logcumsumexp of {x.dtype}: convert it to a floating dtype first")
    return lax.cumlogsumexp(x, axis=dim % x.ndim) if x.ndim else x


def _running_extremum(better):
    """(values, indices): the last among equals, and from the first NaN on the last NaN."""

    def later(a, b):
        take = jnp.isnan(b[0]) | (~jnp.isnan(a[0]) & better(b[0], a[0]))
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    def scan(x, dim):
        if x.ndim == 0:
            return x, jnp.zeros((), jnp.int64)
        index = lax.broadcasted_iota(jnp.int64, x.shape, dim % x.ndim)
        return lax.associative_scan(later, (x, index), axis=dim % x.ndim)

    return scan


op(aten.cummax.default, kind="reduce")(_running_extremum(jnp.greater_equal))
op(aten.cummin.default, kind="reduce")(_running_extremum(jnp.less_equal))


@op(aten._cummax_helper, kind="reduce")
def cummax_helper(x, values, indices, dim):
    return _running_extremum(jnp.greater_equal)(x, dim)


@op(aten._cummin_helper, kind="reduce")
def cummin_helper(x, values, indices, dim):
    return _running_extremum(jnp.less_equal)(x, dim)
