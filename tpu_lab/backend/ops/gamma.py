"""The regularised incomplete gamma functions P(a, x) and Q(a, x) = 1 - P(a, x)."""

import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _at_the_ends(a, x, value, low, high):
    """PyTorch's limits, first come first served: a = 0, x = 0, a infinite, x infinite. low, high: P or Q at x = 0, at infinity."""
    value = jnp.where(jnp.isinf(x), high, value)
    value = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, low), value)
    value = jnp.where(x == 0, low, value)
    value = jnp.where(a == 0, jnp.where(x > 0, high, jnp.nan), value)
    return jnp.where((a < 0) | (x < 0), jnp.nan, value)


@op(aten.igamma, promote="result")
def igamma(a, x):
    a, x = jnp.broadcast_arrays(a, x)
    return _at_the_ends(a, x, lax.igamma(a, x), 0.0, 1.0)


@op(aten.igammac, promote="result")
def igammac(a, x):
    a, x = jnp.broadcast_arrays(a, x)
    return _at_the_ends(a, x, lax.igammac(a, x), 1.0, 0.0)
