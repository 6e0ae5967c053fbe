"""Sorting and order statistics: sort, topk, kthvalue, median, mode, searchsorted, histc.

NaN counts as the largest value, as in PyTorch. Keys are integers of the same order as the values, with the position
in their low 32 bits where both fit in 64: sorting one integer array is five times faster on CPUs than sorting floats
with their positions beside them.
"""

from __future__ import annotations

import operator

import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.bounds import Bound, never
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _ordered(x):
    """Integers (int32 or int64) in the order of x's values: -0.0 equals 0.0, all NaNs are equal and largest."""
    if x.dtype == jnp.uint64:
        return lax.bitcast_convert_type(x ^ jnp.uint64(1 << 63), jnp.int64)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (
            x.astype(jnp.int64 if x.dtype == jnp.int64 else jnp.int32) if x.dtype != jnp.uint32 else x.astype(jnp.int64)
        )
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    integer = jnp.int64 if x.dtype == jnp.float64 else jnp.int32
    top = jnp.iinfo(integer).max
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), integer)
    return jnp.where(jnp.isnan(x), top, jnp.where(bits < 0, bits ^ top, bits))  # negative floats count down


def _argsort(x, dim, descending=False):
    """Stable order along `dim`, int32."""
    key = _ordered(x)
    key = ~key if descending else key
    position = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    if key.dtype == jnp.int32:
        packed = (key.astype(jnp.int64) << 32) | position.astype(jnp.int64)
        return lax.sort(packed, dimension=dim, is_stable=False).astype(jnp.int32)  # the cast keeps the low half
    return lax.sort((key, position), dimension=dim, is_stable=True, num_keys=1)[1]


def _sorted(x, dim, descending=False):
    order = _argsort(x, dim, descending)
    return jnp.take_along_axis(x, order, dim), order


@op(aten.sort.default, kind="reduce")
def sort(x, dim=-1, descending=False):
    """(values, indices), always stable."""
    if x.ndim == 0 or x.size == 0:
        return x, jnp.zeros(x.shape, jnp.int32)
    return _sorted(x, dim % x.ndim, descending)


@op(aten.sort.stable, kind="reduce")
def sort_stable(x, *, stable=None, dim=-1, descending=False):
    return sort(x, dim, descending)


@op(aten.topk, kind="reduce")
def topk(x, k, dim=-1, largest=True, sorted=True):
    """(values, indices), always sorted. XLA's own top-k serves a few of many floats."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    dim = dim % x.ndim
    if largest and 0 < k * 8 <= x.shape[dim] and x.dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        order = lax.top_k(_without_nan(jnp.moveaxis(x, dim, -1).astype(jnp.float32)), k)[1]
        order = jnp.moveaxis(order, -1, dim)
    else:
        order = lax.slice_in_dim(_argsort(x, dim, largest), 0, k, axis=dim)
    return jnp.take_along_axis(x, order, dim), order


def _without_nan(x):
    """float32 in the same order with NaN moved to infinity, as XLA's top-k on CPUs puts NaN anywhere.

    Positive numbers move down to the next smaller float to make room, infinity too.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    smaller = lax.bitcast_convert_type(jnp.where(x > 0, bits - 1, bits), jnp.float32)
    return jnp.where(jnp.isnan(x), jnp.inf, smaller)


def _pick(x, dim, keepdim, place):
    """(value, index) at `place` (a number or an array with `dim` kept) in the sorted order along dim."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    dim = dim % x.ndim
    order = _argsort(x, dim)
    shape = [1 if a == dim else n for a, n in enumerate(x.shape)]
    order = jnp.take_along_axis(order, jnp.broadcast_to(jnp.asarray(place, jnp.int32), shape), dim)
    value = jnp.take_along_axis(x, order, dim)
    return (value, order) if keepdim else (value.squeeze(dim), order.squeeze(dim))


@op(aten.kthvalue, kind="reduce")
def kthvalue(x, k, dim=-1, keepdim=False):
    return _pick(x, dim, keepdim, k - 1)


def _middle(x, dim, skip_nan):
    """Place of the lower median in the sorted order; that of the first NaN, if there is one and it counts."""
    if x.ndim == 0:
        return 0
    n = x.shape[dim]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (n - 1) // 2
    real = n - jnp.isnan(x).sum(dim, keepdims=True, dtype=jnp.int32)
    if skip_nan:
        return jnp.maximum(real - 1, 0) // 2
    return jnp.where(real < n, real, (n - 1) // 2)


@op(aten.median.dim, kind="reduce")
def median_dim(x, dim, keepdim=False):
    return _pick(x, dim, keepdim, _middle(x, dim, False))


@op(aten.nanmedian.dim, kind="reduce")
def nanmedian_dim(x, dim, keepdim=False):
    return _pick(x, dim, keepdim, _middle(x, dim, True))


@op(aten.median.default, kind="reduce")
def median(x):
    return _pick(x.reshape(-1), 0, False, _middle(x.reshape(-1), 0, False))[0] if x.size else _nothing(x)


@op(aten.nanmedian.default, kind="reduce")
def nanmedian(x):
    return _pick(x.reshape(-1), 0, False, _middle(x.reshape(-1), 0, True))[0] if x.size else _nothing(x)


def _nothing(x):
    """The median of no elements: NaN, or the smallest integer."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.full((), jnp.nan if floating else jnp.iinfo(x.dtype).min, x.dtype)


