"""Pooling in 2 and 3 dimensions: max (with flat indices), average, adaptive, unpooling; and their gradients.

Windows are taken apart into shifted strided slices, one per kernel tap, which XLA fuses into one loop. XLA's own
windowed reductions, and above all the gradient of its max pooling (select-and-scatter), are about 20 times slower
on CPUs. Kernels of more than `MANY` taps read their windows through one gather instead.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_lab.backend.bounds import Bound
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
MANY = 64


def _each(value, n):
    """One setting per spatial dimension."""
    return list(value) * n if len(value) == 1 else list(value)


def _geometry(shape, n, kernel, stride, padding, dilation, ceil_mode):
    """(kernel, stride, padding, dilation, output size), one entry per spatial dimension; PyTorch's size rule."""
    kernel = _each(kernel, n)
    stride, padding, dilation = _each(stride, n) if stride else kernel, _each(padding, n), _each(dilation, n)
    size = []
    for i, k, s, p, d in zip(shape[-n:], kernel, stride, padding, dilation):
        o = (i + 2 * p - d * (k - 1) - 1 + (s - 1 if ceil_mode else 0)) // s + 1
        size.append(o - 1 if ceil_mode and (o - 1) * s >= i + p else o)  # the last window must start inside
    return kernel, stride, padding, dilation, size


def _positions(shape, kernel, stride, padding, dilation, size):
    """Static (flat positions, valid), each [*size, taps]: which elements of a plane each window sees."""
    n = len(size)
    flat, valid = np.zeros([*size, *kernel], np.int32), np.ones([*size, *kernel], bool)
    for a in range(n):
        at = np.arange(size[a])[:, None] * stride[a] - padding[a] + np.arange(kernel[a])[None] * dilation[a]
        at = at.reshape([size[a] if b == a else 1 for b in range(n)] + [kernel[a] if b == a else 1 for b in range(n)])
        flat = flat * shape[a] + np.clip(at, 0, shape[a] - 1).astype(np.int32)
        valid &= (at >= 0) & (at < shape[a])
    return flat.reshape(*size, -1), valid.reshape(*size, -1)


def _lowest(dtype):
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


@op(aten.max_pool2d_with_indices, kind="reduce")
def max_pool2d(x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False, n=2):
    """(maxima, their flat positions in the plane). The first of equal maxima wins, the last NaN wins over all."""
    kernel, stride, padding, dilation, size = _geometry(x.shape, n, kernel_size, stride, padding, dilation, ceil_mode)
    plane = x.shape[-n:]
    if math.prod(kernel) > MANY:
        return _max_by_gather(x, n, *_positions(plane, kernel, stride, padding, dilation, size))
    low = _lowest(x.dtype)
    pads = [(0, 0, 0)] * (x.ndim - n) + [
        (p, max(0, (o - 1) * s + d * (k - 1) + 1 - i - p), 0)
        for p, o, s, d, k, i in zip(padding, size, stride, dilation, kernel, plane)
    ]
    padded = lax.pad(x, jnp.asarray(low, x.dtype), pads)
    flat, valid = _positions(plane, kernel, stride, padding, dilation, size)
    first = np.take_along_axis(flat, valid.argmax(-1)[..., None], -1)[..., 0]
    shape = [*x.shape[:-n], *size]
    best, index = jnp.full(shape, low, x.dtype), jnp.broadcast_to(first, shape)
    for tap in itertools.product(*map(range, kernel)):
        v, at = (
            padded[(..., *_window(tap, stride, dilation, size))],
            _tap_position(tap, plane, stride, padding, dilation, size),
        )
        better = v > best
        if jnp.issubdtype(x.dtype, jnp.floating):
            better |= v != v
        best, index = jnp.where(better, v, best), jnp.where(better, at, index)
    return best, index


@op(aten.max_pool3d_with_indices, kind="reduce")
def max_pool3d(x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    return max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode, n=3)


def _window(tap, stride, dilation, size):
    """What one kernel tap sees in the padded input, for all windows."""
    return tuple(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in zip(tap, dilation, size, stride))


def _tap_position(tap, plane, stride, padding, dilation, size):
    """[*size] flat position in the plane that one kernel tap of each window sees (computed, not a stored table)."""
    flat = 0
    for a, (t, i, s, p, d) in enumerate(zip(tap, plane, stride, padding, dilation)):
        flat = flat * i + lax.broadcasted_iota(jnp.int32, size, a) * s + (t * d - p)
    return flat


