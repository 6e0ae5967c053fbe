"""Factorisations and solvers. `info` is 0 where a factorisation went well, and LAPACK's positive sign of trouble where not.

Pivots are LAPACK's: row i was swapped with row pivots[i] - 1, an int32 counted from 1.
"""

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import linalg

from tpu_lab.backend import precision
from tpu_lab.backend.bounds import Bound, never
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
LINALG = {"kind": "matmul"}


def _h(x):
    """The conjugate transpose of the last two dimensions."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _mm(a, b):
    return precision.matmul(a, b)


@op(aten.linalg_cholesky_ex, **LINALG)
def cholesky_ex(x, upper=False, check_errors=False):
    """(L, info); info is the order of the first leading minor that is not positive definite."""
    x = _h(x) if upper else x  # only one triangle is read
    low = lax.linalg.cholesky(jnp.tril(x) + _h(jnp.tril(x, -1)), symmetrize_input=False)
    bad = jnp.any(jnp.isnan(low), axis=(-2, -1))
    return (_h(low) if upper else low), jnp.where(bad, _first_bad_minor(x), 0).astype(jnp.int32)


def _first_bad_minor(x):
    """How many rows of an unpivoted elimination it takes to meet a pivot that is not positive."""
    n = x.shape[-1]
    if not n:
        return jnp.zeros(x.shape[:-2], jnp.int32)

    def step(k, state):
        a, first = state
        pivot = jnp.real(a[..., k, k])
        first = jnp.where((first == 0) & ~(pivot > 0), k + 1, first)
        column = a[..., :, k] / jnp.where(pivot > 0, pivot, 1)[..., None]
        return a - column[..., :, None] * a[..., k, :][..., None, :], first

    full = jnp.tril(x) + _h(jnp.tril(x, -1))
    return lax.fori_loop(0, n, step, (full, jnp.zeros(x.shape[:-2], jnp.int32)))[1]


@op(aten.cholesky, **LINALG)
def cholesky(x, upper=False):
    return cholesky_ex(x, upper)[0]


def _no_zero_on_the_diagonal(x, *_, **__):
    zero = jnp.diagonal(x, axis1=-2, axis2=-1) == 0
    return [never(zero, "cholesky_inverse: the input matrix is singular, a diagonal element is zero")]


@op(aten.cholesky_inverse, bounds=_no_zero_on_the_diagonal, **LINALG)
def cholesky_inverse(x, upper=False):
    low = _h(jnp.triu(x)) if upper else jnp.tril(x)
    half = _triangular(low, jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape), False)
    return _mm(_h(half), half)


@op(aten._cholesky_solve_helper, **LINALG)
def cholesky_solve(b, a, upper):
    low = _h(jnp.triu(a)) if upper else jnp.tril(a)
    return _h_solve(low, _triangular(low, b, False))


def _triangular(a, b, upper, unit=False):
    """x of a x = b for a triangular a; batches are broadcast."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=not upper, unit_diagonal=unit)


def _h_solve(low, b):
    return lax.linalg.triangular_solve(low, b, left_side=True, lower=True, transpose_a=True, conjugate_a=True)


@op(aten.linalg_solve_triangular, **LINALG)
def solve_triangular(a, b, upper, left=True, unitriangular=False):
    if left:
        return _triangular(a, b, upper, unitriangular)
    t = lambda v: jnp.swapaxes(v, -1, -2)  # noqa: E731
    return t(_triangular(t(a), t(b), not upper, unitriangular))


@op(aten.triangular_solve, **LINALG)
def triangular_solve(b, a, upper=True, transpose=False, unitriangular=False):
    a_used = jnp.swapaxes(a, -1, -2) if transpose else a
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return _triangular(a_used, b, upper != transpose, unitriangular), jnp.broadcast_to(a, (*batch, *a.shape[-2:]))


@op(aten.linalg_qr, **LINALG)
def qr(x, mode="reduced"):
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    return tuple(jnp.linalg.qr(x, mode=mode))


def _finite(x, *_, **__):
    return [never(~jnp.isfinite(x), "linalg.svd: the input matrix contains non-finite values")]


@op(aten._linalg_svd, out=True, bounds=_finite, **LINALG)
def svd(x, full_matrices=False, compute_uv=True, driver=None, out=None):
    """(U, S, Vh); without vectors U and Vh are empty, in PyTorch's own shapes."""
    if compute_uv:
        return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))
    return jnp.zeros(out[0][0], x.dtype), jnp.linalg.svd(x, compute_uv=False), jnp.zeros(out[2][0], x.dtype)


@op(aten._linalg_eigh, out=True, **LINALG)
def eigh(x, uplo="L", compute_v=True, out=None):
    x = x if uplo.upper() == "L" else _h(x)
    x = jnp.tril(x) + _h(jnp.tril(x, -1))
    if compute_v:
        return tuple(jnp.linalg.eigh(x, symmetrize_input=False))
    return jnp.linalg.eigh(x, symmetrize_input=False)[0], jnp.zeros(out[1][0], x.dtype)


def _lu(x):
    """(LU in one matrix, pivots from 1, the permutation, info: the first zero on U's diagonal)."""
    lu, pivots, permutation = lax.linalg.lu(x)
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    if not zero.shape[-1]:
        return lu, pivots + 1, permutation, jnp.zeros(x.shape[:-2], jnp.int32)
    info = jnp.where(jnp.any(zero, axis=-1), jnp.argmax(zero, axis=-1) + 1, 0)
    return lu, (pivots + 1).astype(jnp.int32), permutation, info.astype(jnp.int32)


