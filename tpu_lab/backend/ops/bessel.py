"""Bessel's functions of the first and second kind, modified and not, and Airy's: all from one integral.

K_nu(z) = exp(-z) * integral over t > 0 of exp(-z (cosh t - 1)) cosh(nu t). With v = sqrt(2 z) sinh(t / 2) it becomes
the integral of exp(-v^2) 2 cosh(nu t) / sqrt(2 z + v^2), analytic in a strip around the real line, for which the
trapezoidal rule is exact to rounding with few points (Trefethen and Weideman 2014). It holds for complex z, too:
J and Y are the real and imaginary part of K on the imaginary axis (DLMF 10.27.8), Airy's Ai is K of order 1/3
(DLMF 9.6). Near zero their power series take over (DLMF 10.8, 10.31, 9.4).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.scipy import special

from tpu_lab.backend.registry import op

aten = torch.ops.aten
SMALL = 2.0  # the series below it, the integral above
STEP = 0.2
NODES = STEP * np.arange(32)
TERMS = 24
HARMONIC = np.cumsum([0, *(1 / np.arange(1, TERMS + 2))])


def _scaled_k(order, z):
    """exp(z) K_order(z) for |z| >= SMALL in the right half plane. A loop: written out it compiles for seconds."""
    nodes = jnp.asarray(NODES, z.real.dtype)
    weights = (2 * STEP * jnp.exp(-nodes * nodes)).at[0].multiply(0.5)

    def add(i, total):
        angle = 2 * jnp.arcsinh(nodes[i] / jnp.sqrt(2 * z))
        return total + weights[i] * jnp.cosh(order * angle) / jnp.sqrt(2 * z + nodes[i] ** 2)

    return lax.fori_loop(0, len(NODES), add, jnp.zeros_like(z))


def _series(x, order, sign):
    """(I or J of an integer order by the power series, the sum with harmonic numbers that belongs to K or Y)."""
    quarter, harmonic = sign * x * x / 4, jnp.asarray(HARMONIC, x.dtype)

    def add(k, state):
        term, value, other = state
        value, other = value + term, other + term * (harmonic[k] + harmonic[k + order])
        return term * quarter / ((k + 1) * (k + 1 + order)), value, other

    _, value, other = lax.fori_loop(0, TERMS, add, (jnp.ones_like(x), jnp.zeros_like(x), jnp.zeros_like(x)))
    scale = (x / 2) ** order
    return value * scale, other * scale


def _near_zero(x):
    """x where the series serves it; a harmless 1 elsewhere."""
    near = (x > 0) & (x <= SMALL)
    return near, jnp.where(near, x, 1)


def _away(x):
    return jnp.where(x > SMALL, x, SMALL)


def _modified_k(order, scaled):
    def k(x):
        near, small = _near_zero(x)
        value, other = _series(small, order, 1)
        log = jnp.log(small / 2) + np.euler_gamma
        series = other / 2 - log * value if order == 0 else 1 / small + log * value - other / 2
        far = _away(x)
        series = series * jnp.exp(small) if scaled else series
        integral = _scaled_k(order, far) * (1 if scaled else jnp.exp(-far))
        integral = jnp.where(far == jnp.inf, 0, integral)
        out = jnp.where(near, series, integral)
        return jnp.where(x == 0, jnp.inf, jnp.where(x < 0, jnp.nan, jnp.where(jnp.isnan(x), x, out)))

    return k


def _hankel(order, x):
    """J + i Y for x >= SMALL: 2 / (pi i) exp(-i pi order / 2) K(-i x)."""
    z = lax.complex(jnp.zeros_like(x), -x)
    turn = -1j * (-1j) ** order * 2 / math.pi
    return _scaled_k(order, z) * lax.complex(jnp.cos(x), jnp.sin(x)) * turn


def _first_kind(order):
    def j(x):
        size = abs(x)
        near = size <= SMALL
        value, _ = _series(jnp.where(near, size, 1), order, -1)
        out = jnp.where(near, value, jnp.real(_hankel(order, _away(size))))
        out = jnp.where(jnp.isnan(x) | jnp.isinf(x), jnp.nan, out)
        return out * jnp.sign(x) if order else out

    return j


def _second_kind(order):
    def y(x):
        near, small = _near_zero(x)
        value, other = _series(small, order, -1)
        log = 2 / math.pi * (jnp.log(small / 2) + np.euler_gamma)
        series = log * value - other / math.pi - (2 / (math.pi * small) if order else 0)
        out = jnp.where(near, series, jnp.imag(_hankel(order, _away(x))))
        out = jnp.where(x == jnp.inf, jnp.nan, out)
        return jnp.where(x == 0, -jnp.inf, jnp.where(x < 0, jnp.nan, jnp.where(jnp.isnan(x), x, out)))

    return y


for _order in (0, 1):
    op(getattr(aten, f"special_bessel_j{_order}"), promote="float")(_first_kind(_order))
    op(getattr(aten, f"special_bessel_y{_order}"), promote="float")(_second_kind(_order))
    op(getattr(aten, f"special_modified_bessel_k{_order}"), promote="float")(_modified_k(_order, False))
    op(getattr(aten, f"special_scaled_modified_bessel_k{_order}"), promote="float")(_modified_k(_order, True))
op(aten.special_modified_bessel_i0, promote="float")(special.i0)
op(aten.special_modified_bessel_i1, promote="float")(special.i1)


@op(aten.special_airy_ai, promote="float")
def airy_ai(x):
    """sqrt(x / 3) / pi * K_1/3(2/3 x^1.5); left of zero two of it, at |x| exp(+-i pi / 3)."""
    near = abs(x) <= SMALL + 0.1  # from there on 2/3 x^1.5 is over SMALL
    small = jnp.where(near, x, 0)
    cube, one = small**3, jnp.ones_like(x)

    def add(k, state):
        f, g, total_f, total_g = state
        f, g = f * cube / ((3 * k - 1) * 3 * k), g * cube / (3 * k * (3 * k + 1))
        return f, g, total_f + f, total_g + g

    _, _, total_f, total_g = lax.fori_loop(1, TERMS, add, (one, small, one, small))
    series = total_f / (3 ** (2 / 3) * math.gamma(2 / 3)) - total_g / (3 ** (1 / 3) * math.gamma(1 / 3))
    size = jnp.where(near | ~jnp.isfinite(x), SMALL + 1, abs(x))
    zeta = size**1.5 * (2 / 3)
    right = jnp.sqrt(size / 3) / math.pi * jnp.exp(-zeta) * _scaled_k(1 / 3, zeta)
    turned = _scaled_k(1 / 3, lax.complex(jnp.zeros_like(zeta), zeta)) * lax.complex(jnp.cos(zeta), -jnp.sin(zeta))
    left = -2 * jnp.sqrt(size / 3) / math.pi * jnp.imag(turned)
    out = jnp.where(near, series, jnp.where(x > 0, right, left))
    return jnp.where(jnp.isfinite(x), out, jnp.nan)