def _max_by_gather(x, n, flat, valid):
    """Maxima and flat indices of windows given as positions [*size, taps]."""
    planes = x.reshape(*x.shape[:-n], -1)
    v = jnp.where(valid, planes[..., flat], jnp.asarray(_lowest(x.dtype), x.dtype))
    place = (valid & (v == v.max(-1, keepdims=True))).argmax(-1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        nan = jnp.isnan(v) & valid
        last = v.shape[-1] - 1 - nan[..., ::-1].argmax(-1)
        place = jnp.where(nan.any(-1), last, place)
    at = jnp.take_along_axis(jnp.broadcast_to(flat, v.shape), place[..., None], -1)[..., 0]
    return jnp.take_along_axis(v, place[..., None], -1)[..., 0], at


@op(aten.max_pool2d_with_indices_backward, kind="reduce")
def max_pool2d_backward(grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices, n=2):
    """Each input element gathers the gradients of the windows that chose it: compare and shift, no scatter."""
    kernel, stride, padding, dilation, size = _geometry(x.shape, n, kernel_size, stride, padding, dilation, ceil_mode)
    if math.prod(kernel) > MANY:
        return _scatter_planes(grad, indices, x.shape, n)
    grad, indices, plane = wide(grad), indices.astype(jnp.int32), x.shape[-n:]
    zero, total = jnp.zeros((), grad.dtype), jnp.zeros(x.shape, grad.dtype)
    for tap in itertools.product(*map(range, kernel)):
        part = jnp.where(indices == _tap_position(tap, plane, stride, padding, dilation, size), grad, zero)
        pads = []
        for t, i, s, p, d, o in zip(tap, plane, stride, padding, dilation, size):
            low = t * d - p
            pads.append((low, i - low - (o - 1) * s - 1, s - 1))
        total += lax.pad(part, zero, [(0, 0, 0)] * (x.ndim - n) + pads)
    return total


@op(aten.max_pool3d_with_indices_backward, kind="reduce")
def max_pool3d_backward(grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices):
    return max_pool2d_backward(grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices, n=3)


def _scatter_planes(values, indices, shape, n, add=True):
    """Planes of zeros of `shape` into which `values` are added (or written) at flat `indices`."""
    planes, area, many = (math.prod(s) for s in (shape[:-n], shape[-n:], indices.shape[-n:]))
    target = jnp.zeros((planes, area), values.dtype)
    place = (jnp.arange(planes, dtype=jnp.int32)[:, None], indices.reshape(planes, many).astype(jnp.int32))
    values = values.reshape(planes, many)
    return (target.at[place].add(values) if add else target.at[place].set(values)).reshape(shape)


# Averages


@op(aten.avg_pool2d, kind="reduce")
def avg_pool2d(
    x, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None, n=2
):
    kernel, stride, padding, _, size = _geometry(x.shape, n, kernel_size, stride, padding, [1], ceil_mode)
    total, divisor = wide(x), np.ones(size)
    for a, (k, s, p, o) in enumerate(zip(kernel, stride, padding, size)):
        axis, i = x.ndim - n + a, x.shape[x.ndim - n + a]
        total = _window_sum(total, axis, k, s, p, o)
        start = np.arange(o) * s - p
        end = np.minimum(start + k, i + p)
        count = end - start if count_include_pad else np.minimum(end, i) - np.maximum(start, 0)
        divisor = divisor * count.reshape([-1 if b == a else 1 for b in range(n)])
    if divisor_override is not None:
        divisor = np.full(size, float(divisor_override))
    return total / divisor.astype(total.dtype)


@op(aten.avg_pool3d, kind="reduce")
def avg_pool3d(x, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None):
    return avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, n=3)


def _window_sum(x, axis, k, s, p, o):
    """Sums over windows along one axis; for separable windows one axis after the other is enough."""
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (p, (o - 1) * s + k - x.shape[axis] - p, 0)  # a negative pad cuts what no window sees
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)
    if k > MANY or o == 1:
        spans = [lax.slice_in_dim(x, j * s, j * s + k, axis=axis).sum(axis, keepdims=True) for j in range(o)]
        return jnp.concatenate(spans, axis)
    return sum(lax.slice_in_dim(x, t, t + (o - 1) * s + 1, s, axis) for t in range(k))


