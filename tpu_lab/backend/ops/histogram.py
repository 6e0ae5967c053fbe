"""Histograms: counts, or sums of weights, between edges; the last bin holds its right edge, too. NaN is in none."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch

from tpu_lab.backend.bounds import never
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _ends(x, range):
    """[dimensions] the outer edges over points [n, dimensions]: given, or those of the data, half a step apart at least."""
    if range is not None:
        low, high = jnp.asarray(range[::2], x.dtype), jnp.asarray(range[1::2], x.dtype)
    elif x.shape[0]:
        low, high = x.min(0), x.max(0)
    else:
        low, high = jnp.zeros(x.shape[1], x.dtype), jnp.ones(x.shape[1], x.dtype)
    same = low == high
    return jnp.where(same, low - 0.5, low), jnp.where(same, high + 0.5, high)


def _edges(x, bins, range):
    """A list of edges, one array a dimension."""
    low, high = _ends(x, range)
    return [jnp.linspace(low[d], high[d], n + 1, dtype=x.dtype) for d, n in enumerate(bins)]


def _counted(x, edges, weight, density):
    """Counts [bins of each dimension] of points [n, dimensions]."""
    bins = [e.shape[0] - 1 for e in edges]
    flat, inside = 0, True
    for d, (edge, n) in enumerate(zip(edges, bins)):
        v = x[:, d]
        place = jnp.searchsorted(edge, v, side="right") - 1
        place = jnp.where(v == edge[-1], n - 1, place)
        inside = inside & (v >= edge[0]) & (v <= edge[-1])
        flat = flat * n + jnp.clip(place, 0, n - 1)
    each = jnp.ones(x.shape[:1], x.dtype) if weight is None else weight.reshape(-1)
    total = math.prod(bins)
    counts = jnp.zeros(total, x.dtype).at[jnp.where(inside, flat, total)].add(each, mode="drop").reshape(bins)
    if density:
        counts = counts / counts.sum()
        for d, edge in enumerate(edges):
            counts = counts / jnp.expand_dims(jnp.diff(edge), tuple(a for a in np.arange(len(bins)) if a != d))
    return counts


def _finite(x, bins=None, *, range=None, weight=None, density=False):
    given = range is not None or not x.size
    return [] if given else [never(~jnp.isfinite(x).all(), "histogram: the range of the data is not finite")]


@op(aten.histogram.bin_ct, kind="reduce", bounds=_finite)
def histogram(x, bins=100, *, range=None, weight=None, density=False):
    points = x.reshape(-1, 1)
    edges = _edges(points, [bins], range)
    return _counted(points, edges, weight, density), edges[0]


@op(aten.histogram.bins_tensor, kind="reduce")
def histogram_between(x, bins, *, weight=None, density=False):
    return _counted(x.reshape(-1, 1), [bins], weight, density), bins


@op(aten._histogramdd_bin_edges, kind="reduce", bounds=_finite)
def histogramdd_edges(x, bins, *, range=None, weight=None, density=False):
    return _edges(x.reshape(-1, x.shape[-1]), bins, range)


@op(aten._histogramdd_from_bin_cts, kind="reduce", bounds=_finite)
def histogramdd(x, bins, *, range=None, weight=None, density=False):
    points = x.reshape(-1, x.shape[-1])
    return _counted(points, _edges(points, bins, range), weight, density)


@op(aten._histogramdd_from_bin_tensors, kind="reduce")
def histogramdd_between(x, bins, *, weight=None, density=False):
    return _counted(x.reshape(-1, x.shape[-1]), bins, weight, density)
