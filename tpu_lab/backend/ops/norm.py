"""Layer, group and batch norm with their gradients, weight norm. Half dtypes are computed in float32.

The gradients are the textbook ones: with xhat = (x - mean) * rstd and g = grad * weight,
grad_x = rstd * (g - mean(g) - xhat * mean(g * xhat)), the means over the normalised elements.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _moments(x, axes):
    """Mean and biased variance, in two passes, with the axes kept."""
    mean = x.mean(axes, keepdims=True)
    return mean, jnp.square(x - mean).mean(axes, keepdims=True)


def _grad_x(g, xhat, rstd, axes):
    return rstd * (g - g.mean(axes, keepdims=True) - xhat * (g * xhat).mean(axes, keepdims=True))


# Layer norm


@op(aten.native_layer_norm, kind="reduce")
def layer_norm(x, normalized_shape, weight, bias, eps):
    """(y, mean, rstd); mean and rstd are [*batch, 1, ...]."""
    x, weight, bias = wide(x), wide(weight), wide(bias)
    mean, var = _moments(x, tuple(range(x.ndim - len(normalized_shape), x.ndim)))
    rstd = lax.rsqrt(var + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


@op(aten.native_layer_norm_backward, kind="reduce")
def layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    grad, x, mean, rstd, weight = map(wide, (grad, x, mean, rstd, weight))
    outer = x.ndim - len(normalized_shape)
    batch, axes = tuple(range(outer)), tuple(range(outer, x.ndim))
    xhat = (x - mean) * rstd
    g = grad if weight is None else grad * weight
    return (
        _grad_x(g, xhat, rstd, axes) if output_mask[0] else None,
        (grad * xhat).sum(batch) if output_mask[1] else None,
        grad.sum(batch) if output_mask[2] else None,
    )


# Group norm: x is [N, C, *spatial], its statistics are [N, group]


@op(aten.native_group_norm, kind="reduce")
def group_norm(x, weight, bias, N, C, HxW, group, eps):
    shape, x = x.shape, wide(x).reshape(N, group, C // group * HxW)
    mean, var = _moments(x, 2)
    rstd = lax.rsqrt(var + eps)
    y = ((x - mean) * rstd).reshape(N, C, HxW)
    y = y if weight is None else y * wide(weight)[:, None]
    y = y if bias is None else y + wide(bias)[:, None]
    return y.reshape(shape), mean[..., 0], rstd[..., 0]


@op(aten.native_group_norm_backward, kind="reduce")
def group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    shape, groups = x.shape, (N, group, C // group * HxW)
    grad, x, mean, rstd = wide(grad).reshape(N, C, HxW), wide(x), wide(mean)[..., None], wide(rstd)[..., None]
    xhat = (x.reshape(groups) - mean) * rstd
    g = grad if weight is None else grad * wide(weight)[:, None]
    return (
        _grad_x(g.reshape(groups), xhat, rstd, 2).reshape(shape) if output_mask[0] else None,
        (grad * xhat.reshape(N, C, HxW)).sum((0, 2)) if output_mask[1] else None,
        grad.sum((0, 2)) if output_mask[2] else None,
    )


# Batch norm: statistics for each channel, axis 1


def _channels(v, x):
    """[C] -> [1, C, 1, ...], to broadcast against x."""
    return wide(v).reshape(1, -1, *[1] * (x.ndim - 2))


def _batch_axes(x):
    return (0, *range(2, x.ndim))


def _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """(y, save_mean, save_invstd, new running mean, new running variance); the running variance is unbiased."""
    y = wide(x)
    if training:
        mean, var = _moments(y, _batch_axes(x))
        invstd = lax.rsqrt(var + eps)
        saved = (mean.reshape(-1), invstd.reshape(-1))
        count = x.size // max(x.shape[1], 1)
        unbiased = var.reshape(-1) * jnp.asarray(count, y.dtype) / jnp.asarray(count - 1, y.dtype)
        running_mean = _moved(running_mean, saved[0], momentum)
        running_var = _moved(running_var, unbiased, momentum)
    else:
        mean, invstd = _channels(running_mean, x), lax.rsqrt(_channels(running_var, x) + eps)
        saved = (wide(running_mean), invstd.reshape(-1))  # one a channel, as PyTorch's meta kernel says
    y = (y - mean) * invstd
    y = y if weight is None else y * _channels(weight, x)
    y = y if bias is None else y + _channels(bias, x)
    return y, *saved, running_mean, running_var


def _moved(old, new, momentum):
    if old is None:
        return None
    dtype = wide(old).dtype
    stay, move = jnp.asarray(1 - momentum, dtype), jnp.asarray(momentum, dtype)
    return (stay * wide(old) + move * new).astype(old.dtype)


@op(aten.native_batch_norm, kind="reduce", mutates=("running_mean", "running_var"), runtime=("momentum",))
def native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@op(
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional,
    kind="reduce",
    runtime=("momentum",),
)
def batch_norm_legit(x, weight, bias, running_mean, running_var, training, momentum, eps):
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@op(aten._native_batch_norm_legit.no_stats, kind="reduce", runtime=("momentum",))
def batch_norm_without_stats(x, weight, bias, training, momentum, eps):
    return _batch_norm(x, weight, bias, None, None, True, momentum, eps)[:3]


@op(aten._native_batch_norm_legit_no_training, kind="reduce", runtime=("momentum",))
def batch_norm_no_training(x, weight, bias, running_mean, running_var, momentum, eps):
    return _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@op(aten.native_batch_norm_backward, kind="reduce")
def batch_norm_backward(grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask):
    """In training through the batch's statistics; in evaluation these are constants."""
    axes = _batch_axes(x)
    if train:
        mean, invstd = _channels(save_mean, x), _channels(save_invstd, x)
    else:
        mean, invstd = _channels(running_mean, x), lax.rsqrt(_channels(running_var, x) + eps)
    grad, xhat = wide(grad), (wide(x) - mean) * invstd
    g = grad if weight is None else grad * _channels(weight, x)
    return (
        (_grad_x(g, xhat, invstd, axes) if train else g * invstd) if output_mask[0] else None,
        (grad * xhat).sum(axes) if output_mask[1] else None,
        grad.sum(axes) if output_mask[2] else None,
    )


