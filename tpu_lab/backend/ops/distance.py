"""Distances between the rows of two matrices, or between all pairs of rows of one; p-norms, and their gradients."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch

from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _norm(difference, p):
    """p-norm along the last axis; p = 0 counts the elements that differ."""
    d = jnp.abs(difference)
    if p == 0:
        return (d != 0).sum(-1).astype(d.dtype)
    if math.isinf(p):
        return d.max(-1, initial=0)
    if p == 2:
        return jnp.sqrt(jnp.square(d).sum(-1))
    return d.sum(-1) if p == 1 else (d**p).sum(-1) ** (1 / p)


def _slope(difference, distance, p):
    """d distance / d difference, [..., width]; 0 where the rows are equal."""
    d, distance = jnp.abs(difference), distance[..., None]
    if p == 0:
        return jnp.zeros_like(difference)
    if p == 1:
        return jnp.sign(difference)
    if math.isinf(p):
        return jnp.where(d == distance, jnp.sign(difference), 0)
    safe = jnp.where(distance == 0, 1, distance)
    if p == 2:
        return jnp.where(distance == 0, 0, difference / safe)
    share = jnp.where(d == 0, 0, jnp.where(d == 0, 1, d) ** (p - 1))
    return jnp.where(distance == 0, 0, jnp.sign(difference) * share / safe ** (p - 1))


@op(aten._cdist_forward, kind="reduce", promote="result")
def cdist(x1, x2, p, compute_mode):
    """[..., n, width], [..., m, width] -> [..., n, m]; always by differences, which is the exact way."""
    return _norm(x1[..., :, None, :] - x2[..., None, :, :], p)


@op(aten._cdist_backward, kind="reduce", promote="result")
def cdist_backward(grad, x1, x2, p, cdist):
    """The gradient of x1."""
    return (grad[..., None] * _slope(x1[..., :, None, :] - x2[..., None, :, :], cdist, p)).sum(-2)


@op(aten._pdist_forward, kind="reduce", promote="result")
def pdist(x, p=2.0):
    i, j = np.triu_indices(x.shape[0], 1)
    return _norm(x[i] - x[j], p)


@op(aten._pdist_backward, kind="reduce", promote="result")
def pdist_backward(grad, x, p, pdist):
    i, j = np.triu_indices(x.shape[0], 1)
    part = grad[:, None] * _slope(x[i] - x[j], pdist, p)
    return jnp.zeros_like(x).at[i].add(part).at[j].add(-part)
