"""Orthogonal polynomials of degree n: Chebyshev's four kinds (also shifted to [0, 1]), Hermite's two, Laguerre's, Legendre's.

Each element has a degree of its own: the three-term recurrence p(k + 1) = f(k, x, p(k), p(k - 1)) runs up to the highest
degree, and an element keeps its value when it has reached its own. Inside (-1, 1) Chebyshev's polynomials of a high
degree are cosines. Formulas: Abramowitz and Stegun, chapter 22.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.registry import op

aten = torch.ops.aten
HIGHEST = {jnp.dtype("float32"): 128, jnp.dtype("float64"): 512}  # Hermite's above that are NaN, PyTorch says


def _op(target):
    """Register fn(x, n) over two arrays of one shape and dtype: PyTorch also takes a number for one of them."""

    def register(fn):
        @op(target, promote="float")
        @functools.wraps(fn)
        def lowering(x, n):
            dtype = x.dtype if isinstance(x, jnp.ndarray) else n.dtype
            return fn(*jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(n, dtype)))

        return fn

    return register


def _recurrence(x, n, first, step):
    """p(n) from p(0) = 1 and p(1) = first; step(k, x, p(k), p(k - 1)) -> p(k + 1); 0 for a negative degree."""

    def more(state):
        k, p, _ = state
        return jnp.any((k < n) & ~jnp.isnan(p))

    def advance(state):
        k, p, before = state
        on = k < n
        return k + 1, jnp.where(on, step(k.astype(x.dtype), x, p, before), p), jnp.where(on, p, before)

    p = lax.while_loop(more, advance, (jnp.int64(1), first, jnp.ones_like(x)))[1]
    return jnp.where(n < 0, 0, jnp.where(n == 0, 1, p))


def _chebyshev(x, n, first, inside, at_end, highest):
    """first: p(1). inside(angle, n): the closed form at x = cos(angle), for degrees over `highest`. at_end(n): p(n) at 1."""
    closed = (n > highest) & (abs(x) < 1)
    p = _recurrence(x, jnp.where(closed | (abs(x) == 1), 0, n), first(x), lambda k, x, p, before: 2 * x * p - before)
    p = jnp.where(closed, inside(jnp.arccos(jnp.where(closed, x, 0)), n.astype(x.dtype)), p)
    sign = jnp.where(n % 2 == 0, 1, -1)
    p = jnp.where(x == 1, at_end(n, 1), jnp.where(x == -1, sign * at_end(n, -1), p))
    return jnp.where(n < 0, 0, jnp.where(n == 0, 1, p))


def _ratio(numerator, denominator):
    return numerator / jnp.where(denominator == 0, 1, denominator)


CHEBYSHEV = {  # kind: p(1), the closed form, the size of p(n) at 1 and -1
    "t": (lambda x: x, lambda a, n: jnp.cos(n * a), lambda n, end: 1),
    "u": (lambda x: 2 * x, lambda a, n: _ratio(jnp.sin((n + 1) * a), jnp.sin(a)), lambda n, end: n + 1),
    "v": (
        lambda x: 2 * x - 1,
        lambda a, n: _ratio(jnp.cos((n + 0.5) * a), jnp.cos(a / 2)),
        lambda n, end: 1 if end == 1 else 2 * n + 1,
    ),
    "w": (
        lambda x: 2 * x + 1,
        lambda a, n: _ratio(jnp.sin((n + 0.5) * a), jnp.sin(a / 2)),
        lambda n, end: 2 * n + 1 if end == 1 else 1,
    ),
}


def _of_kind(kind, shifted):
    first, inside, at_end = CHEBYSHEV[kind]
    highest = 4 if (kind, shifted) == ("w", True) else 6 if shifted or kind == "t" else 8

    def polynomial(x, n):
        return _chebyshev(2 * x - 1 if shifted else x, n.astype(jnp.int64), first, inside, at_end, highest)

    return polynomial


for _kind in CHEBYSHEV:
    _op(getattr(aten, f"special_chebyshev_polynomial_{_kind}"))(_of_kind(_kind, False))
    _op(getattr(aten, f"special_shifted_chebyshev_polynomial_{_kind}"))(_of_kind(_kind, True))


def _hermite(x, n, scale):
    degree = n.astype(jnp.int64)
    highest = HIGHEST[x.dtype]
    p = _recurrence(x, jnp.minimum(degree, highest), scale * x, lambda k, x, p, before: scale * (x * p - k * before))
    return jnp.where(degree > highest, jnp.nan, p)


@_op(aten.special_hermite_polynomial_h)
def hermite_h(x, n):
    """The physicists': 2 x p - 2 k p'."""
    return _hermite(x, n, 2)


@_op(aten.special_hermite_polynomial_he)
def hermite_he(x, n):
    """The probabilists': x p - k p'."""
    return _hermite(x, n, 1)


@_op(aten.special_laguerre_polynomial_l)
def laguerre(x, n):
    step = lambda k, x, p, before: ((2 * k + (1 - x)) * p - k * before) / (k + 1)  # noqa: E731
    degree = n.astype(jnp.int64)
    return _recurrence(x, jnp.where(x == 0, jnp.minimum(degree, 0), degree), 1 - x, step)


@_op(aten.special_legendre_polynomial_p)
def legendre(x, n):
    step = lambda k, x, p, before: ((2 * k + 1) * x * p - k * before) / (k + 1)  # noqa: E731
    degree, end = n.astype(jnp.int64), abs(x) == 1
    p = _recurrence(x, jnp.where(end, 0, degree), x, step)
    p = jnp.where(end, jnp.where((x > 0) | (degree % 2 == 0), 1, -1), p)
    return jnp.where(degree < 0, 0, p)
