"""A = L D L^T of a symmetric or Hermitian matrix that need not be definite, with Bunch and Kaufman's pivots, and its solver.

Step by step as in LAPACK (`sytf2` and `hetf2` of the lower triangle): one column, or two where only a 2x2 block of D is
safe, so the loop's length depends on the values and its shapes do not. A pivot counts from 1; those of a 2x2 block are
negative. J. Bunch, L. Kaufman, "Some stable methods for calculating inertia and solving symmetric linear systems",
Mathematics of Computation 31, 1977.
"""

import functools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend import precision
from tpu_lab.backend.registry import op

aten = torch.ops.aten
ALPHA = (1 + 17**0.5) / 8  # bounds the growth of the elements


def _size(x):
    """LAPACK's `cabs1`."""
    return abs(x.real) + abs(x.imag) if jnp.iscomplexobj(x) else abs(x)


def _factor(a, flip):
    """(LD, pivots, info) of one matrix. flip: conj for a Hermitian matrix, else nothing."""
    n = a.shape[-1]
    at = jnp.arange(n, dtype=jnp.int32)
    low = jnp.tril(a, -1)
    diagonal = jnp.diag(jnp.diagonal(a).real.astype(a.dtype) if flip is jnp.conj else jnp.diagonal(a))

    def step(state):
        k, a, pivots, info = state
        here = _size(a[k, k])
        column = jnp.where(at > k, _size(a[:, k]), -1)
        far, largest = column.argmax().astype(jnp.int32), jnp.maximum(column.max(), 0)
        zero = (jnp.maximum(here, largest) == 0) | jnp.isnan(here)
        row = jnp.where((at >= k) & (at != far), _size(a[:, far]), 0).max()
        stay = zero | (here >= ALPHA * largest) | (here >= ALPHA * largest * (largest / row))
        two = ~stay & (_size(a[far, far]) < ALPHA * row)
        to, last = jnp.where(stay, k, far), k + two
        order = at.at[last].set(to).at[to].set(last)
        rest = (at >= k)[:, None] & (at >= k)
        a = jnp.where(rest, a[order][:, order], a)

        x, y = a[:, k], a[:, jnp.minimum(k + 1, n - 1)]
        d, b, c = a[k, k], x[jnp.minimum(k + 1, n - 1)], y[jnp.minimum(k + 1, n - 1)]
        b = jnp.where(two, b, 1)
        inverse = 1 / jnp.where(two, d / flip(b) * (c / b) - 1, 1)  # quotients: no product of two elements can overflow
        first = jnp.where(two, inverse * (c / b * x - y) / flip(b), jnp.where(zero, 0, x / d))
        second = jnp.where(two, inverse * (d / flip(b) * y - x) / b, 0)
        under = at > last
        first, second = jnp.where(under, first, 0), jnp.where(under, second, 0)
        change = first[:, None] * flip(x) + second[:, None] * flip(y)
        a = jnp.where(under[:, None] & under, a - change, a)
        a = a.at[:, k].set(jnp.where(under & ~zero, first, a[:, k]))
        a = jnp.where((two & under)[:, None] & (at == k + 1), second[:, None], a)
        pivots = jnp.where((at >= k) & (at <= last), jnp.where(two, -1 - to, 1 + to), pivots)
        return last + 1, a, pivots, jnp.where(zero & (info == 0), k + 1, info)

    start = jnp.int32(0), low + diagonal + flip(low).T, jnp.zeros(n, jnp.int32), jnp.int32(0)
    _, found, pivots, info = lax.while_loop(lambda state: state[0] < n, step, start)
    return jnp.tril(found), pivots, info


def _solve(ld, pivots, b, flip):
    """X of one factorisation (`sytrs`, `hetrs`)."""
    n = ld.shape[-1]
    at = jnp.arange(n, dtype=jnp.int32)

    def swapped(b, i, j):
        return b.at[i].set(b[j]).at[j].set(b[i])

    def down(state):
        k, b = state
        two, to = pivots[k] < 0, abs(pivots[k]) - 1
        last = k + two
        b = swapped(b, last, to)
        x, y = (ld[:, i][:, None] for i in (k, last))
        b = jnp.where((at > last)[:, None], b - x * b[k] - jnp.where(two, y * b[last], 0), b)
        e = jnp.where(two, ld[last, k], 1)
        d, c = ld[k, k] / flip(e), ld[last, last] / e
        u, v, scale = b[k] / flip(e), b[last] / e, d * c - 1
        p, q = jnp.where(two, (c * u - v) / scale, b[k] / ld[k, k]), (d * v - u) / scale
        return last + 1, b.at[last].set(jnp.where(two, q, p)).at[k].set(p)

    def up(state):
        k, b = state
        two, to = pivots[k] < 0, abs(pivots[k]) - 1
        first = k - two
        known = jnp.where((at > k)[:, None], b, 0)  # no zero times the infinities of a singular matrix
        x, y = (precision.matmul(jnp.where(at > k, flip(ld[:, i]), 0), known) for i in (k, first))
        b = b.at[first].add(jnp.where(two, -y, 0)).at[k].add(-x)
        return first - 1, swapped(b, k, to)

    _, b = lax.while_loop(lambda state: state[0] < n, down, (jnp.int32(0), b))
    return lax.while_loop(lambda state: state[0] >= 0, up, (jnp.int32(n - 1), b))[1]


def _each(f, hermitian, batch, *arrays):
    """f of each matrix of a batch, and of its other arrays, which are broadcast against it."""
    flip = jnp.conj if hermitian else lambda x: x
    whole = [jnp.broadcast_to(x, (*batch, *x.shape[x.ndim - own :])) for x, own in arrays]
    flat = [x.reshape(-1, *x.shape[len(batch) :]) for x in whole]
    out = jax.vmap(functools.partial(f, flip=flip))(*flat)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)


@op(aten.linalg_ldl_factor_ex, kind="matmul")
def ldl_factor_ex(a, *, hermitian=False, check_errors=False):
    """(L under D, pivots, info): info is the first column, from 1, whose pivot is zero."""
    batch, n = a.shape[:-2], a.shape[-1]
    if not a.size:
        return a, jnp.zeros((*batch, n), jnp.int32), jnp.zeros(batch, jnp.int32)
    return _each(_factor, hermitian, batch, (a, 2))


@op(aten.linalg_ldl_solve, kind="matmul")
def ldl_solve(ld, pivots, b, *, hermitian=False):
    batch = jnp.broadcast_shapes(ld.shape[:-2], b.shape[:-2])
    if not ld.size or not b.size:
        return jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    return _each(_solve, hermitian, batch, (ld, 2), (pivots, 1), (b, 2))