# Weight norm: w = g * v / norm(v), one norm for each slice of the first or of the last dimension


def _other_axes(v, dim):
    return tuple(a for a in range(v.ndim) if a != dim % v.ndim)


@op(aten._weight_norm_interface, kind="reduce")
def weight_norm(v, g, dim=0):
    v, g = wide(v), wide(g)
    norms = jnp.sqrt(jnp.square(v).sum(_other_axes(v, dim), keepdims=True))
    return v * (g / norms), norms


@op(aten._weight_norm_interface_backward, kind="reduce")
def weight_norm_backward(grad, v, g, norms, dim):
    grad, v, g, norms = map(wide, (grad, v, g, norms))
    along = (grad * v).sum(_other_axes(v, dim), keepdims=True)
    return g / norms * (grad - v * along / jnp.square(norms)), along / norms


@op(aten.renorm, kind="reduce")
def renorm(x, p, dim, maxnorm):
    """Scale down each slice along `dim` whose p-norm is over `maxnorm`."""
    wx = wide(x)
    p, maxnorm = jnp.asarray(p, wx.dtype), jnp.asarray(maxnorm, wx.dtype)
    size, axes = jnp.abs(wx), _other_axes(x, dim)
    power = jnp.where(jnp.isinf(p), jnp.ones_like(p), p)
    sums = (size**power).sum(axes, keepdims=True) ** (1 / power)
    norms = jnp.where(jnp.isinf(p), size.max(axes, keepdims=True), sums)
    return wx * jnp.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1).astype(wx.dtype)


# Batch norm that writes its statistics as its schema says


@op(aten._batch_norm_with_update.default, kind="reduce", runtime=("momentum",))
def batch_norm_with_update(x, weight, bias, running_mean, running_var, momentum, eps):
    """(y, save_mean, save_invstd, a reserve that is empty here, and what is written: the running statistics)."""
    y, mean, invstd, *running = _batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return y, mean, invstd, jnp.zeros((0,), jnp.uint8), *running


@op(aten._batch_norm_with_update.out, kind="reduce", runtime=("momentum",))
def batch_norm_with_update_out(x, weight, bias, running_mean, running_var, momentum, eps):
    """What is written, in the order of the schema."""
    values = batch_norm_with_update(x, weight, bias, running_mean, running_var, momentum, eps)
    return *values[4:], *values[:4]


@op(aten._native_batch_norm_legit.out, kind="reduce", runtime=("momentum",))
def batch_norm_legit_out(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """What is written, in the order of the schema."""
    values = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return *values[3:], *values[:3]


@op(aten.batch_norm_update_stats, kind="reduce", mutates=("running_mean", "running_var"), runtime=("momentum",))
def batch_norm_update_stats(x, running_mean, running_var, momentum):
    """(mean, biased variance), then the running statistics."""
    mean, var = _moments(wide(x), _batch_axes(x))
    _, _, _, *running = _batch_norm(x, None, None, running_mean, running_var, True, momentum, 0.0)
    return mean.reshape(-1), var.reshape(-1), *running
