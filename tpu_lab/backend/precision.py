"""How exactly float32 products are computed: `torch.tpu.precision`. A TPU multiplies bfloat16: 1, 3 or 6 passes.

Until somebody chooses, float32 means float32, as in PyTorch: six passes on a TPU, plain float32 on a CPU. A choice
holds on every platform. A program for a TPU carries it as jax's `Precision`; the same program for a CPU computes the
passes one by one, so the error is that of the chip: an operand becomes a sum of bfloat16 parts, each holding the 8
bits that the ones before left over, and the products of the largest parts are added up in float32.

The scheme is that of bf16x3 and bf16x6: G. Henry, P. Tang, A. Heinecke, "Leveraging the bfloat16 artificial
intelligence datatype for higher-precision computations", ARITH 2019.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
from jax import lax

LEVELS = {  # name -> what XLA is asked for on a TPU
    "highest": lax.Precision.HIGHEST,
    "high": lax.Precision.HIGH,
    "default": lax.Precision.DEFAULT,
}
PASSES = {  # name -> (part of a, part of b) of each product, the smallest first: they are added in this order
    "highest": ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)),
    "high": ((1, 0), (0, 1), (0, 0)),
    "default": ((0, 0),),
}
level = "highest"  # PyTorch's float32 means float32
chosen: str | None = None  # the level if somebody asked for passes: part of the key of what is lowered now


def current() -> lax.Precision:
    """The precision that a product lowered now is asked for on a TPU."""
    return LEVELS[level]


def set(mode: str | None) -> None:  # noqa: A001  (read as precision.set)
    """Choose the passes of "highest", "high" or "default"; None: float32 as it is. ValueError otherwise."""
    global level, chosen
    if mode is not None and mode not in LEVELS:
        raise ValueError(f"precision {mode!r}: use torch.tpu.Precision.DEFAULT, HIGH or HIGHEST")
    level, chosen = mode or "highest", mode


@contextlib.contextmanager
def scope(mode: str | None):
    """`set` for the block."""
    before = chosen
    set(mode)
    try:
        yield
    finally:
        set(before)


def options(choices) -> tuple:
    """What a program's choices (None among them: no choice) add to its options, for the sentence of a miss."""
    names = sorted({c for c in choices if c is not None})
    return (("float32 precision", ", ".join(names)),) if names else ()


def product(f, a, b):
    """f(a, b, precision) at the chosen precision. f: a product of two arrays, linear in each (a matmul, a convolution).

    Only float32 products have passes. A gradient is a product, too: wrap it, do not differentiate this one.
    """
    if chosen is None or a.dtype != jnp.float32 or b.dtype != jnp.float32:
        return f(a, b, current())
    on_tpu, passes = current(), PASSES[chosen]
    return lax.platform_dependent(
        a, b, cpu=lambda a, b: _in_passes(f, a, b, passes), default=lambda a, b: f(a, b, on_tpu)
    )


def matmul(a, b):
    """jnp.matmul at the chosen precision."""
    return product(lambda a, b, p: jnp.matmul(a, b, precision=p), a, b)


def einsum(equation: str, a, b):
    """jnp.einsum of two operands at the chosen precision."""
    return product(lambda a, b, p: jnp.einsum(equation, a, b, precision=p), a, b)


def _in_passes(f, a, b, passes):
    depth = 1 + max(i for i, _ in passes)
    parts_a, parts_b = _parts(a, depth), _parts(b, depth)
    largest = (
        parts_a[0],
        parts_b[0],
    )  # inf and NaN count in their product only: inf times a small part would be -inf or NaN
    parts_a[0], parts_b[0] = (jnp.where(jnp.isfinite(p), p, 0) for p in largest)
    total = None
    for i, j in passes:
        one = f(*(largest if i == j == 0 else (parts_a[i], parts_b[j])), lax.Precision.HIGHEST)
        total = one if total is None else total + one
    return total


def _parts(x: jax.Array, depth: int) -> list[jax.Array]:
    """x as a sum of bfloat16 values, held in float32. A cast there and back would not do: XLA may drop it."""
    parts = []
    for _ in range(depth):
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part)
        x = jnp.where(jnp.isfinite(part), x - part, 0)  # inf - inf would be NaN
    return parts
