"""Indexing with integer tensors: index, index_put, and the index_*, take and masked_* families.

Boolean masks never arrive: their sizes depend on the data, so the dispatcher turns them into integers before.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch

from tpu_lab.backend.bounds import Bound, never
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _place(indices):
    """PyTorch's list of indices (None for a whole dimension) as numpy's; int32 addresses any dimension here."""
    return tuple(slice(None) if i is None else _short(i) for i in indices)


def _short(index):
    return index if index.dtype == jnp.bool_ else index.astype(jnp.int32)


def _each(x, indices, *_, **__):
    whole = [n for d, n in enumerate(x.shape) if d >= len(indices) or indices[d] is None]
    if 0 in whole or any(i is not None and i.size == 0 for i in indices):
        return []  # no element: PyTorch does not look
    return [Bound(i, n, dim=d, negative=True) for d, (i, n) in enumerate(zip(indices, x.shape)) if i is not None]


@op(aten.index.Tensor, aten._unsafe_index.Tensor, kind="movement", bounds=_each)
def index(x, indices):
    return x[_place(indices)]


@op(aten.index_put, aten._index_put_impl, aten._unsafe_index_put, kind="movement", bounds=_each)
def index_put(x, indices, values, accumulate=False, unsafe=False):
    place, values = x.at[_place(indices)], values.astype(x.dtype)
    if accumulate and x.dtype == jnp.bool_:
        return place.max(values)
    return place.add(values) if accumulate else place.set(values)


def _each_unmasked(x, mask, indices, *_, **__):
    """Of a masked index counts what the mask lets through: it lies over the result, whose dimensions the indices make."""
    used = [d for d, i in enumerate(indices) if i is not None]
    made = np.broadcast_shapes(*[indices[d].shape for d in used])
    start = used[0] if used and used[-1] - used[0] < len(used) else 0  # PyTorch's rule: apart, they come first
    rest = [n for d, n in enumerate(x.shape) if d not in used]
    shape = (*rest[:start], *made, *rest[start:])
    over = np.broadcast_shapes(mask.shape, shape)
    if over[len(over) - len(shape) :] != shape:
        return _each(x, indices)
    first = len(over) - len(shape) + start
    others = [d for d in range(len(over)) if not first <= d < first + len(made)]
    real = jnp.broadcast_to(mask, over).any(axis=tuple(others))
    return _each(x, [None if i is None else jnp.where(real, i, 0) for i in indices])


def _inside(x, indices):
    return _place([i if i is None else jnp.clip(i, -n, n - 1) for i, n in zip(indices, x.shape)])


@op(aten._unsafe_masked_index, kind="movement", out=True, bounds=_each_unmasked)
def masked_index(x, mask, indices, fill, out):
    """x[indices] where the mask is true, elsewhere `fill`: there an index may be anything."""
    fill = jnp.asarray(fill).astype(x.dtype)
    return jnp.where(mask, x[_inside(x, indices)], fill) if x.size else jnp.full(out[0][0], fill)


@op(aten._unsafe_masked_index_put_accumulate, kind="movement", bounds=_each_unmasked)
def masked_index_put(x, mask, indices, values):
    place, values = x.at[_inside(x, indices)], jnp.where(mask, values, 0).astype(x.dtype)
    return x if not x.size else place.max(values) if x.dtype == jnp.bool_ else place.add(values)


def _along(x, dim, index):
    """The place of `index` along `dim`; 0-dim tensors count as one element."""
    x, index = jnp.atleast_1d(x), jnp.atleast_1d(_short(index))
    return x, (slice(None),) * (dim % x.ndim) + (index,)


def _rows(x, dim, index, *_, **__):
    dim = dim % max(len(x.shape), 1)
    return [Bound(index, x.shape[dim] if x.shape else 1, "index out of range in self: {} for dimension {dim} with size {size}", dim)]


def _rows_of_any(x, dim, index, *_, **__):
    return _rows(x, dim, index) if x.size else []  # no element: PyTorch does not look


def _rows_from_the_end(x, dim, index, *_, **__):
    return [b._replace(negative=True) for b in _rows_of_any(x, dim, index)]


@op(aten.index_select, kind="movement", bounds=_rows)
def index_select(x, dim, index):
    rows, place = _along(x, dim, index)
    return rows[place].reshape(() if x.ndim == 0 else rows[place].shape)


@op(aten.index_add, kind="movement", bounds=_rows_of_any)
def index_add(x, dim, index, source, *, alpha=1):
    rows, place = _along(x, dim, index)
    source = (jnp.asarray(source).astype(x.dtype) * jnp.asarray(alpha).astype(x.dtype)).reshape(rows[place].shape)
    add = rows.at[place].max if x.dtype == bool else rows.at[place].add  # True + True is True
    return add(source).reshape(x.shape)


@op(aten.index_copy, kind="movement", bounds=_rows_of_any)
def index_copy(x, dim, index, source):
    rows, place = _along(x, dim, index)
    return rows.at[place].set(source.astype(x.dtype).reshape(rows[place].shape)).reshape(x.shape)


@op(aten.index_fill, kind="movement", bounds=_rows_from_the_end)
def index_fill(x, dim, index, value):
    rows, place = _along(x, dim, index)
    return rows.at[place].set(jnp.asarray(value).astype(x.dtype)).reshape(x.shape)


@op(aten.index_reduce, kind="movement", bounds=_rows)
def index_reduce(x, dim, index, source, reduce, *, include_self=True):
    rows, place = _along(wide(x), dim, index)
    return reduced_into(rows, place, wide(source).astype(rows.dtype), reduce, include_self).reshape(x.shape)


def reduced_into(x, place, source, reduce, include_self):
    """x with `source` reduced into `place`; without `include_self` the old values there count for nothing."""
    if x.dtype == jnp.bool_:  # a sum of truths is "or", a product "and"
        reduce = {"sum": "amax", "prod": "amin"}.get(reduce, reduce)
    identity = {"sum": 0, "mean": 0, "prod": 1, "amax": _limit(x.dtype, False), "amin": _limit(x.dtype, True)}[reduce]
    start = x if include_self else x.at[place].set(jnp.asarray(identity, x.dtype))
    if reduce in ("sum", "mean"):
        total = start.at[place].add(source)
        if reduce == "sum":
            return total
        count = jnp.full(x.shape, int(include_self), jnp.int32).at[place].add(1)
        count = jnp.maximum(count, 1).astype(x.dtype)
        return total / count if jnp.issubdtype(x.dtype, jnp.inexact) else total // count
    method = {"prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    return getattr(start.at[place], method)(source)


def _limit(dtype, upper):
    if dtype == jnp.bool_:
        return upper
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.inf if upper else -jnp.inf
    return jnp.iinfo(dtype).max if upper else jnp.iinfo(dtype).min


def _elements(x, index, *_, **__):
    words = "out of range: tried to access index {} on a tensor of {size} elements"
    return [Bound(index, math.prod(x.shape), words, negative=True)]


@op(aten.take, kind="movement", bounds=_elements)
def take(x, index):
    return x.reshape(-1)[_short(index)]


@op(aten.put, kind="movement", bounds=_elements)
def put(x, index, source, accumulate=False):
    place = x.reshape(-1).at[_short(index).reshape(-1)]
    source = source.reshape(-1)
    if not accumulate:
        return place.set(source).reshape(x.shape)
    return (place.max(source) if x.dtype == jnp.bool_ else place.add(source)).reshape(x.shape)


def _fits(x, mask, value):
    """A 0-dim tensor is converted like a number: not if its dtype is another and it does not fit (a number: refusals.py)."""
    if value is None or not hasattr(value, "dtype") or x.dtype == value.dtype or x.dtype == jnp.bool_:
        return []
    words = "value cannot be converted to the dtype of the tensor without overflow"
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.issubdtype(value.dtype, jnp.integer):
        limits = jnp.iinfo(x.dtype)
        low = limits.min or -limits.max  # unsigned types take negative numbers
        return [never(jnp.asarray((value < low) | (value > limits.max)), words)]
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(value.dtype, jnp.floating):
        wide = jnp.promote_types(x.dtype, value.dtype)
        return [never(jnp.isfinite(value) & (jnp.abs(value).astype(wide) > jnp.finfo(x.dtype).max.astype(wide)), words)]
    return []


@op(aten.masked_fill, bounds=_fits)
def masked_fill(x, mask, value):
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


def _ranks(mask):
    """For each element the number of true elements before it."""
    return (jnp.cumsum(mask.reshape(-1), dtype=jnp.int32) - mask.reshape(-1)).reshape(mask.shape)


def _enough(x, mask, source, *_, **__):
    shape = np.broadcast_shapes(x.shape, mask.shape)
    wanted = jnp.broadcast_to(mask, shape).sum() if 0 not in shape else 0
    return [never(jnp.asarray(wanted > source.size), "Number of elements of source < number of ones in mask")]


@op(aten.masked_scatter, kind="movement", bounds=_enough)
def masked_scatter(x, mask, source):
    """The true places take the elements of `source` one after the other."""
    x, mask = jnp.broadcast_arrays(x, mask)
    if source.size == 0 or x.size == 0:
        return x
    return jnp.where(mask, source.reshape(-1)[jnp.minimum(_ranks(mask), source.size - 1)].astype(x.dtype), x)


@op(aten.masked_scatter_backward, kind="movement", out=True)
def masked_scatter_backward(grad, mask, sizes, out):
    """The gradients of the true places, one after the other, then zeros."""
    count = 1
    for n in sizes:
        count *= n
    grad, mask = jnp.broadcast_arrays(grad, mask)
    place = jnp.where(mask, _ranks(mask), count).reshape(-1)
    return jnp.zeros(count, grad.dtype).at[place].set(grad.reshape(-1), mode="drop").reshape(sizes)
