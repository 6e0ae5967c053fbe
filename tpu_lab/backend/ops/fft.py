"""Fourier transforms: the three kernels that every `torch.fft` function ends in."""

import math

import jax.numpy as jnp
import torch

from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _scale(shape, dims, normalization: int) -> float:
    """ATen's code: 0 leaves the sums as they are, 1 divides by sqrt(n), 2 by n (fft_norm_mode in native/SpectralOpsUtils.h)."""
    n = math.prod(shape[d] for d in dims)
    return {0: 1.0, 1: 1 / math.sqrt(n), 2: 1 / n}[normalization]


def _scaled(x, scale: float):
    return x if scale == 1 else x * jnp.asarray(scale, jnp.real(x).dtype)


def _sums(x, dims, forward: bool):
    """The unscaled transform of complex x; jax's inverse divides by n, so that is taken back with norm="forward"."""
    for d in dims:
        x = jnp.fft.fft(x, axis=d) if forward else jnp.fft.ifft(x, axis=d, norm="forward")
    return x


@op(aten._fft_c2c)
def fft_c2c(x, dim, normalization, forward):
    return _scaled(_sums(x, dim, forward), _scale(x.shape, dim, normalization)) if dim else x


@op(aten._fft_r2c)
def fft_r2c(x, dim, normalization, onesided):
    """Real to complex; the last of `dim` is halved when onesided."""
    half = jnp.fft.rfft(x, axis=dim[-1]) if onesided else jnp.fft.fft(x, axis=dim[-1])
    return _scaled(_sums(half, dim[:-1], True), _scale(x.shape, dim, normalization))


@op(aten._fft_c2r)
def fft_c2r(x, dim, normalization, last_dim_size):
    """Complex to real: `last_dim_size` values along the last of `dim`."""
    shape = list(x.shape)
    shape[dim[-1]] = last_dim_size
    full = _sums(x, dim[:-1], False)
    real = jnp.fft.irfft(full, last_dim_size, axis=dim[-1], norm="forward")
    return _scaled(real, _scale(shape, dim, normalization))
