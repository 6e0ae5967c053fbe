"""Moving data: cat, stack, flip, roll, repeat, splits, patches, and the copying forms of views."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend import dtypes
from tpu_lab.backend.ops.scatter import strided_places
from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten.cat, kind="movement", out=True)
def cat(tensors, dim=0, out=None):
    """Operands of several dtypes are promoted; 1-d tensors of no elements are left out, whatever the others' shape."""
    dtype = dtypes.to_jax(out[0][1])
    kept = [t.astype(dtype) for t in tensors if t.shape != (0,)]
    return jnp.concatenate(kept, dim) if kept else jnp.zeros(0, dtype)


@op(aten.stack, kind="movement", out=True)
def stack(tensors, dim=0, out=None):
    return jnp.stack([t.astype(dtypes.to_jax(out[0][1])) for t in tensors], dim)


@op(aten.block_diag, kind="movement", out=True)
def block_diag(tensors, out=None):
    dtype = dtypes.to_jax(out[0][1])
    return jax.scipy.linalg.block_diag(*[jnp.atleast_2d(t.astype(dtype)) for t in tensors])


@op(aten.flip, kind="movement")
def flip(x, dims):
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@op(aten.rot90, kind="movement")
def rot90(x, k=1, dims=(0, 1)):
    return jnp.rot90(x, k, tuple(dims))


@op(aten.roll, kind="movement")
def roll(x, shifts, dims=()):
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x.reshape(-1), shifts[0]).reshape(x.shape)


@op(aten.repeat, kind="movement")
def repeat(x, repeats):
    """Tiles, done as one broadcast: [r0, n0, r1, n1, ...], flattened in pairs."""
    shape = (1,) * (len(repeats) - x.ndim) + x.shape
    spread = x.reshape([v for n in shape for v in (1, n)])
    spread = jnp.broadcast_to(spread, [v for r, n in zip(repeats, shape) for v in (r, n)])
    return spread.reshape([r * n for r, n in zip(repeats, shape)])


@op(aten.trace, kind="reduce")
def trace(x):
    return jnp.trace(x)


# Channels and pixels


