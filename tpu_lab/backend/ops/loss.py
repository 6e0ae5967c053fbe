"""Losses and their gradients: classes, probabilities, distances, margins.

`reduction` is PyTorch's number: 0 none, 1 mean, 2 sum. Half dtypes are computed in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.bounds import Bound, never
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def _reduced(loss, reduction):
    return loss if reduction == NONE else loss.mean() if reduction == MEAN else loss.sum()


def _spread(grad, x, reduction):
    """The gradient of each element's loss, from the gradient of the reduced loss."""
    return grad / jnp.asarray(x.size, grad.dtype) if reduction == MEAN else grad


# Negative log likelihood: x is [C], [N, C] or [N, C, ...], target the same without C


def _class_axis(x):
    return min(x.ndim - 1, 1)


def _picked_weights(x, target, weight, ignore_index):
    """(target with ignored ones at class 0, weight of each target: 0 where ignored)."""
    kept = target != ignore_index
    target = jnp.where(kept, target, 0).astype(jnp.int32)
    w = jnp.ones(target.shape, x.dtype) if weight is None else wide(weight)[target]
    return target, kept, jnp.where(kept, w, 0)


def _classes(x, target, weight=None, reduction=MEAN, ignore_index=-100):
    return [Bound(target, x.shape[_class_axis(x)], "Target {} is out of bounds: there are {size} classes", ignore=ignore_index)]


@op(aten.nll_loss_forward, aten.nll_loss2d_forward, kind="reduce", bounds=_classes)
def nll_loss(x, target, weight, reduction, ignore_index):
    """(loss, total weight of the targets that count: 0 for a batch that is not reduced)."""
    x, axis = wide(x), _class_axis(x)
    target, kept, w = _picked_weights(x, target, weight, ignore_index)
    at_target = jnp.take_along_axis(x, jnp.expand_dims(target, axis), axis).squeeze(axis)
    loss = jnp.where(kept, -at_target * w, 0)  # an ignored -inf gives 0, not NaN
    if reduction == NONE and x.ndim > 1:
        return loss, jnp.zeros((), x.dtype)
    total = w.sum()
    return (loss if reduction == NONE else loss.sum() / total if reduction == MEAN else loss.sum()), total


@op(aten.nll_loss_backward, aten.nll_loss2d_backward, kind="elementwise")
def nll_loss_backward(grad, x, target, weight, reduction, ignore_index, total_weight):
    grad, x, axis = wide(grad), wide(x), _class_axis(x)
    target, kept, w = _picked_weights(x, target, weight, ignore_index)
    g = -w * (grad / wide(total_weight) if reduction == MEAN else grad)
    g = jnp.where(kept, g, 0)  # all ignored: 0, not 0 / 0
    hit = lax.broadcasted_iota(jnp.int32, x.shape, axis) == jnp.expand_dims(target, axis)
    return jnp.where(hit, jnp.expand_dims(g, axis), 0)


# Probabilities and distances


def _probabilities(x, target, *_, **__):
    return [
        never(~((v >= 0) & (v <= 1)), f"all elements of {name} should be between 0 and 1")
        for v, name in ((x, "input"), (target, "target"))
    ]


@op(aten.binary_cross_entropy, promote="result", bounds=_probabilities)
def binary_cross_entropy(x, target, weight=None, reduction=MEAN):
    """Logarithms are clamped at -100, as in PyTorch."""
    loss = -(target * jnp.maximum(jnp.log(x), -100) + (1 - target) * jnp.maximum(jnp.log1p(-x), -100))
    return _reduced(loss if weight is None else loss * weight, reduction)


@op(aten.binary_cross_entropy_backward, promote="result")
def binary_cross_entropy_backward(grad, x, target, weight=None, reduction=MEAN):
    g = _spread(grad, x, reduction) * (x - target) / jnp.maximum((1 - x) * x, 1e-12)
    return g if weight is None else g * weight


@op(aten.mse_loss, promote="result")
def mse_loss(x, target, reduction=MEAN):
    return _reduced(jnp.square(x - target), reduction)


@op(aten.mse_loss_backward, promote="result")
def mse_loss_backward(grad, x, target, reduction):
    difference = x - target
    return 2 * _spread(grad, difference, reduction) * difference


@op(aten.smooth_l1_loss, promote="result")
def smooth_l1_loss(x, target, reduction=MEAN, beta=1.0):
    z = jnp.abs(x - target)
    return _reduced(jnp.where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta) if beta else z, reduction)


