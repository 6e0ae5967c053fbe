"""Half dtypes compute in float32 and round once, as PyTorch's CPU kernels do. For lowerings whose operands must not be promoted together."""

import jax.numpy as jnp


def wide(x):
    """bfloat16 and float16 arrays as float32; everything else, None included, as it is."""
    return x.astype(jnp.float32) if x is not None and x.dtype in (jnp.bfloat16, jnp.float16) else x
