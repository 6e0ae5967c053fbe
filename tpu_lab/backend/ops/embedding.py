"""Embedding tables: lookup, its dense gradient, max-norm, and bags (sum, mean or max over groups of rows).

Bags: `offsets[b]` is where bag b starts in the flat `indices`; with `include_last_offset` the last offset only says
where the last bag ends. Modes are PyTorch's numbers: 0 sum, 1 mean, 2 max.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch

from tpu_lab.backend.bounds import Bound, never
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2


def _rows(weight, indices, *_, **__):
    return [Bound(indices, weight.shape[0], "index out of range in self: {} in a table of {size} rows")]


@op(aten.embedding, kind="movement", bounds=_rows)
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return weight[indices.astype(jnp.int32)]


@op(aten.embedding_dense_backward, kind="movement")
def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    rows = indices.reshape(-1).astype(jnp.int32)
    grad = wide(grad).reshape(rows.size, -1 if rows.size else grad.shape[-1])
    return _scattered_rows(grad, rows, num_weights, padding_idx, scale_grad_by_freq)


def _scattered_rows(grad, rows, num_weights, padding_idx, scale_grad_by_freq):
    """[num_weights, width]: the sum of the gradients of each row; none for `padding_idx`."""
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, jnp.int32).at[rows].add(1)
        grad = grad / counts[rows][:, None].astype(grad.dtype)
    rows = jnp.where(rows == padding_idx, num_weights, rows)  # out of range: dropped
    return jnp.zeros((num_weights, grad.shape[1]), grad.dtype).at[rows].add(grad, mode="drop")


@op(aten.embedding_renorm, aten.embedding_renorm_, kind="movement", bounds=_rows)
def embedding_renorm(weight, indices, max_norm, norm_type):
    """Scale the looked-up rows whose norm is over `max_norm` down to it."""
    w = wide(weight)
    norms = jnp.linalg.norm(w, norm_type, axis=1, keepdims=True)
    used = jnp.zeros((weight.shape[0], 1), bool).at[indices.reshape(-1).astype(jnp.int32)].set(True)
    return w * jnp.where(used & (norms > max_norm), max_norm / (norms + 1e-7), 1).astype(w.dtype)


def _bag_of(offsets, count):
    """[count] the bag of each index: the last bag that starts at or before it (empty bags start where the next does)."""
    steps = jnp.zeros(count + 1, jnp.int32).at[offsets.astype(jnp.int32)].add(1, mode="drop")
    return jnp.cumsum(steps)[:count] - 1


def _rows_and_offsets(weight, indices, offsets, *_, **__):
    if not offsets.size:
        return _rows(weight, indices)
    count = indices.shape[0]
    return [
        *_rows(weight, indices),
        never(offsets[0] != 0, "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0"),
        never(offsets[1:] < offsets[:-1], "offsets must not decrease"),
        never(offsets[-1] > count, f"offsets[-1] can not be greater than input's length {count}"),
    ]


@op(aten._embedding_bag, aten._embedding_bag_forward_only, kind="reduce", out=True, bounds=_rows_and_offsets)
def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
    out=None,
):
    """(bags, bag of each index, size of each bag without padding, index of each maximum).

    PyTorch leaves the last three empty or zero where the backward does not need them, and its CPU and meta kernels
    differ in that: their shapes are taken from `out`.
    """
    bags = offsets.shape[0] - int(include_last_offset)
    indices, w = indices.astype(jnp.int32), wide(weight)
    bag = _bag_of(offsets[:bags], indices.shape[0])
    kept = indices != padding_idx
    rows = w[indices]
    rows = rows if per_sample_weights is None else rows * wide(per_sample_weights)[:, None]
    sizes = jnp.zeros(bags, jnp.int32).at[bag].add(kept.astype(jnp.int32))
    largest = jnp.zeros((bags, w.shape[1]), jnp.int32)
    if mode == MAX:
        low = jnp.full((bags, w.shape[1]), -jnp.inf, w.dtype)
        value = low.at[bag].max(jnp.where(kept[:, None], rows, -jnp.inf))
        # The first index of the bag that holds the maximum.
        order = jnp.arange(indices.shape[0], dtype=jnp.int32)[:, None]
        same = kept[:, None] & ((rows == value[bag]) | jnp.isnan(rows))
        first = (
            jnp.full(largest.shape, indices.shape[0], jnp.int32).at[bag].min(jnp.where(same, order, indices.shape[0]))
        )
        filled = (sizes > 0)[:, None]
        value = jnp.where(filled, value, 0)
        if indices.shape[0]:
            largest = jnp.where(filled, indices[jnp.minimum(first, indices.shape[0] - 1)], 0)
    else:
        value = jnp.zeros((bags, w.shape[1]), w.dtype).at[bag].add(jnp.where(kept[:, None], rows, 0))
        if mode == MEAN:
            value = value / jnp.maximum(sizes, 1)[:, None].astype(w.dtype)
    shapes = [shape for shape, _ in out]
    sizes = jnp.zeros_like(sizes) if mode == SUM else sizes
    sizes = jnp.pad(sizes, (0, max(0, shapes[2][0] - bags)))[: shapes[2][0]]
    if mode != MAX:
        largest = sizes[: shapes[3][0]]
    return value, bag[: shapes[1][0]], sizes, largest


@op(aten._embedding_bag_backward, kind="movement")
def embedding_bag_backward(
    grad,
    indices,
    offsets,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
):
    bag = _bag_of(offsets, indices.shape[0])
    bag = jnp.minimum(bag, grad.shape[0] - 1)  # include_last_offset: the last offset starts no bag
    return embedding_bag_dense_backward(
        grad,
        indices,
        bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@op(aten._embedding_bag_dense_backward, kind="movement")
def embedding_bag_dense_backward(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
):
    grad, rows, bag = wide(grad), indices.astype(jnp.int32), offset2bag.astype(jnp.int32)
    if mode == MAX:
        place = jnp.where((bag_size[: grad.shape[0]] > 0)[:, None], maximum_indices.astype(jnp.int32), num_weights)
        columns = jnp.arange(grad.shape[1], dtype=jnp.int32)
        return jnp.zeros((num_weights, grad.shape[1]), grad.dtype).at[place, columns].add(grad, mode="drop")
    if mode == MEAN:
        grad = grad / jnp.maximum(bag_size[: grad.shape[0]], 1)[:, None].astype(grad.dtype)
    each = grad[bag]
    each = each if per_sample_weights is None else each * wide(per_sample_weights)[:, None]
    return _scattered_rows(each, rows, num_weights, padding_idx, scale_grad_by_freq)


@op(aten._embedding_bag_per_sample_weights_backward, kind="reduce")
def embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    bag = jnp.minimum(_bag_of(offsets, indices.shape[0]), grad.shape[0] - 1)
    dots = (wide(grad)[bag] * wide(weight)[indices.astype(jnp.int32)]).sum(1)
    return jnp.where(indices == padding_idx, 0, dots)
