"""The fused LSTM and GRU cells that PyTorch chooses for devices like ours, and their gradients.

Gates come as [batch, gates * hidden] products, biases apart. The workspace keeps the activated gates for the backward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _plus(gates, bias):
    return wide(gates) if bias is None else wide(gates) + wide(bias)


@op(aten._thnn_fused_lstm_cell)
def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    """(h, c, workspace [batch, 4 * hidden]: the activated i, f, g, o)."""
    i, f, g, o = jnp.split(_plus(input_gates, input_bias) + _plus(hidden_gates, hidden_bias), 4, 1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    c = f * wide(cx) + i * g
    results = o * jnp.tanh(c), c, jnp.concatenate([i, f, g, o], 1)
    return tuple(r.astype(cx.dtype) for r in results)


@op(aten._thnn_fused_lstm_cell_backward_impl)
def lstm_cell_backward(grad_h, grad_c, cx, cy, workspace, has_bias):
    """(grad of the gates, of cx, of the bias or None)."""
    i, f, g, o = jnp.split(wide(workspace), 4, 1)
    t = jnp.tanh(wide(cy))
    grad_h = jnp.zeros_like(t) if grad_h is None else wide(grad_h)
    grad_c = (0 if grad_c is None else wide(grad_c)) + grad_h * o * (1 - t * t)
    gates = jnp.concatenate(
        [
            grad_c * g * i * (1 - i),
            grad_c * wide(cx) * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_h * t * o * (1 - o),
        ],
        1,
    )
    bias = gates.sum(0).astype(cx.dtype) if has_bias else None
    return gates.astype(cx.dtype), (grad_c * f).astype(cx.dtype), bias


@op(aten._thnn_fused_gru_cell)
def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    """(h, workspace [batch, 5 * hidden]: reset, update, new, hx, and the hidden part of new)."""
    ir, iz, in_ = jnp.split(_plus(input_gates, input_bias), 3, 1)
    hr, hz, hn = jnp.split(_plus(hidden_gates, hidden_bias), 3, 1)
    r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    n, h = jnp.tanh(in_ + r * hn), wide(hx)
    return (n + z * (h - n)).astype(hx.dtype), jnp.concatenate([r, z, n, h, hn], 1).astype(hx.dtype)


@op(aten._thnn_fused_gru_cell_backward)
def gru_cell_backward(grad, workspace, has_bias):
    """(grad of the input gates, of the hidden gates, of hx, of the two biases or None)."""
    r, z, n, h, hn = jnp.split(wide(workspace), 5, 1)
    g = wide(grad)
    new = g * (1 - z) * (1 - n * n)
    reset, update = new * hn * r * (1 - r), g * (h - n) * z * (1 - z)
    inputs, hidden = jnp.concatenate([reset, update, new], 1), jnp.concatenate([reset, update, new * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return tuple(None if v is None else v.astype(grad.dtype) for v in (inputs, hidden, g * z, *biases))