@op(aten.avg_pool3d_backward, kind="reduce")
def avg_pool3d_backward(grad, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    return avg_pool2d_backward(grad, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, 3)


@op(aten.avg_pool2d_backward, kind="reduce")
def avg_pool2d_backward(grad, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, n=2):
    settings = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, n)
    return jax.linear_transpose(lambda x: avg_pool2d(x, *settings), wide(x))(wide(grad))[0]


# Adaptive windows: output i sees [floor(i * in / out), ceil((i + 1) * in / out))


def _adaptive(i, o):
    """Static (positions, valid), each [o, longest window]."""
    start, end = np.arange(o) * i // o, -(-(np.arange(o) + 1) * i // o)
    at = start[:, None] + np.arange(max(int((end - start).max(initial=1)), 1))
    return np.minimum(at, i - 1).astype(np.int32), at < end[:, None]


# (the names without underscore decompose above us, but for their out= forms)
@op(
    aten._adaptive_avg_pool2d,
    aten._adaptive_avg_pool3d,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    kind="reduce",
)
def adaptive_avg_pool(x, output_size):
    n, y = len(output_size), wide(x)
    for axis, o in zip(range(x.ndim - n, x.ndim), output_size):
        i = x.shape[axis]
        if o and i % o == 0:
            y = y.reshape(*y.shape[:axis], o, i // o, *y.shape[axis + 1 :]).mean(axis + 1)
            continue
        at, valid = _adaptive(i, o)
        windows = jnp.moveaxis(jnp.take(y, at, axis), (axis, axis + 1), (-2, -1))
        y = jnp.moveaxis(jnp.where(valid, windows, 0).sum(-1) / valid.sum(-1).astype(y.dtype), -1, axis)
    return y


@op(aten._adaptive_avg_pool3d_backward, kind="reduce")
def adaptive_avg_pool3d_backward(grad, x):
    return adaptive_avg_pool2d_backward(grad, x, 3)


@op(aten._adaptive_avg_pool2d_backward, kind="reduce")
def adaptive_avg_pool2d_backward(grad, x, n=2):
    size = grad.shape[-n:]
    return jax.linear_transpose(lambda x: adaptive_avg_pool(x, size), wide(x))(wide(grad))[0]


@op(aten.adaptive_max_pool2d, aten.adaptive_max_pool3d, kind="reduce")
def adaptive_max_pool(x, output_size):
    n = len(output_size)
    plane, flat, valid = x.shape[-n:], 0, True
    for a, o in enumerate(output_size):
        at, inside = _adaptive(plane[a], o)
        spread = [o if b == a else 1 for b in range(n)] + [at.shape[1] if b == a else 1 for b in range(n)]
        flat, valid = flat * plane[a] + at.reshape(spread), valid & inside.reshape(spread)
    return _max_by_gather(x, n, flat.reshape(*output_size, -1).astype(np.int32), valid.reshape(*output_size, -1))


@op(aten.adaptive_max_pool2d_backward, kind="reduce")
def adaptive_max_pool2d_backward(grad, x, indices):
    return _scatter_planes(wide(grad), indices, x.shape, 2)


@op(aten.adaptive_max_pool3d_backward, kind="reduce")
def adaptive_max_pool3d_backward(grad, x, indices):
    return _scatter_planes(wide(grad), indices, x.shape, 3)


def _of_the_plane(x, indices, output_size, *_, **__):
    return [Bound(indices, math.prod(output_size), "Found an invalid max index: {} in an output of {size} elements")]


@op(aten.max_unpool2d, kind="movement", bounds=_of_the_plane)
def max_unpool2d(x, indices, output_size):
    return _scatter_planes(x, indices, (*x.shape[:-2], *output_size), 2, add=False)


@op(aten.max_unpool3d, kind="movement", bounds=_of_the_plane)
def max_unpool3d(x, indices, output_size, stride, padding):
    return _scatter_planes(x, indices, (*x.shape[:-3], *output_size), 3, add=False)


@op(aten.adaptive_avg_pool3d_backward.grad_input, kind="reduce")
def adaptive_avg_pool3d_backward_out(grad, x):
    return adaptive_avg_pool2d_backward(grad, x, 3)