def _unit_lower(lu):
    k = min(lu.shape[-2:])
    return jnp.tril(lu[..., :k], -1) + jnp.eye(lu.shape[-2], k, dtype=lu.dtype)


@op(aten.linalg_lu_factor_ex, **LINALG)
def lu_factor_ex(x, pivot=True, check_errors=False):
    if not pivot:
        raise NotImplementedError("lu_factor(pivot=False) on 'tpu': XLA's LU always pivots; use pivot=True or .cpu()")
    lu, pivots, _, info = _lu(x)
    return lu, pivots, info


def _permutation_matrix(permutation, dtype):
    """P of A = P L U."""
    return jnp.swapaxes(jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype), -1, -2)


@op(aten.linalg_lu, **LINALG)
def lu(x, pivot=True):
    if not pivot:
        raise NotImplementedError("linalg.lu(pivot=False) on 'tpu': XLA's LU always pivots; use pivot=True or .cpu()")
    lu, _, permutation, _ = _lu(x)
    return _permutation_matrix(permutation, x.dtype), _unit_lower(lu), jnp.triu(lu[..., : min(x.shape[-2:]), :])


@op(aten.lu_unpack, out=True, **LINALG)
def lu_unpack(lu, pivots, unpack_data=True, unpack_pivots=True, out=None):
    empty = jnp.zeros((0,), lu.dtype)
    p = empty
    if unpack_pivots:
        permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-2])
        p = _permutation_matrix(permutation, lu.dtype)
    if not unpack_data:
        return p, empty, empty
    return p, _unit_lower(lu), jnp.triu(lu[..., : min(lu.shape[-2:]), :])


def _lu_solve(lu, permutation, b):
    """x of A x = b from A's factors."""
    batch = jnp.broadcast_shapes(lu.shape[:-2], b.shape[:-2])
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    order = jnp.broadcast_to(permutation, (*batch, permutation.shape[-1]))
    b = jnp.take_along_axis(b, order[..., None], axis=-2)
    return _triangular(lu, _triangular(lu, b, False, unit=True), True)


def _pivots_inside(lu, pivots, *_, **__):
    return [Bound(pivots - 1, lu.shape[-2], "lu_solve: pivot {} (from 0) is not a row of {size}")]


@op(aten.linalg_lu_solve, bounds=_pivots_inside, **LINALG)
def lu_solve(lu, pivots, b, left=True, adjoint=False):
    """Right-hand and adjoint systems by the full factors: A = P L U."""
    permutation = lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-1])
    if left and not adjoint:
        return _lu_solve(lu, permutation, b)
    if not left:  # x A = b is A^H x^H = b^H
        return _h(lu_solve(lu, pivots, _h(b), True, not adjoint))
    y = _h_solve(_unit_lower(lu), _triangular(_h(jnp.triu(lu)), b, False))
    order = jnp.broadcast_to(jnp.argsort(permutation, axis=-1), (*y.shape[:-2], y.shape[-2]))
    return jnp.take_along_axis(y, order[..., None], axis=-2)


@op(aten._linalg_solve_ex, **LINALG)
def solve_ex(a, b, left=True, check_errors=False):
    """(X, LU, pivots, info); b is a stack of vectors when it has one dimension fewer than a, as `torch.linalg.solve` says."""
    lu, pivots, permutation, info = _lu(a)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    b = b[..., None] if vector else b
    x = _lu_solve(lu, permutation, b) if left or vector else lu_solve(lu, pivots, b, left=False)
    return (x[..., 0] if vector else x), lu, pivots, info


@op(aten.linalg_inv_ex, **LINALG)
def inv_ex(a, check_errors=False):
    lu, _, permutation, info = _lu(a)
    return _lu_solve(lu, permutation, jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)), info


def _parity(pivots):
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1), axis=-1)
    return jnp.where(swaps % 2 == 0, 1, -1)


def _determinant_lu(a, contiguous):
    """The LU that the derivative expects: of A's transpose if A is contiguous (LAPACK's order) and real, else of A."""
    return _lu(jnp.swapaxes(a, -1, -2) if contiguous[0] and not jnp.iscomplexobj(a) else a)


@op(aten._linalg_det, contiguous=True, **LINALG)
def det(a, contiguous):
    """(determinant, LU, pivots)."""
    lu, pivots, _, _ = _determinant_lu(a, contiguous)
    return jnp.prod(jnp.diagonal(lu, axis1=-2, axis2=-1), axis=-1) * _parity(pivots).astype(a.dtype), lu, pivots


@op(aten._linalg_slogdet, contiguous=True, **LINALG)
def slogdet(a, contiguous):
    """(sign, log |determinant|, LU, pivots)."""
    lu, pivots, _, _ = _determinant_lu(a, contiguous)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    size = jnp.abs(diagonal)
    sign = jnp.prod(jnp.where(size == 0, 0, diagonal / jnp.where(size == 0, 1, size)), axis=-1)
    return sign * _parity(pivots).astype(a.dtype), jnp.sum(jnp.log(size), axis=-1), lu, pivots


@op(aten.linalg_matrix_exp, **LINALG)
def matrix_exp(a):
    return linalg.expm(wide(a)) if a.size else a


@op(aten.linalg_cross)
def cross(a, b, dim=-1):
    a, b = jnp.broadcast_arrays(a, b)
    return jnp.cross(a, b, axis=dim)


@op(aten.linalg_householder_product, **LINALG)
def householder_product(a, tau):
    return lax.linalg.householder_product(a, tau)
