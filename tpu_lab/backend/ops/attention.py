"""Attention that reaches the device whole: safe and masked softmax, and the inference paths of nn.MultiheadAttention
and nn.TransformerEncoderLayer. `scaled_dot_product_attention` itself arrives as its products and softmax.

A mask is True where a score does not count. `mask_type`: 0 for [length, length], 1 for padding [batch, length],
2 for a full mask of the scores' shape.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from tpu_lab.backend import precision
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.ops.norm import layer_norm
from tpu_lab.backend.ops.softmax import softmax
from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten._safe_softmax, kind="reduce", promote="result")
def safe_softmax(x, dim, dtype=None):
    """softmax in which a row of only -inf gives zeros, not NaN."""
    if dtype == torch.float64:  # else no wider than x, or rounded at the end
        x = x.astype(jnp.float64)
    return jnp.where((x == -jnp.inf).all(dim, keepdims=True), 0, softmax(x, dim, False))


@op(aten._masked_softmax, kind="reduce")
def masked_softmax(x, mask, dim=None, mask_type=None):
    """x: [batch, heads, length, length] for mask types 0 and 1, any shape for 2."""
    if mask.shape != x.shape:
        mask = mask[:, None, None, :] if mask_type == 1 else mask
    scores = jnp.where(mask.astype(bool), -jnp.inf, wide(x))
    return softmax(scores, x.ndim - 1 if dim is None else dim, False)


@op(aten._masked_softmax_backward, kind="reduce")
def masked_softmax_backward(grad, output, mask, dim=None):
    grad, output = wide(grad), wide(output)
    dim = grad.ndim - 1 if dim is None else dim
    inner = output * (grad - (grad * output).sum(dim, keepdims=True))
    return jnp.where(jnp.broadcast_to(mask.astype(bool), grad.shape), 0, inner)


def _affine(x, weight, bias):
    return precision.einsum("...i,oi->...o", x, weight) + bias


@op(aten._transform_bias_rescale_qkv, kind="movement")
def split_heads(qkv, qkv_bias, num_heads):
    """[batch, length, 3 * embed] -> q / sqrt(head size), k, v, each [batch, heads, length, head size]."""
    batch, length, _ = qkv.shape
    q, k, v = jnp.moveaxis((wide(qkv) + wide(qkv_bias)).reshape(batch, length, 3, num_heads, -1), (2, 3), (0, 2))
    return q / math.sqrt(q.shape[-1]), k, v


@op(aten._native_multi_head_attention, kind="matmul")
def multi_head_attention(
    query,
    key,
    value,
    embed_dim,
    num_head,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    mask=None,
    need_weights=True,
    average_attn_weights=True,
    mask_type=None,
):
    """query, key, value: [batch, length, embed] -> (attention, its weights or None)."""

    def heads(x, part):
        rows = slice(part * embed_dim, (part + 1) * embed_dim)
        y = _affine(wide(x), wide(qkv_weight)[rows], wide(qkv_bias)[rows])
        return y.reshape(*y.shape[:2], num_head, -1).swapaxes(1, 2)

    q, k, v = heads(query, 0), heads(key, 1), heads(value, 2)
    scores = precision.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    weights = softmax(scores, 3, False) if mask is None else masked_softmax(scores, mask, 3, mask_type)
    mixed = precision.einsum("bhqk,bhkd->bqhd", weights, v)
    out = _affine(mixed.reshape(*mixed.shape[:2], embed_dim), wide(proj_weight), wide(proj_bias))
    if not need_weights:
        return out, None
    return out, weights.mean(1) if average_attn_weights else weights


@op(aten._transformer_encoder_layer_fwd, kind="matmul")
def transformer_encoder_layer(
    src,
    embed_dim,
    num_heads,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    use_gelu,
    norm_first,
    eps,
    norm_weight_1,
    norm_bias_1,
    norm_weight_2,
    norm_bias_2,
    ffn_weight_1,
    ffn_bias_1,
    ffn_weight_2,
    ffn_bias_2,
    mask=None,
    mask_type=None,
):
    def norm(x, weight, bias):
        return layer_norm(x, [embed_dim], weight, bias, eps)[0]

    src = wide(src)
    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    x = src + multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]
    x = x if norm_first else norm(x, norm_weight_1, norm_bias_1)
    y = norm(x, norm_weight_2, norm_bias_2) if norm_first else x
    y = _affine(y, wide(ffn_weight_1), wide(ffn_bias_1))
    y = jax.nn.gelu(y, approximate=False) if use_gelu else jax.nn.relu(y)
    x = x + _affine(y, wide(ffn_weight_2), wide(ffn_bias_2))
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)