@op(aten.mode, kind="reduce")
def mode(x, dim=-1, keepdim=False):
    """(most frequent value, the smallest of equally frequent ones; the index of its last occurrence). No NaN equals another."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    dim = dim % x.ndim
    value, order = _sorted(x, dim)
    place = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    new = (value != jnp.roll(value, 1, dim)) | (place == 0)
    run = place - lax.cummax(jnp.where(new, place, 0), axis=dim)  # how many equal ones came before
    best = jnp.argmax(run, dim, keepdims=True)
    value, order = jnp.take_along_axis(value, best, dim), jnp.take_along_axis(order, best, dim)
    return (value, order) if keepdim else (value.squeeze(dim), order.squeeze(dim))


# Bins


def _sorter_inside(sorted_sequence, x, *, sorter=None, **__):
    return [Bound(sorter, sorted_sequence.shape[-1], "searchsorted(): sorter index {} out of range for a row of {size}")]


@op(aten.searchsorted, kind="reduce", bounds=_sorter_inside)
def searchsorted(sorted_sequence, x, *, out_int32=False, right=False, side=None, sorter=None):
    """Where each x goes into the sorted last dimension; `side="right"` means after equal ones. The halves are PyTorch's,
    so that a row with NaN, which has no order, gives the same place."""
    edges = sorted_sequence if sorter is None else jnp.take_along_axis(sorted_sequence, sorter.astype(jnp.int32), -1)
    x = (
        jnp.asarray(x).astype(edges.dtype)
        if jnp.ndim(x) == 0 and jnp.issubdtype(edges.dtype, jnp.floating)
        else jnp.asarray(x)
    )
    edges, x = jnp.promote_types(edges.dtype, x.dtype), (edges, x)
    edges, x = (v.astype(edges) for v in x)
    beyond = operator.gt if right or side == "right" else operator.ge
    size = edges.shape[-1]
    if not size or not x.size:
        return jnp.zeros(x.shape, jnp.int32)

    def edge(n):
        if edges.ndim == 1:
            return edges[n]
        return jnp.take_along_axis(edges.reshape(-1, size), n.reshape(-1, x.shape[-1]), -1).reshape(x.shape)

    def halve(_, found):
        low, high = found
        middle = (low + high) // 2
        left = beyond(edge(jnp.minimum(middle, size - 1)), x)  # false of NaN on either side
        return jnp.where(left | (low >= high), low, middle + 1), jnp.where(left & (low < high), middle, high)

    ends = jnp.zeros(x.shape, jnp.int32), jnp.full(x.shape, size, jnp.int32)
    return lax.fori_loop(0, size.bit_length(), halve, ends)[0]


@op(aten.bucketize, kind="reduce")
def bucketize(x, boundaries, *, out_int32=False, right=False):
    return searchsorted(boundaries, x, right=right)


def _histc_finite(x, bins=100, min=0, max=0):
    return [never(~jnp.isfinite(x).all(), "histc: the range of the data is not finite")] if min == max and x.size else []


@op(aten.histc, kind="reduce", static=("min", "max"), bounds=_histc_finite)
def histc(x, bins=100, min=0, max=0):
    """Counts in equal bins from min to max, or over the data when these are equal."""
    x, low, high = x.reshape(-1), jnp.asarray(min).astype(x.dtype), jnp.asarray(max).astype(x.dtype)
    if x.size:
        low, high = jnp.where(low == high, x.min(), low), jnp.where(low == high, x.max(), high)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    place = ((x - low) / (high - low) * bins).astype(jnp.int32)
    place = jnp.where(place == bins, bins - 1, place)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, jnp.int32).at[jnp.where(inside, place, bins)].add(1, mode="drop")