@op(aten.smooth_l1_loss_backward, promote="result")
def smooth_l1_loss_backward(grad, x, target, reduction, beta):
    z = x - target
    slope = jnp.where(z <= -beta, -1, jnp.where(z >= beta, 1, z / beta if beta else 0))  # z = beta = 0: -1, as PyTorch
    return _spread(grad, z, reduction) * slope


@op(aten.huber_loss, promote="result")
def huber_loss(x, target, reduction=MEAN, delta=1.0):
    z = jnp.abs(x - target)
    return _reduced(jnp.where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta)), reduction)


@op(aten.huber_loss_backward, promote="result")
def huber_loss_backward(grad, x, target, reduction, delta):
    z = x - target
    return _spread(grad, z, reduction) * jnp.clip(z, -delta, delta)


@op(aten.soft_margin_loss, promote="result")
def soft_margin_loss(x, target, reduction=MEAN):
    return _reduced(jnp.log1p(jnp.exp(-target * x)), reduction)


@op(aten.soft_margin_loss_backward, promote="result")
def soft_margin_loss_backward(grad, x, target, reduction):
    z = jnp.exp(-target * x)
    return _spread(grad, x, reduction) * -target * z / (z + 1)


# Margins: x is [C] or [N, C]


def _last_classes(x, target, *_, **__):
    return [Bound(target, x.shape[-1] if x.ndim else 1, "Target {} is out of bounds: there are {size} classes")]


@op(aten.multi_margin_loss, kind="reduce", bounds=_last_classes)
def multi_margin_loss(x, target, p=1, margin=1, weight=None, reduction=MEAN):
    """Each sample: sum over wrong classes j of max(0, margin - x[target] + x[j]) ** p * weight[target] / C."""
    rows, shape = jnp.atleast_2d(wide(x)), target.shape
    target = target.reshape(-1, 1).astype(jnp.int32)
    z = jnp.asarray(margin).astype(rows.dtype) - jnp.take_along_axis(rows, target, 1) + rows
    z = jnp.where((z > 0) & (jnp.arange(rows.shape[1]) != target), z, 0)
    z = jnp.where(jnp.asarray(p) == 1, z, z * z)
    z = z if weight is None else z * wide(weight)[target]
    loss = z.sum(1) / rows.shape[1]
    return _reduced(loss.reshape(shape), reduction)


@op(aten.multi_margin_loss_backward, kind="reduce")
def multi_margin_loss_backward(grad, x, target, p, margin, weight=None, reduction=MEAN):
    x = wide(x)
    return jax.vjp(lambda x: multi_margin_loss(x, target, p, margin, weight, reduction), x)[1](wide(grad))[0]


def _listed_targets(target):
    """(class indices before the first -1 of each row, which places hold one), both [N, C]."""
    rows = jnp.atleast_2d(target).astype(jnp.int32)
    valid = jnp.cumsum(rows < 0, 1) == 0
    return jnp.where(valid, rows, 0), valid


def _listed_classes(x, target, *_, **__):
    classes = x.shape[-1] if x.ndim else 1
    below = never(target < -1, "argument #2 'target' is out of range")
    return [below, Bound(jnp.maximum(target, -1), classes, "argument #2 'target' is out of range: {} of {size} classes", ignore=-1)]


@op(aten.multilabel_margin_loss_forward, kind="reduce", bounds=_listed_classes)
def multilabel_margin_loss(x, target, reduction):
    """(loss, which classes are targets): sum over targets t and other classes j of max(0, 1 - x[t] + x[j]) / C."""
    loss, is_target = _multilabel(wide(x), target)
    loss = loss.reshape(x.shape[:-1]) if reduction == NONE else loss
    return _reduced(loss, reduction), is_target.reshape(target.shape)


def _multilabel(x, target):
    rows = jnp.atleast_2d(x)
    listed, valid = _listed_targets(target)
    n, c = rows.shape
    row = jnp.arange(n, dtype=jnp.int32)[:, None]
    is_target = jnp.zeros((n, c), rows.dtype).at[row, jnp.where(valid, listed, c)].set(1, mode="drop")
    z = 1 - jnp.take_along_axis(rows, listed, 1)[:, :, None] + rows[:, None, :]  # [N, target, class]
    z = jnp.where((z > 0) & valid[:, :, None] & (is_target == 0)[:, None, :], z, 0)
    return z.sum((1, 2)) / c, is_target


@op(aten.multilabel_margin_loss_backward, kind="reduce")
def multilabel_margin_loss_backward(grad, x, target, reduction, is_target):
    x = wide(x)

    def loss(x):
        rows = _multilabel(x, target)[0]
        return _reduced(rows.reshape(x.shape[:-1]) if reduction == NONE else rows, reduction)

    return jax.vjp(loss, x)[1](wide(grad))[0]
