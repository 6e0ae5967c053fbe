"""Random numbers whose distribution is given by tensors: gamma, Dirichlet, Poisson, binomial; and noisy rectifiers.

Where PyTorch differentiates a sample by its parameter, implicitly through the distribution function F
(Figurnov et al. 2018: d sample / d parameter = - dF / d parameter / density), so do these.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax, random
from jax.scipy import special

from tpu_lab.backend.bounds import never
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
RANDOM = {"kind": "random", "rng": True}
MOST = 20_000  # terms of a series


@op(aten._standard_gamma, **RANDOM)
def standard_gamma(alpha, *, key):
    return random.gamma(key, wide(alpha)).astype(alpha.dtype)


@op(aten._standard_gamma_grad, promote="result")
def standard_gamma_grad(alpha, sample):
    return lax.random_gamma_grad(alpha, sample)


@op(aten._sample_dirichlet, **RANDOM)
def sample_dirichlet(alpha, *, key):
    return random.dirichlet(key, wide(alpha)).astype(alpha.dtype)  # PyTorch has no meta kernel that says so


@op(aten._dirichlet_grad, promote="result")
def dirichlet_grad(x, alpha, total):
    """dx / dalpha / (1 - x) of a sample x of Beta(alpha, total - alpha).

    The series of the incomplete beta function has positive terms only (DLMF 8.17.8); it is taken on the side where it
    is short, and its derivative term by term.
    """
    beta = total - alpha
    left = x <= (alpha + 1) / (total + 2)
    a, y = jnp.where(left, alpha, beta), jnp.where(left, x, 1 - x)
    slope = jnp.log(x) - special.digamma(alpha) + special.digamma(total) - jnp.where(left, 1 / alpha, 0)

    def more(state):
        k, _, _, term, _ = state
        return (k < MOST) & jnp.any(term * (total + k) > 1e-17)

    def step(state):
        k, sums, slopes, term, log_slope = state
        log_slope = log_slope + 1 / (total + k) - jnp.where(left, 1 / (alpha + 1 + k), 0)
        term = term * (total + k) / (a + 1 + k) * y
        return k + 1, sums + term, slopes + term * log_slope, term, log_slope

    zero, one = jnp.zeros_like(x), jnp.ones_like(x)
    _, sums, slopes, _, _ = lax.while_loop(more, step, (jnp.zeros((), x.dtype), one, zero, one, zero))
    return jnp.where(left, -x / alpha, x / beta) * (sums * slope + slopes)


def _rate(rate):
    return [never(~(rate >= 0), "invalid Poisson rate, expected rate to be non-negative")]


@op(aten.poisson, bounds=_rate, **RANDOM)
def poisson(rate, *, key):
    return random.poisson(key, wide(rate))


@op(aten.binomial, **RANDOM)
def binomial(count, prob, *, key):
    return random.binomial(key, wide(count), wide(prob), dtype=wide(count).dtype).astype(count.dtype)


# Randomized leaky rectifiers: `noise` is written with the slopes that were drawn


def _rrelu(x, noise, lower, upper, training, key):
    if not training:
        return jnp.where(x > 0, x, x * ((lower + upper) / 2).astype(x.dtype)), noise
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    drawn = random.uniform(key, x.shape, dtype) * (upper - lower).astype(dtype) + lower.astype(dtype)
    noise = jnp.where(x <= 0, drawn, 1).astype(noise.dtype)
    return x * noise, noise


@op(aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default, **RANDOM)
def rrelu(x, noise, lower=1 / 8, upper=1 / 3, training=False, *, key):
    """(y, noise): for the plain form the result and what is written, for `rrelu_with_noise_` both are written."""
    return _rrelu(x, noise, jnp.asarray(lower), jnp.asarray(upper), training, key)


@op(aten.rrelu_with_noise_functional.default, **RANDOM)
def rrelu_functional(x, noise, lower=1 / 8, upper=1 / 3, training=False, *, key):
    return rrelu(x, noise, lower, upper, training, key=key)


@op(aten.rrelu_with_noise.out, **RANDOM)
def rrelu_out(x, noise, lower=1 / 8, upper=1 / 3, training=False, *, key):
    """In the order in which they are written: noise, then `out`."""
    return rrelu(x, noise, lower, upper, training, key=key)[::-1]
