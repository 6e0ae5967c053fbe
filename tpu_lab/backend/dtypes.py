"""torch dtypes <-> jax dtypes, and the short names the lab prints (`f32`, `i64`).

Tensors are honestly 64-bit: `jax_enable_x64` is switched on when the backend
starts, so an int64 or float64 tensor holds 64-bit values on the device.
"""

import jax.numpy as jnp
import numpy as np
import torch

_PAIRS = [  # torch dtype, jax dtype, short name (XLA's, except "bool")
    (torch.float32, jnp.float32, "f32"),
    (torch.float64, jnp.float64, "f64"),
    (torch.bfloat16, jnp.bfloat16, "bf16"),
    (torch.float16, jnp.float16, "f16"),
    (torch.float8_e4m3fn, jnp.float8_e4m3fn, "f8e4m3"),
    (torch.float8_e5m2, jnp.float8_e5m2, "f8e5m2"),
    (torch.int64, jnp.int64, "i64"),
    (torch.int32, jnp.int32, "i32"),
    (torch.int16, jnp.int16, "i16"),
    (torch.int8, jnp.int8, "i8"),
    (torch.uint8, jnp.uint8, "u8"),
    (torch.uint16, jnp.uint16, "u16"),
    (torch.uint32, jnp.uint32, "u32"),
    (torch.uint64, jnp.uint64, "u64"),
    (torch.bool, jnp.bool_, "bool"),
    (torch.complex64, jnp.complex64, "c64"),
    (torch.complex128, jnp.complex128, "c128"),
]
_TO_JAX = {t: np.dtype(j) for t, j, _ in _PAIRS}
_TO_TORCH = {np.dtype(j): t for t, j, _ in _PAIRS}
_SHORT = {t: s for t, _, s in _PAIRS}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype that jax uses for a torch dtype; RuntimeError for quantized and other exotic ones.

    Not TypeError: PyTorch takes a TypeError of `x + 1j` for "ask the other operand", and its words are lost.
    """
    try:
        return _TO_JAX[dtype]
    except KeyError:
        raise RuntimeError(f"device 'tpu' has no {dtype}: {_way_out(dtype)}; it holds {', '.join(_SHORT.values())}") from None


def _way_out(dtype: torch.dtype) -> str:
    if dtype is torch.complex32:  # what float16 and a complex number make together
        return "convert float16 operands to float32 first, x.float(), or use complex64"
    return "convert to another dtype first, x.to(torch.float32), or keep the tensor on the CPU"


def to_torch(dtype) -> torch.dtype:
    """The torch dtype of a jax or numpy dtype."""
    return _TO_TORCH[np.dtype(dtype)]


def short(dtype: torch.dtype) -> str:
    """`torch.float32` -> `"f32"`."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def aval(shape, dtype: torch.dtype) -> str:
    """`f32[32,128]`: how the lab writes a shape with its dtype."""
    return f"{short(dtype)}[{','.join(map(str, shape))}]"


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype PyTorch's CPU kernels compute in: half types compute in float32, then round."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