@op(aten.channel_shuffle, kind="movement")
def channel_shuffle(x, groups):
    n, c, *rest = x.shape
    return x.reshape(n, groups, c // groups, *rest).swapaxes(1, 2).reshape(x.shape)


@op(aten.pixel_shuffle, kind="movement")
def pixel_shuffle(x, upscale_factor):
    """[..., c * r * r, h, w] -> [..., c, h * r, w * r]"""
    r, (*batch, c, h, w) = upscale_factor, x.shape
    x = x.reshape(math.prod(batch), c // (r * r), r, r, h, w).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(*batch, c // (r * r), h * r, w * r)


@op(aten.pixel_unshuffle, kind="movement")
def pixel_unshuffle(x, downscale_factor):
    r, (*batch, c, h, w) = downscale_factor, x.shape
    x = x.reshape(math.prod(batch), c, h // r, r, w // r, r).transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(*batch, c * r * r, h // r, w // r)


@op(aten.im2col, kind="movement")
def im2col(x, kernel_size, dilation, padding, stride):
    """[batch, channels, h, w] -> [batch, channels * kernel elements, windows]: one strided slice for each kernel element."""
    if x.ndim == 3:
        return im2col(x[None], kernel_size, dilation, padding, stride)[0]
    x = jnp.pad(x, [(0, 0), (0, 0), *[(p, p) for p in padding]])
    size = [(n - d * (k - 1) - 1) // s + 1 for n, d, k, s in zip(x.shape[2:], dilation, kernel_size, stride)]
    slices = [
        x[:, :, i : i + (size[0] - 1) * stride[0] + 1 : stride[0], j : j + (size[1] - 1) * stride[1] + 1 : stride[1]]
        for i in range(0, kernel_size[0] * dilation[0], dilation[0])
        for j in range(0, kernel_size[1] * dilation[1], dilation[1])
    ]
    return jnp.stack(slices, 2).reshape(x.shape[0], x.shape[1] * len(slices), size[0] * size[1])


@op(aten.col2im, kind="movement")
def col2im(x, output_size, kernel_size, dilation, padding, stride):
    """Overlapping windows added up: the transpose of im2col."""
    channels = x.shape[-2] // math.prod(kernel_size)
    image = jax.ShapeDtypeStruct((*x.shape[:-2], channels, *output_size), x.dtype)
    return jax.linear_transpose(lambda y: im2col(y, kernel_size, dilation, padding, stride), image)(x)[0]


@op(aten.unfold_backward, kind="movement")
def unfold_backward(grad, input_sizes, dim, size, step):
    """grad: [..., windows at dim, ..., size]; each window element is added back to where it was taken."""
    dim = dim % max(len(input_sizes), 1)
    if not input_sizes:
        return grad.reshape(())
    windows, total, zero = grad.shape[dim], jnp.zeros(input_sizes, grad.dtype), jnp.zeros((), grad.dtype)
    for t in range(size):
        pads = [(0, 0, 0)] * len(input_sizes)
        pads[dim] = (t, input_sizes[dim] - t - (windows - 1) * step - 1, step - 1)
        total += lax.pad(grad[..., t], zero, pads)
    return total


# Splits


def _parts(x, sizes, dim):
    dim, start, parts = dim % x.ndim, 0, []
    for n in sizes:
        parts.append(lax.slice_in_dim(x, start, start + n, axis=dim))
        start += n
    return parts


@op(aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default, kind="movement")
def split_with_sizes(x, split_sizes, dim=0):
    return _parts(x, split_sizes, dim)


@op(aten.split_copy.Tensor, aten.unsafe_split.Tensor, kind="movement")
def split(x, split_size, dim=0):
    n = x.shape[dim]
    return _parts(x, [min(split_size, n - i) for i in range(0, n, split_size)] if n else [0], dim)


@op(aten.unbind_copy.int, kind="movement")
def unbind_copy(x, dim=0):
    return [part.squeeze(dim) for part in _parts(x, [1] * x.shape[dim], dim)]


# Copying forms of views: the shape is the one PyTorch's meta kernel gives


@op(
    aten._unsafe_view,
    aten._reshape_copy,
    aten._reshape_alias_copy,
    aten.view_copy.default,
    aten.squeeze_copy,
    aten.unsqueeze_copy,
    aten.alias_copy,
    aten.detach_copy,
    aten.lift_fresh_copy,
    aten.lift,
    kind="movement",
    out=True,
)
def reshaped(x, *_, out=None, **__):
    return x.reshape(out[0][0])


@op(aten.expand_copy, kind="movement", out=True)
def expand_copy(x, size, *, implicit=False, out=None):
    return jnp.broadcast_to(x, out[0][0])


@op(aten.view_copy.dtype, kind="movement", out=True)
def view_dtype(x, dtype, out=None):
    """The same bits read as another dtype; the last dimension shrinks or grows with the width."""
    shape, target = out[0][0], dtypes.to_jax(dtype)
    if target.itemsize > x.dtype.itemsize:
        x = x.reshape(*shape, target.itemsize // x.dtype.itemsize)
    return lax.bitcast_convert_type(x, target).reshape(shape)


@op(aten.permute_copy, kind="movement")
def permute_copy(x, dims):
    return x.transpose([d % x.ndim for d in dims])


@op(aten.transpose_copy, kind="movement")
def transpose_copy(x, dim0, dim1):
    return x.swapaxes(dim0, dim1) if x.ndim else x


@op(aten.t_copy, kind="movement")
def t_copy(x):
    return x.T


@op(aten.slice_copy.Tensor, kind="movement")
def slice_copy(x, dim=0, start=None, end=None, step=1):
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


@op(aten.select_copy.int, kind="movement")
def select_copy(x, dim, index):
    return lax.index_in_dim(x, index, dim, keepdims=False)


@op(aten.narrow_copy, kind="movement")
def narrow_copy(x, dim, start, length):
    start = start % x.shape[dim] if start < 0 else start
    return lax.slice_in_dim(x, start, start + length, axis=dim)


@op(aten.diagonal_copy, kind="movement")
def diagonal_copy(x, offset=0, dim1=0, dim2=1):
    return jnp.diagonal(x, offset, dim1, dim2)


@op(aten.unfold_copy, kind="movement")
def unfold_copy(x, dimension, size, step):
    if x.ndim == 0:
        return x.reshape(1)
    windows = (x.shape[dimension] - size) // step + 1
    last = (windows - 1) * step + 1
    return jnp.stack([lax.slice_in_dim(x, t, t + last, step, dimension) for t in range(size)], -1)


@op(aten.as_strided_copy, kind="movement")
def as_strided_copy(x, size, stride, storage_offset=None):
    return x.reshape(-1)[strided_places(size, stride, storage_offset or 0)]


@op(aten.view_as_real_copy, kind="movement")
def view_as_real_copy(x):
    return jnp.stack([x.real, x.imag], -1)


@op(aten.view_as_complex_copy, kind="movement")
def view_as_complex_copy(x):
    return lax.complex(x[..., 0], x[..., 1])
