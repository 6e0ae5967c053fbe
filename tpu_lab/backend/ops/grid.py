"""grid_sample in 2 and 3 dimensions, with gradients to the image and to the grid.

interpolation: 0 linear, 1 nearest, 2 cubic (2-d only); padding: 0 zeros, 1 border, 2 reflection. The last dimension
of the grid lists coordinates from the last spatial dimension on, in [-1, 1].
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import torch

from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
LINEAR, NEAREST, CUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


def _unnormalized(c, n, align_corners):
    return (c + 1) / 2 * (n - 1) if align_corners else ((c + 1) * n - 1) / 2


def _clipped(c, n):
    """Into [0, n - 1]; the gradient is 0 on both ends and outside, as in PyTorch."""
    return jnp.where(c > 0, jnp.where(c < n - 1, c, n - 1), 0)


def _reflected(c, n, align_corners):
    """Mirror at the outer pixels' centers (align_corners) or at the image's edges."""
    low, span = (0.0, n - 1) if align_corners else (-0.5, n)
    if span == 0:
        return jnp.zeros_like(c)
    away = jnp.abs(c - low)
    flips = jnp.floor(jax.lax.stop_gradient(away) / span)
    extra = away - flips * span
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _padded(c, n, padding, align_corners):
    if padding == REFLECTION:
        c = _reflected(c, n, align_corners)
    return c if padding == ZEROS else _clipped(c, n)


def _read(image, places, shares):
    """Weighted sum of image [batch, channels, *spatial] at integer places; what lies outside counts as 0.

    places: one [batch, taps, *out] array for each spatial dimension; shares: [batch, taps, *out].
    """
    inside = True
    for p, n in zip(places, image.shape[2:]):
        inside &= (p >= 0) & (p <= n - 1)
    places = [jnp.clip(p, 0, n - 1).astype(jnp.int32) for p, n in zip(places, image.shape[2:])]
    values = jax.vmap(lambda picture, *at: picture[(slice(None), *at)])(image, *places)
    return (jnp.where(inside[:, None], values, 0) * shares[:, None]).sum(2)


def _taps(choices):
    """All combinations of one choice per dimension: a list of [batch, taps, *out] arrays, one for each dimension."""
    return [jnp.stack(column, 1) for column in zip(*itertools.product(*choices))]


def _cubic_weights(t):
    """Weights of the four neighbours at distances 1 + t, t, 1 - t, 2 - t; Keys' kernel with a = -0.75."""
    a = -0.75

    def near(d):
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d):
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


@op(aten.grid_sampler_2d, aten.grid_sampler_3d, kind="movement")
def grid_sampler(image, grid, interpolation_mode, padding_mode, align_corners):
    """image: [batch, channels, *spatial]; grid: [batch, *out, dimensions] -> [batch, channels, *out]."""
    dtype, image, grid = image.dtype, wide(image), wide(grid)
    sizes = image.shape[2:]
    at = [_unnormalized(grid[..., len(sizes) - 1 - a], n, align_corners) for a, n in enumerate(sizes)]
    if interpolation_mode == CUBIC:
        low = [jnp.floor(jax.lax.stop_gradient(c)) for c in at]
        shares = [_cubic_weights(c - f) for c, f in zip(at, low)]
        near = [[_padded(f + (t - 1), n, padding_mode, align_corners) for t in range(4)] for f, n in zip(low, sizes)]
    else:
        at = [_padded(c, n, padding_mode, align_corners) for c, n in zip(at, sizes)]
        if interpolation_mode == NEAREST:
            near = [[jnp.round(jax.lax.stop_gradient(c))] for c in at]
            shares = [[jnp.ones_like(c)] for c in at]
        else:
            low = [jnp.floor(jax.lax.stop_gradient(c)) for c in at]
            near = [[f, f + 1] for f in low]
            shares = [[f + 1 - c, c - f] for c, f in zip(at, low)]
    return _read(image, _taps(near), math.prod(_taps(shares))).astype(dtype)


@op(aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward, kind="movement")
def grid_sampler_backward(grad, image, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    image, grid = wide(image), wide(grid)
    settings = (interpolation_mode, padding_mode, align_corners)
    to_image = jax.vjp(lambda image: grid_sampler(image, grid, *settings), image)[1]
    to_grid = jax.vjp(lambda grid: grid_sampler(image, grid, *settings), grid)[1]
    grad = wide(grad)
    return to_image(grad)[0] if output_mask[0] else None, to_grid(grad)[0] if output_mask[1] else None
