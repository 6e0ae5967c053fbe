"""`_foreach_*`: one op over lists of tensors, as the optimizers use it. Each element promotes on its own."""

import jax.numpy as jnp
import torch

from tpu_lab.backend import dtypes
from tpu_lab.backend.ops import elementwise, matmul, reduce, unary
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _wide(x, dtype):
    """One operand in the dtype in which PyTorch computes this element; Python numbers stay static."""
    return unary.convert(x, dtypes.opmath(dtype)) if hasattr(x, "dtype") else x


def _spread(value, count):
    """A list as it is; a number or tensor for all, `count` times; a `scalars` tensor by its elements."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def _unary(fn):
    def each(tensors, out=None):
        return [fn(x if unary.is_complex(x) else _wide(x, dtype)) for x, (_, dtype) in zip(tensors, out)]

    return each


for _name, _fn in {**unary.FLOAT, **unary.SAME}.items():
    if hasattr(aten, f"_foreach_{_name}"):
        op(getattr(aten, f"_foreach_{_name}"), out=True)(_unary(_fn))


def _binary(fn):
    def each(tensors, others, out=None):
        pairs = zip(tensors, _spread(others, len(tensors)), out)
        return [fn(_wide(a, dtype), _wide(b, dtype)) for a, b, (_, dtype) in pairs]

    return each


BINARY = {
    "mul": jnp.multiply,
    "div": jnp.divide,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "clamp_min": jnp.maximum,
    "clamp_max": jnp.minimum,
}
for _name, _fn in BINARY.items():
    op(getattr(aten, f"_foreach_{_name}"), out=True)(_binary(_fn))


def _sum(fn):
    """Sums round a half-type number first, as `elementwise.add` does."""

    def each(tensors, others, alpha=1, out=None):
        pairs = zip(tensors, _spread(others, len(tensors)), out)
        return [fn(_wide(a, o[1]), _wide(b, o[1]), _wide(alpha, o[1]), out=(o,)) for a, b, o in pairs]

    return each


op(aten._foreach_add, out=True)(_sum(elementwise.add))
op(aten._foreach_sub, out=True)(_sum(elementwise.sub))


@op(aten._foreach_pow, out=True, static=("exponent",))
def foreach_pow(bases, exponents, out=None):
    pairs = zip(_spread(bases, len(out)), _spread(exponents, len(out)), out)
    return [elementwise.pow_(_wide(a, dtype), _wide(b, dtype)) for a, b, (_, dtype) in pairs]


def _ternary(fn):
    def each(tensors, seconds, thirds, values=1, out=None):
        values = values if hasattr(values, "ndim") and values.ndim else _spread(values, len(tensors))
        rows = zip(tensors, seconds, thirds, values, out)
        return [fn(*(_wide(v, dtype) for v in row)) for *row, (_, dtype) in rows]

    return each


op(aten._foreach_addcmul, out=True)(_ternary(elementwise.addcmul))
op(aten._foreach_addcdiv, out=True)(_ternary(elementwise.addcdiv))


@op(aten._foreach_lerp, out=True)
def foreach_lerp(tensors, ends, weights, out=None):
    rows = zip(tensors, ends, _spread(weights, len(tensors)), out)
    return [elementwise.lerp(*(_wide(v, dtype) for v in row)) for *row, (_, dtype) in rows]


@op(aten._foreach_norm, kind="reduce", out=True, static=("ord",))
def foreach_norm(tensors, ord=2, dtype=None, out=None):
    return [reduce.vector_norm(x, ord, out=(o,)) for x, o in zip(tensors, out)]


@op(aten._foreach_max, kind="reduce")
def foreach_max(tensors):
    return [reduce.amax(x) for x in tensors]


@op(aten._foreach_zero)
def foreach_zero(tensors):
    return [jnp.zeros_like(x) for x in tensors]


@op(aten._foreach_clone, kind="movement")
def foreach_clone(tensors):
    return list(tensors)


@op(aten._foreach_copy, kind="movement", out=True)
def foreach_copy(tensors, sources, out=None):
    return [unary.copy(x, source, out=(o,)) for x, source, o in zip(tensors, sources, out)]


@op(aten._foreach_mm, kind="matmul", out=True)
def foreach_mm(tensors, others, out=None):
    return [matmul.product(a, b, (o,)) for a, b, o in zip(tensors, others, out)]
