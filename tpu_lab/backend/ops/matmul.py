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
