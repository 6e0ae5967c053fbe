"""Padding: constant, reflected, replicated; and the gradients. `padding` lists (before, after) from the last dimension on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _pairs(padding, ndim):
    """(before, after) for each dimension, in order."""
    pairs = [(padding[i], padding[i + 1]) for i in range(0, len(padding), 2)][::-1]
    return [(0, 0)] * (ndim - len(pairs)) + pairs


@op(aten.constant_pad_nd, kind="movement")
def constant_pad_nd(x, pad, value=0):
    """Negative pads cut."""
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), [(a, b, 0) for a, b in _pairs(pad, x.ndim)])


def _bordered(x, padding, mode):
    """Mirrored or repeated borders, one dimension after the other; negative pads cut afterwards: a border may repeat what is cut."""
    for axis, (before, after) in enumerate(_pairs(padding, x.ndim)):
        if before > 0 or after > 0:
            widths = [(max(before, 0), max(after, 0)) if a == axis else (0, 0) for a in range(x.ndim)]
            x = jnp.pad(x, widths, mode=mode)
        if before < 0 or after < 0:
            x = lax.slice_in_dim(x, max(0, -before), x.shape[axis] - max(0, -after), axis=axis)
    return x


@op(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d, kind="movement")
def reflection_pad(x, padding):
    return _bordered(x, padding, "reflect")


@op(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d, kind="movement")
def replication_pad(x, padding):
    return _bordered(x, padding, "edge")


@op(aten.reflection_pad1d_backward, aten.reflection_pad2d_backward, aten.reflection_pad3d_backward, kind="movement")
def reflection_pad_backward(grad, x, padding):
    return jax.vjp(lambda x: _bordered(x, padding, "reflect"), wide(x))[1](wide(grad))[0]


@op(aten.replication_pad1d_backward, aten.replication_pad2d_backward, aten.replication_pad3d_backward, kind="movement")
def replication_pad_backward(grad, x, padding):
    return jax.vjp(lambda x: _bordered(x, padding, "edge"), wide(x))[1](wide(grad))[0]
