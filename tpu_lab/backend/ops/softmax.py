"""softmax and log_softmax with their gradients; half dtypes are computed in float32."""

from __future__ import annotations

import jax.numpy as jnp
import torch

from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten._softmax, kind="reduce", promote="result")
def softmax(x, dim, half_to_float):
    if x.ndim == 0:
        return jnp.where(jnp.isfinite(x), 1.0, jnp.nan)
    e = jnp.exp(x - _max(x, dim))
    return e / e.sum(dim, keepdims=True)


@op(aten._log_softmax, kind="reduce", promote="result")
def log_softmax(x, dim, half_to_float):
    if x.ndim == 0:
        return jnp.where(jnp.isfinite(x), 0.0, jnp.nan)
    x = x - _max(x, dim)
    return x - jnp.log(jnp.exp(x).sum(dim, keepdims=True))


def _max(x, dim):
    return x.max(dim, keepdims=True, initial=-jnp.inf)


@op(aten._softmax_backward_data, kind="reduce", promote="result")
def softmax_backward(grad, output, dim, input_dtype):
    axis = dim if grad.ndim else None
    return output * (grad - (grad * output).sum(axis, keepdims=True))


@op(aten._log_softmax_backward_data, kind="reduce", promote="result")
def log_softmax_backward(grad, output, dim, input_dtype):
    axis = dim if grad.ndim else None
    return grad - jnp.exp(output) * grad.sum(axis, keepdims=True)
