"""New tensors: shapes and dtypes are PyTorch's own answer (`out`), a lowering only fills them."""

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_lab.backend import dtypes
from tpu_lab.backend.ops.unary import convert
from tpu_lab.backend.registry import op

# The `out=` forms stand beside the others where they lack the others' `dtype`, so that they are no twins by schema.
aten = torch.ops.aten
NEW = {"kind": "movement", "out": True}


def _filled(value):
    def fill(*args, out=None, **kwargs):
        shape, dtype = out[0]
        return jnp.full(shape, value, dtypes.to_jax(dtype))

    return fill


# What an empty tensor holds is nobody's promise: zeros cost one fill and repeat from run to run.
EMPTY = (aten.empty.memory_format, aten.empty_like, aten.empty_strided, aten.empty_permuted)
op(*EMPTY, aten.new_empty, aten.new_empty_strided, **NEW)(_filled(0))
op(aten.zeros.default, aten.zeros_like, aten.new_zeros, aten._efficientzerotensor, **NEW)(_filled(0))
op(aten.ones.default, aten.ones_like, aten.new_ones, **NEW)(_filled(1))


def _full(value, out):
    shape, dtype = out[0]
    return jnp.full(shape, convert(jnp.asarray(value), dtype))


@op(aten.full.default, **NEW)
def full(size, value, dtype=None, out=None):
    return _full(value, out)


@op(aten.full_like, **NEW)
def full_like(x, value, dtype=None, out=None):
    return _full(value, out)


@op(aten.new_full, **NEW)
def new_full(x, size, value, dtype=None, out=None):
    return _full(value, out)


@op(aten.scalar_tensor, **NEW)
def scalar_tensor(value, dtype=None, out=None):
    return _full(value, out)


def _sequence(start, step, out):
    """start + i * step: whole numbers stay whole, floats are counted in float64 and rounded once, as on the CPU."""
    (count,), dtype = out[0]
    wide = jnp.float64 if dtype.is_floating_point else jnp.int64
    start, step = (convert(jnp.asarray(v), dtypes.to_torch(wide)) for v in (start, step))
    return start + step * lax.iota(wide, count)


# The ends give the length, so they are part of the program: a runtime float would keep the first call's shape.
@op(aten.arange.default, aten.arange.out, static=("end",), **NEW)
def arange(end, dtype=None, out=None):
    return _sequence(0, 1, out)


@op(aten.arange.start, aten.arange.start_step, aten.arange.start_out, aten.range, aten.range.out, static=("start", "end", "step"), **NEW)
def arange_from(start, end, step=1, dtype=None, out=None):
    return _sequence(start, step, out)


def _linspace(start, end, out):
    """Counted from the nearer end, so that both ends are exact."""
    (steps,), dtype = out[0]
    wide = jnp.complex128 if dtype.is_complex else jnp.float64
    start, end = jnp.asarray(start, wide), jnp.asarray(end, wide)
    step = (end - start) / max(steps - 1, 1)
    i = lax.iota(jnp.int64, steps)
    value = jnp.where(i < steps / 2, start + step * i, end - step * (steps - 1 - i))
    return convert(value, dtype)


@op(aten.linspace, aten.linspace.out, **NEW)
def linspace(start, end, steps, dtype=None, out=None):
    return _linspace(start, end, out)


@op(aten.logspace, aten.logspace.out, **NEW)
def logspace(start, end, steps, base=10.0, dtype=None, out=None):
    shape, dtype = out[0]
    wide = ((shape, torch.complex128 if dtype.is_complex else torch.float64),)
    return convert(jnp.power(base, _linspace(start, end, wide)), dtype)


@op(aten.eye, aten.eye.out, aten.eye.m_out, **NEW)
def eye(n, m=None, dtype=None, out=None):
    (rows, columns), dtype = out[0]
    return jnp.eye(rows, columns, dtype=dtypes.to_jax(dtype))


@op(aten.tril_indices, **NEW)
def tril_indices(row, col, offset=0, dtype=None, out=None):
    return np.stack(np.tril_indices(row, offset, col))


@op(aten.triu_indices, **NEW)
def triu_indices(row, col, offset=0, dtype=None, out=None):
    return np.stack(np.triu_indices(row, offset, col))


@op(aten.tril, kind="movement")
def tril(x, diagonal=0):
    return jnp.tril(x, diagonal)


@op(aten.triu, kind="movement")
def triu(x, diagonal=0):
    return jnp.triu(x, diagonal)
