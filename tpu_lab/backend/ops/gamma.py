"""The regularised incomplete gamma functions P(a, x) and Q(a, x) = 1 - P(a, x), and Hurwitz's zeta function."""

import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import special

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


STEPS_LEFT = 1 << 12  # further to the left only the poles tell


@op(aten.special_zeta, promote="float")
def zeta(s, q):
    """The sum of (q + k)^-s. jax's series holds to the right of zero only: left of it the first terms are added one by one."""
    s, q = jnp.broadcast_arrays(jnp.asarray(s, jnp.asarray(q).dtype), q)

    def left(q):
        return (q <= 0) & (q > -STEPS_LEFT)

    def step(state):
        q, total = state
        return jnp.where(left(q), q + 1, q), total + jnp.where(left(q), q**-s, 0)

    right, total = lax.while_loop(lambda state: jnp.any(left(state[0])), step, (q, jnp.zeros_like(q)))
    value = special.zeta(s, right) + total
    value = jnp.where((q <= 0) & (s != jnp.floor(s)), jnp.nan, value)
    value = jnp.where((q <= 0) & (q == jnp.floor(q)), jnp.inf, value)
    return jnp.where(s == 1, jnp.inf, jnp.where(s < 1, jnp.nan, value))
