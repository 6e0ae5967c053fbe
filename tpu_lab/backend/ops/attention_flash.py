"""The gradient of attention from its output and the logarithm of its sums, as CPU's fused kernel keeps them."""

import math

import jax.numpy as jnp
import torch

from tpu_lab.backend import precision
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten._scaled_dot_product_flash_attention_for_cpu_backward, kind="matmul")
def flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    """query: [batch, heads, length, size], logsumexp: [batch, heads, length] -> gradients of query, key and value.

    With weights P = exp(scores - logsumexp) the scores' gradient is P (dP - sum(grad_out * out)).
    """
    g, q, k, v, o = map(wide, (grad_out, query, key, value, out))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = precision.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if attn_mask is not None:
        scores = scores + wide(attn_mask)
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    weights = jnp.where(scores == -jnp.inf, 0, jnp.exp(scores - logsumexp[..., None].astype(scores.dtype)))
    inner = precision.einsum("bhqd,bhkd->bhqk", g, v) - (g * o).sum(-1, keepdims=True)
    inner = weights * inner * scale
    return (
        precision.einsum("bhqk,bhkd->bhqd", inner, k),
        precision.einsum("bhqk,bhqd->bhkd", inner, q),
        precision.einsum("bhqk,bhqd->bhkd", weights, g),
    )
