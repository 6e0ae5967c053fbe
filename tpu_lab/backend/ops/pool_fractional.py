"""Fractional max pooling (Graham 2014): windows of one size that start at pseudo-random places.

Where they start follows from one random number for each plane and dimension, which the caller draws.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import torch

from tpu_lab.backend.opmath import wide
from tpu_lab.backend.ops.pool import _scatter_planes
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _starts(sample, i, o, k):
    """[planes, o] where the windows of size k start in a dimension of i elements; sample: [planes]."""
    last = jnp.full((sample.shape[0], 1), i - k, jnp.int32)
    if o == 1:
        return last
    alpha = jnp.asarray(i - k, sample.dtype) / jnp.asarray(o - 1, sample.dtype)
    number = jnp.arange(o - 1, dtype=sample.dtype)
    first = ((number + sample[:, None]) * alpha).astype(jnp.int32) - (sample * alpha).astype(jnp.int32)[:, None]
    return jnp.concatenate([first, last], 1)


def _pool(x, kernel_size, output_size, samples, order):
    """(maxima, flat positions). order: which of a plane's random numbers is for which dimension."""
    n = len(kernel_size)
    plane, lead = x.shape[-n:], x.shape[:-n]
    samples, planes = samples.reshape(-1, n), x.reshape(-1, *plane)
    flat = 0
    for a in range(n):
        start = _starts(samples[:, order[a]], plane[a], output_size[a], kernel_size[a])
        at = start[:, :, None] + jnp.arange(kernel_size[a], dtype=jnp.int32)  # [planes, out, tap]
        shape = [at.shape[0], *[1] * (2 * n)]
        shape[1 + a], shape[1 + n + a] = at.shape[1:]
        flat = flat * plane[a] + at.reshape(shape)
    flat = flat.reshape(samples.shape[0], -1, math.prod(kernel_size))  # [planes, windows, taps]
    values = jnp.take_along_axis(planes.reshape(planes.shape[0], -1), flat.reshape(flat.shape[0], -1), 1)
    values = values.reshape(flat.shape)
    place = jnp.argmax(jnp.where(jnp.isnan(values), -jnp.inf, values), -1)  # the first of equals, but the last NaN
    nan = jnp.isnan(values)
    place = jnp.where(nan.any(-1), nan.shape[-1] - 1 - jnp.argmax(nan[..., ::-1], -1), place)[..., None]
    shape = [*lead, *output_size]
    return [jnp.take_along_axis(v, place, -1).reshape(shape) for v in (values, flat)]


@op(aten.fractional_max_pool2d, kind="reduce")
def fractional_max_pool2d(x, kernel_size, output_size, random_samples):
    """x: [..., height, width]; random_samples: [batch, channels, (for the width, for the height)]."""
    return _pool(x, kernel_size, output_size, random_samples, (1, 0))


@op(aten.fractional_max_pool3d, kind="reduce")
def fractional_max_pool3d(x, kernel_size, output_size, random_samples):
    return _pool(x, kernel_size, output_size, random_samples, (0, 1, 2))


@op(aten.fractional_max_pool2d_backward, aten.fractional_max_pool3d_backward, kind="reduce")
def fractional_max_pool_backward(grad, x, kernel_size, output_size, indices):
    return _scatter_planes(wide(grad), indices, x.shape, len(kernel_size))
