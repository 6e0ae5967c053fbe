"""Least squares, and Householder reflectors as LAPACK stores them (`geqrf`, `ormqr`)."""

import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend import precision
from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten.geqrf, kind="matmul")
def geqrf(x):
    """(R on and over the diagonal with the reflectors under it, their scales)."""
    raw, tau = jnp.linalg.qr(x, mode="raw")
    return jnp.swapaxes(raw, -1, -2), tau


@op(aten.ormqr, kind="matmul")
def ormqr(reflectors, tau, other, left=True, transpose=False):
    """Q @ other, or other @ Q, for the full square Q of the reflectors."""
    return lax.linalg.ormqr(reflectors, tau, other, left=left, transpose=transpose)


@op(aten.linalg_lstsq.default, kind="matmul")
def lstsq(a, b, rcond=None, *, driver=None):
    """(solution, residuals, rank, singular values) by the singular value decomposition, whatever the driver.

    The driver (None means gelsy) says what else is asked: residuals (if a has more rows than columns) for all but gelsy,
    the rank for all but gels, singular values for gelsd and gelss. For the last two PyTorch leaves residuals out where
    the rank is not full, which no shape can know before the values.
    """
    m, n = a.shape[-2:]
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    b = b[..., None] if vector else b
    u, s, vh = jnp.linalg.svd(a, full_matrices=False)
    limit = jnp.finfo(s.dtype).eps * max(m, n) if rcond is None else rcond
    kept = s > limit * s.max(-1, keepdims=True, initial=0)
    kept = kept | (driver == "gels") & (s > 0)
    parts = precision.matmul(jnp.conj(jnp.swapaxes(u, -1, -2)), b)
    parts = jnp.where(kept[..., None], parts / jnp.where(kept, s, 1)[..., None].astype(parts.dtype), 0)
    x = precision.matmul(jnp.conj(jnp.swapaxes(vh, -1, -2)), parts)
    empty = jnp.zeros((0,), s.dtype)
    residuals = (jnp.abs(precision.matmul(a, x) - b) ** 2).sum(-2) if m > n and driver in ("gels", "gelsd", "gelss") else empty
    rank = jnp.zeros((0,), jnp.int64) if driver == "gels" else kept.sum(-1).astype(jnp.int64)
    return (x[..., 0] if vector else x), residuals, rank, s if driver in ("gelsd", "gelss") else empty
