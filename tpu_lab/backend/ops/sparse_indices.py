"""Dense ops that serve sparse formats and masks: index conversions, positions with a known count, and a hash."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.ops.reduce import axes
from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten._convert_indices_from_coo_to_csr, kind="movement")
def coo_to_csr(rows, size, *, out_int32=False):
    """[size + 1] how many of the sorted row numbers come before each row."""
    return jnp.searchsorted(rows, jnp.arange(size + 1), side="left")


@op(aten._convert_indices_from_csr_to_coo, kind="movement")
def csr_to_coo(crow, col, *, out_int32=False, transpose=False):
    """[2 + batch dimensions, number]: batch numbers, then row and column of each element."""
    number = jnp.arange(col.shape[-1])
    rows = jax.vmap(lambda c: jnp.searchsorted(c, number, side="right") - 1)(crow.reshape(-1, crow.shape[-1]))
    batch = [lax.broadcasted_iota(jnp.int64, col.shape, a).reshape(-1) for a in range(col.ndim - 1)]
    pair = [rows.reshape(-1), col.reshape(-1)]
    return jnp.stack([*batch, *(pair[::-1] if transpose else pair)])


@op(aten.nonzero_static, kind="movement")
def nonzero_static(x, *, size, fill_value=-1):
    """[size, dimensions]: the first positions that are not 0, filled up."""
    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    found = jnp.nonzero(x.reshape(-1), size=size, fill_value=x.size)[0]
    at = jnp.stack(jnp.unravel_index(jnp.minimum(found, max(x.size - 1, 0)), x.shape), 1) if x.size else 0
    return jnp.where((found < x.size)[:, None], at, fill_value).astype(jnp.int64) * jnp.ones((1, x.ndim), jnp.int64)


@op(aten.hash_tensor, kind="reduce")
def hash_tensor(x, dim=(), *, keepdim=False, mode=0):
    """The exclusive or of all elements' 64 bits: floats as float64, integers as int64."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x.astype(jnp.float64), jnp.uint64)
    else:
        bits = x.astype(jnp.int64).astype(jnp.uint64)
    if x.ndim == 0:
        return bits
    over = axes(dim)
    over = tuple(range(x.ndim)) if over is None else (over,) if isinstance(over, int) else over
    over = tuple(a % x.ndim for a in over)
    out = lax.reduce(bits, jnp.uint64(0), lax.bitwise_xor, over)
    return jnp.expand_dims(out, over) if keepdim else out
