"""How exactly float32 matrix products are computed: `torch.tpu.precision`. XLA's default on a TPU is one bfloat16 pass."""

import jax

LEVELS = {  # name -> passes of the bfloat16 matrix unit: 6, 3, 1
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "default": jax.lax.Precision.DEFAULT,
}
level = "highest"  # PyTorch's float32 means float32


def current() -> jax.lax.Precision:
    """The precision that a matmul or convolution lowered now is asked for."""
    return LEVELS[level]


def set(mode) -> None:  # noqa: A001  (read as precision.set)
    """Choose "highest", "high" or "default". ValueError otherwise."""
    global level
    if mode not in LEVELS:
        raise ValueError(f"precision {mode!r}: use torch.tpu.Precision.DEFAULT, HIGH or HIGHEST")
    level = mode
