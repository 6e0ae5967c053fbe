"""A matrix product in groups: rows of one matrix, each group with a matrix of its own, as mixtures of experts have it.

`offs[g]` is where group g ends. PyTorch's own way for devices without a kernel cuts each group out, so that every routing
has other shapes; here the groups' sizes are values of one program (XLA's ragged product).
"""

import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend import dtypes, meta, precision
from tpu_lab.backend.ops.matmul import product
from tpu_lab.backend.registry import op

aten = torch.ops.aten
ROWS_MEET = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@op(aten._grouped_mm, kind="matmul", out=True)
def grouped_mm(a, b, offs=None, bias=None, out_dtype=None, out=None):
    """a: [S, K] with b: [G, K, N] -> [S, N], groups of rows; [M, S] with [S, N] -> [G, M, N], groups of what is summed
    over; [G, M, K] with [K, S] -> [M, S], groups of columns; [G, M, K] with [G, K, N] -> [G, M, N], without offs.
    What lies behind the last group is 0."""
    if offs is None:
        return product(a, b, out)
    wide = dtypes.to_jax(dtypes.opmath(out[0][1]))
    sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype))

    def rows(a, b, level):
        return lax.ragged_dot(a, b, sizes, precision=level, preferred_element_type=wide)

    def summed(a, b, level):
        return lax.ragged_dot_general(a, b, sizes, ROWS_MEET, precision=level, preferred_element_type=wide)

    if a.ndim == b.ndim:
        return _widened_on_cpus(summed, a.T, b, wide)
    if a.ndim == 2:
        return _widened_on_cpus(rows, a, b, wide)
    return _widened_on_cpus(rows, b.T, a.swapaxes(1, 2), wide).T


def _widened_on_cpus(f, a, b, wide):
    """XLA's ragged product on CPUs does not add up half types in float32; widened first, the products are the same."""
    if a.dtype == wide:
        return precision.product(f, a, b)
    level = precision.current()
    return lax.platform_dependent(a, b, cpu=lambda a, b: f(a.astype(wide), b.astype(wide), level), default=lambda a, b: f(a, b, level))


@meta.own(aten._grouped_mm.default)
def shape_of_grouped(a, b, offs=None, bias=None, out_dtype=None):
    """PyTorch's meta kernel has the limits of its CUDA kernel: bfloat16 alone, rows of 16 bytes."""
    for given, words in ((a, "mat_a"), (b, "mat_b")):
        torch._check(given.dim() in (2, 3), lambda: f"{words} has to be 2 or 3d")
    torch._check(a.dtype == b.dtype, lambda: f"expected mat_a and mat_b to have the same dtype, got {a.dtype} and {b.dtype}")
    torch._check(bias is None, lambda: "Bias not supported yet")
    torch._check(offs is None or offs.dtype == torch.int32, lambda: "Offsets have to be int32")
    torch._check((offs is not None) == (a.dim() == 2 or b.dim() == 2), lambda: "Have to provide offsets if there is a 2d matrix")
    if a.dim() == 3 or b.dim() == 3:
        torch._check(a.shape[-1] == b.shape[-2], lambda: "contraction dimension of mat_a and mat_b must match")
    if a.dim() == 2 and b.dim() == 2:
        shape = (offs.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 2:
        torch._check(offs.shape[0] == b.shape[0], lambda: "matrix batch sizes have to match")
        shape = (a.shape[0], b.shape[2])
    elif b.dim() == 2:
        torch._check(offs.shape[0] == a.shape[0], lambda: "matrix batch sizes have to match")
        shape = (a.shape[1], b.shape[1])
    else:
        torch._check(a.shape[0] == b.shape[0], lambda: "batched dimension has to match")
        shape = (a.shape[0], a.shape[1], b.shape[2])
    return a.new_empty(shape, dtype=out_dtype)
