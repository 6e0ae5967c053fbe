"""gather and scatter along one dimension, and writing a block into a copy (`slice_scatter` and its like)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_lab.backend.bounds import Bound
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.ops.index import reduced_into
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _place(shape, dim, index):
    """numpy's index of each element of `index` along `dim`: its own coordinates elsewhere."""
    return tuple(
        index.astype(jnp.int32) if a == dim else lax.broadcasted_iota(jnp.int32, index.shape, a)
        for a in range(len(shape))
    )


def _one_each(x, dim, index):
    """Does each line along `dim` get exactly one element? Then a comparison does it, which is faster than a scatter."""
    return index.shape[dim] == 1 and all(n == m for a, (n, m) in enumerate(zip(x.shape, index.shape)) if a != dim)


def _hit(x, dim, index):
    return lax.broadcasted_iota(jnp.int32, x.shape, dim) == index.astype(jnp.int32)


def _aligned(x, dim, index, src):
    """(x, dim, index, src) with at least one dimension each, src cut to the shape of index and cast to x's dtype."""
    x, index = jnp.atleast_1d(x), jnp.atleast_1d(index)
    src = jnp.asarray(src).astype(x.dtype)
    if src.size != 1 or src.ndim == x.ndim:
        src = jnp.atleast_1d(src)[tuple(slice(0, n) for n in index.shape)]
    return x, dim % x.ndim, index, jnp.broadcast_to(src, index.shape)


def _inside(x, dim, index, *_, **__):
    dim = dim % max(len(x.shape), 1)
    return [Bound(index, x.shape[dim] if x.shape else 1, dim=dim)]


@op(aten.gather, kind="movement", bounds=_inside)
def gather(x, dim, index, *, sparse_grad=False):
    if x.ndim == 0 or index.ndim == 0:
        return jnp.broadcast_to(x.reshape(-1)[index.reshape(-1).astype(jnp.int32)].reshape(index.shape), index.shape)
    dim = dim % x.ndim
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    lines = x[tuple(slice(None) if a == dim else slice(0, n) for a, n in enumerate(index.shape))]
    return jnp.take_along_axis(lines, index.astype(jnp.int32), dim)


@op(aten.scatter.src, aten.scatter.value, kind="movement", bounds=_inside)
def scatter(x, dim, index, src):
    shape = x.shape
    if index.size == 0:
        return x
    x, dim, index, src = _aligned(x, dim, index, src)
    if _one_each(x, dim, index):
        return jnp.where(_hit(x, dim, index), src, x).reshape(shape)
    return x.at[_place(x.shape, dim, index)].set(src).reshape(shape)


@op(aten.scatter_add, kind="movement", bounds=_inside)
def scatter_add(x, dim, index, src):
    shape = x.shape
    if index.size == 0:
        return x
    x, dim, index, src = _aligned(x, dim, index, src)
    if x.dtype == jnp.bool_:
        return x.at[_place(x.shape, dim, index)].max(src).reshape(shape)
    if _one_each(x, dim, index):
        return jnp.where(_hit(x, dim, index), x + src, x).reshape(shape)
    return x.at[_place(x.shape, dim, index)].add(src).reshape(shape)


@op(aten.scatter.reduce, aten.scatter.value_reduce, kind="movement", bounds=_inside)
def scatter_with(x, dim, index, src, *, reduce):
    return scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


@op(aten.scatter_reduce.two, kind="movement", bounds=_inside)
def scatter_reduce(x, dim, index, src, reduce, *, include_self=True):
    shape = x.shape
    if index.size == 0:
        return x
    x, dim, index, src = _aligned(wide(x), dim, index, src)
    return reduced_into(x, _place(x.shape, dim, index), src, reduce, include_self).reshape(shape)


# A block written into a copy


def _written(x, src, dim, start):
    """x with the contiguous block `src` written from `start` on along `dim`."""
    return lax.dynamic_update_slice_in_dim(x, src.astype(x.dtype), start, dim)


@op(aten.slice_scatter, kind="movement")
def slice_scatter(x, src, dim=0, start=None, end=None, step=1):
    dim = dim % x.ndim
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    src = jnp.broadcast_to(src, [len(range(first, last, step)) if a == dim else n for a, n in enumerate(x.shape)])
    if step == 1:
        return _written(x, src, dim, first) if src.size else x
    return x.at[(slice(None),) * dim + (slice(first, last, step),)].set(src.astype(x.dtype))


@op(aten.select_scatter, kind="movement")
def select_scatter(x, src, dim, index):
    dim = dim % x.ndim
    return _written(x, jnp.expand_dims(src, dim), dim, index % x.shape[dim])


def _diagonal(shape, offset, dim1, dim2):
    """numpy index of the diagonal of the last two axes, for an array whose dim1, dim2 were moved there."""
    length = max(0, min(shape[dim1] + min(offset, 0), shape[dim2] - max(offset, 0)))
    steps = np.arange(length)
    return (..., steps - min(offset, 0), steps + max(offset, 0))


@op(aten.diagonal_scatter, kind="movement")
def diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    moved = moved.at[_diagonal(x.shape, offset, dim1, dim2)].set(src.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@op(aten.diagonal_backward, kind="movement")
def diagonal_backward(grad, input_sizes, offset, dim1, dim2):
    return diagonal_scatter(jnp.zeros(input_sizes, grad.dtype), grad, offset, dim1, dim2)


@op(aten.diag_embed, kind="movement")
def diag_embed(x, offset=0, dim1=-2, dim2=-1):
    n, ndim = x.shape[-1] + abs(offset), x.ndim + 1
    square = jnp.zeros((*x.shape[:-1], n, n), x.dtype).at[_diagonal((n, n), offset, 0, 1)].set(x)
    return jnp.moveaxis(square, (-2, -1), (dim1 % ndim, dim2 % ndim))


def strided_places(size, stride, offset):
    """Static flat positions of a strided window."""
    place = np.full((), offset, np.int32)
    for n, s in zip(size, stride):
        place = place[..., None] + np.arange(n, dtype=np.int32) * np.int32(s)
    return place


@op(aten.as_strided_scatter, kind="movement")
def as_strided_scatter(x, src, size, stride, storage_offset=None):
    place = strided_places(size, stride, storage_offset or 0)
    return x.reshape(-1).at[place].set(src.astype(x.dtype)).reshape(x.shape)


@op(aten.select_backward, kind="movement")
def select_backward(grad, input_sizes, dim, index):
    dim = dim % len(input_sizes)
    index = index % input_sizes[dim]
    return slice_backward(jnp.expand_dims(grad, dim), input_sizes, dim, index, index + 1, 1)


@op(aten.slice_backward, kind="movement")
def slice_backward(grad, input_sizes, dim, start, end, step):
    dim, pads = dim % len(input_sizes), [(0, 0, 0)] * len(input_sizes)
    first, last, _ = slice(start, end, step).indices(input_sizes[dim])
    count = len(range(first, last, step))
    if not count:
        return jnp.zeros(input_sizes, grad.dtype)
    pads[dim] = (first, input_sizes[dim] - first - (count - 1) * step - 1, step - 1)
    return lax.pad(grad, jnp.zeros((), grad.dtype), pads)
