"""Reductions of runs of rows: `segment_reduce`, and rows between a jagged list and a padded block.

Segments are given by their lengths, or by offsets that start with 0 and end with the number of rows.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from tpu_lab.backend.bounds import Bound, never
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
START = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


def _ends(lengths, offsets):
    """(first row, row after the last) of each segment, each [..., segments]."""
    if offsets is not None:
        return offsets[..., :-1], offsets[..., 1:]
    ends = jnp.cumsum(lengths, -1)
    return ends - lengths, ends


def _number(starts, ends, rows):
    """[..., rows] the segment of each row; as many as there are segments for a row in none."""
    row = jnp.arange(rows)
    inside = jax.vmap(lambda e: jnp.searchsorted(e, row, side="right"))
    number = inside(ends.reshape(-1, ends.shape[-1])).reshape(*ends.shape[:-1], rows)
    return jnp.where(row < starts[..., :1], ends.shape[-1], number)


def _flat(data, axis, number, segments):
    """Rows of all batches one after the other, [rows, ...], and one number for each over all batches."""
    batch = math.prod(data.shape[:axis])
    place = jnp.arange(batch)[:, None] * segments + number.reshape(batch, -1)
    place = jnp.where(number.reshape(batch, -1) < segments, place, batch * segments)
    return data.reshape(-1, *data.shape[axis + 1 :]), place.reshape(-1), batch * segments


def _lengths_fit(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    if lengths is None or unsafe:
        return []
    wrong = (lengths < 0).any() | (lengths.sum(-1) != data.shape[axis]).any()
    return [never(wrong, "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1)")]


@op(aten.segment_reduce, kind="reduce", bounds=_lengths_fit)
def segment_reduce(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    if indices is not None:
        raise NotImplementedError("segment_reduce(indices=...): PyTorch has no kernel for it; give lengths or offsets")
    starts, ends = _ends(lengths, offsets)
    segments = ends.shape[-1]
    rows, place, count = _flat(wide(data), axis, _number(starts, ends, data.shape[axis]), segments)
    kind = "sum" if reduce == "mean" else reduce
    y = getattr(jax.ops, f"segment_{kind}")(rows, place, num_segments=count + 1)[:-1]
    y = y.reshape(*ends.shape, *data.shape[axis + 1 :])
    size = (ends - starts).reshape(*ends.shape, *[1] * (y.ndim - ends.ndim))
    first = START[reduce] if initial is None else jnp.asarray(initial, y.dtype)
    if kind in ("max", "min"):
        y = jnp.where(size == 0, first, y)
        if initial is not None:
            y = (jnp.maximum if kind == "max" else jnp.minimum)(y, first)
    elif kind == "prod":
        y = y * first
    else:
        y = y + first
    if reduce == "mean":
        y = jnp.where(size == 0, jnp.nan if initial is None else first, y / size.astype(y.dtype))
    return y


@op(aten._segment_reduce_backward, kind="reduce")
def segment_reduce_backward(grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    """Each row's gradient from its segment's; equal extrema share it; of a product all but the row itself."""
    starts, ends = _ends(lengths, offsets)
    segments = ends.shape[-1]
    rows, place, count = _flat(wide(data), axis, _number(starts, ends, data.shape[axis]), segments)

    def of_rows(values):
        """Values of segments, one for each row; 0 for a row in none."""
        flat = wide(values).reshape(count, *rows.shape[1:])
        return jnp.take(flat, place, 0, mode="fill", fill_value=0)

    def total(values):
        return of_rows(jax.ops.segment_sum(values, place, num_segments=count + 1)[:-1])

    g = of_rows(grad)
    if reduce == "mean":
        size = jnp.broadcast_to((ends - starts).reshape(*ends.shape, *[1] * (grad.ndim - ends.ndim)), grad.shape)
        g = g / jnp.maximum(of_rows(size.astype(g.dtype)), 1)
    elif reduce in ("max", "min"):
        chosen = (rows == of_rows(output)) | jnp.isnan(rows)
        g = jnp.where(chosen, g / jnp.maximum(total(chosen.astype(g.dtype)), 1), 0)
    elif reduce == "prod":
        odd = (rows == 0) | jnp.isnan(rows)  # these cannot be divided away
        rest = jax.ops.segment_prod(jnp.where(odd, 1, rows), place, num_segments=count + 1)[:-1]
        rest = of_rows(rest) * (1 if initial is None else jnp.asarray(initial, g.dtype))
        others = total(odd.astype(g.dtype)) - odd
        odd_product = jnp.where(total(jnp.isnan(rows).astype(g.dtype)) - jnp.isnan(rows) > 0, jnp.asarray(jnp.nan, g.dtype), 0)
        g = g * jnp.where(others > 0, odd_product, jnp.where(odd, rest, rest / jnp.where(odd, 1, rows)))
    return g.reshape(data.shape)


# Jagged rows


@op(aten._jagged_to_padded_dense_forward, kind="movement")
def jagged_to_padded(values, offsets, max_lengths, padding_value=0.0):
    """[rows, ...] -> [segments, longest, ...] for one level of offsets."""
    if len(offsets) != 1:
        raise NotImplementedError("_jagged_to_padded_dense_forward: one list of offsets, as PyTorch's CPU kernel")
    first, after = offsets[0][:-1, None], offsets[0][1:, None]
    at = first + jnp.arange(max_lengths[0])
    rows = jnp.take(values, jnp.minimum(at, max(values.shape[0] - 1, 0)), 0) if values.shape[0] else 0
    mask = (at < after).reshape(*at.shape, *[1] * (values.ndim - 1))
    shape = (*at.shape, *values.shape[1:])
    return jnp.where(mask, jnp.broadcast_to(rows, shape), jnp.asarray(padding_value, values.dtype))


def _rows_fit(dense, offsets, total_L=None):
    return [Bound(offsets[0], max(total_L or 0, 0) + 1, "offset {} is past the last of {size} rows")]


@op(aten._padded_dense_to_jagged_forward, kind="movement", bounds=_rows_fit)
def padded_to_jagged(dense, offsets, total_L=None):
    """[segments, longest, ...] -> [total_L, ...]; the caller knows how many rows there are."""
    row = jnp.arange(total_L)
    number = jnp.searchsorted(offsets[0], row, side="right") - 1
    return dense[number, jnp.minimum(row - offsets[0][number], dense.shape[1] - 1)]
