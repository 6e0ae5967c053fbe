"""Matrix products. float32 is multiplied at `torch.tpu.precision`, half types add up in float32, integers stay whole."""

import jax.numpy as jnp
import torch

from tpu_lab.backend import dtypes, precision
from tpu_lab.backend.ops.activation import gelu, relu
from tpu_lab.backend.ops.elementwise import scaled
from tpu_lab.backend.registry import op

aten = torch.ops.aten
CONSTANT = {"kind": "matmul", "out": True, "static": ("beta", "alpha")}


def product(a, b, out, equation=None):
    """a @ b (or an einsum) in the dtype in which PyTorch adds up for this output."""
    wide = dtypes.to_jax(dtypes.opmath(out[0][1]))
    if wide != jnp.result_type(a, b) and not (wide == jnp.float32 and a.dtype in (jnp.bfloat16, jnp.float16)):
        a, b = a.astype(wide), b.astype(wide)

    def multiply(a, b, level):
        options = {"precision": level, "preferred_element_type": wide}
        return jnp.einsum(equation, a, b, **options) if equation else jnp.matmul(a, b, **options)

    return precision.product(multiply, a, b)


def plus(bias, result, beta, alpha):
    """beta * bias + alpha * result; what is multiplied by a 0 is not read, so that its NaN or infinity does not count."""
    if alpha == 0 and beta != 0:
        return jnp.broadcast_to(scaled(bias.astype(result.dtype), beta), result.shape)
    result = scaled(result, alpha)
    return result if beta == 0 else scaled(bias.astype(result.dtype), beta) + result


@op(aten.mm, aten.bmm, aten._int_mm, kind="matmul", out=True)
def mm(a, b, out_dtype=None, out=None):
    return product(a, b, out)


@op(aten.mv, aten.dot, kind="matmul", out=True)
def mv(a, b, out=None):
    return product(a, b, out)


@op(aten.vdot, kind="matmul", out=True)
def vdot(a, b, out=None):
    return product(jnp.conj(a), b, out)


@op(aten.addmm.default, aten.baddbmm.default, aten.addmv, **CONSTANT)
def addmm(bias, a, b, beta=1, alpha=1, out=None):
    return plus(bias, product(a, b, out), beta, alpha)


@op(aten.addmm.dtype, aten.baddbmm.dtype, **CONSTANT)
def addmm_dtype(bias, a, b, out_dtype, beta=1, alpha=1, out=None):
    return plus(bias, product(a, b, out), beta, alpha)


@op(aten._addmm_activation, **CONSTANT)
def addmm_activation(bias, a, b, beta=1, alpha=1, use_gelu=False, out=None):
    return (gelu if use_gelu else relu)(addmm(bias, a, b, beta, alpha, out))


@op(aten.addbmm, **CONSTANT)
def addbmm(bias, a, b, beta=1, alpha=1, out=None):
    return plus(bias, product(a, b, out, "bij,bjk->ik"), beta, alpha)


@op(aten.addr, **CONSTANT)
def addr(bias, a, b, beta=1, alpha=1, out=None):
    return plus(bias, product(a, b, out, "i,j->ij"), beta, alpha)


@op(aten._compute_linear_combination, kind="matmul")
def linear_combination(x, coefficients):
    """x: [N, ...], coefficients: [M, N] -> [M, ...]."""
    return precision.matmul(coefficients.astype(x.dtype), x.reshape(x.shape[0], -1)).reshape(-1, *x.shape[1:])


@op(aten._weight_int8pack_mm, kind="matmul")
def int8_weights(x, weight, scales):
    """x: [rows, in], weight: int8 [out, in], one scale for each of its rows."""
    return precision.matmul(x, weight.T.astype(x.dtype)) * scales


def _scaled(a, scale, b, scale_b):
    return precision.matmul(a.astype(jnp.float32) * scale, b.astype(jnp.float32) * scale_b)


@op(aten._scaled_mm, kind="matmul")
def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    """Products of float8 numbers that carry a scale each, or one for each row of a and column of b."""
    y = _scaled(a, scale_a, b, scale_b)
    y = y if bias is None else y + bias.astype(y.dtype)
    return y if scale_result is None else y / scale_result


@op(aten._scaled_mm_v2, kind="matmul")
def scaled_mm_v2(
    a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, contraction_dim=(),
    use_fast_accum=False,
):  # fmt: skip
    """The same with lists: recipe 0 is one scale for all, 1 one a row; others need blocks that CPUs do not take."""
    return scaled_mm(a, b, scale_a[0], scale_b[0], bias)
