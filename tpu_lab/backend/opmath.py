"""Half dtypes compute in float32 and round once, as PyTorch's CPU kernels do. For lowerings whose operands must not be promoted together."""

import jax.numpy as jnp
import torch
from jax import lax

HALF = {torch.bfloat16: (8, 7), torch.float16: (5, 10)}  # bits of exponent and mantissa


def wide(x):
    """bfloat16 and float16 arrays as float32; everything else, None included, as it is."""
    return x.astype(jnp.float32) if x is not None and x.dtype in (jnp.bfloat16, jnp.float16) else x


def rounded(x, dtype: torch.dtype):
    """A float rounded to a half dtype, though it goes on in float32. Others as they are.

    A pair of casts would not do: XLA may drop it (`xla_allow_excess_precision`).
    """
    return lax.reduce_precision(x, *HALF[dtype]) if dtype in HALF and jnp.issubdtype(jnp.result_type(x), jnp.floating) else x
