"""Resizing images: nearest, linear, cubic, antialiased; and the gradients.

All are linear maps, separable by dimension: along each one output element is a weighted sum of a few input elements.
Positions and weights are computed on the host in the precision of PyTorch's kernels (float32, or float64 for float64
data and bytes) and are constants of the program. The forward gathers; the gradient is a product with the transposed
matrix of weights, as a scatter of each element would be slow on every platform.

Where a dimension keeps its size although the user's scale factor is not 1, PyTorch's kernels differ: some copy it.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch

from tpu_lab.backend import precision
from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _real(x):
    """The numpy type of positions and weights for data x."""
    return np.float64 if x.dtype in (jnp.float64, jnp.uint8) else np.float32


def _scale(i, o, scale, align_corners, real):
    """Input elements per output element; the user's scale factor, if given, counts instead of the sizes."""
    if align_corners:
        return real((i - 1) / (o - 1)) if o > 1 else real(0)
    return real(1 / scale) if scale is not None and scale > 0 else real(i) / real(o)


# Each rule gives (positions, weights), both [out, taps]; weights None means 1.


def _nearest(i, o, scale, real, shift=0.0):
    step = _scale(i, o, scale, False, np.float32)
    at = np.floor((np.arange(o, dtype=np.float32) + np.float32(shift)) * step)
    return np.minimum(at.astype(np.int32), i - 1)[:, None], None


def _nearest_of_sizes(i, o, scale, real):
    """An equal or a doubled size counts, whatever the scale says."""
    return _nearest(i, o, None if o in (i, 2 * i) else scale, real)


def _nearest_exact(i, o, scale, real):
    return _nearest(i, o, scale, real, 0.5)


def _source(i, o, scale, align_corners, real, clamp):
    step, at = _scale(i, o, scale, align_corners, real), np.arange(o, dtype=real)
    if align_corners:
        return at * step
    at = (at + real(0.5)) * step - real(0.5)
    return np.maximum(at, real(0)) if clamp else at


def _linear(i, o, scale, align_corners, real):
    at = _source(i, o, scale, align_corners, real, clamp=True)
    at = np.arange(o, dtype=real) if i == o else at  # PyTorch copies then, whatever the scale says
    low = np.minimum(np.floor(at).astype(np.int32), i - 1)
    share = np.clip(at - low.astype(real), 0, 1).astype(real)
    return np.stack([low, np.minimum(low + 1, i - 1)], 1), np.stack([1 - share, share], 1)


def _cubic_weight(distance, a):
    """Keys' cubic convolution kernel."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0)).astype(d.dtype)


def _cubic(i, o, scale, align_corners, real):
    at = _source(i, o, scale, align_corners, real, clamp=False)
    low = np.floor(at)
    place = low[:, None] + np.arange(-1, 3, dtype=real)
    return np.clip(place, 0, i - 1).astype(np.int32), _cubic_weight(at[:, None] - place, real(-0.75))


def _antialiased(i, o, scale, align_corners, real, reach, kernel):
    """The kernel is stretched over all the input elements that an output element covers, and normalised."""
    step = _scale(i, o, scale, align_corners, real)
    stretch = max(step, real(1))
    support = real(reach) * stretch
    center = step * (np.arange(o, dtype=real) + real(0.5))
    first = np.maximum((center - support + real(0.5)).astype(np.int32), 0)
    last = np.minimum((center + support + real(0.5)).astype(np.int32), i)
    place = first[:, None] + np.arange(max(int((last - first).max()), 1), dtype=np.int32)
    weight = kernel((place.astype(real) - center[:, None] + real(0.5)) / stretch)
    weight = np.where(place < last[:, None], weight, 0)
    weight = weight / weight.sum(1, keepdims=True)
    return np.minimum(place, i - 1), weight.astype(real)


def _linear_antialiased(i, o, scale, align_corners, real):
    return _antialiased(i, o, scale, align_corners, real, 1, lambda d: np.maximum(1 - np.abs(d), 0))


def _cubic_antialiased(i, o, scale, align_corners, real):
    return _antialiased(i, o, scale, align_corners, real, 2, lambda d: _cubic_weight(d, real(-0.5)))


def _lanczos_antialiased(i, o, scale, align_corners, real):
    def kernel(d):
        return np.where(np.abs(d) < 3, np.sinc(d) * np.sinc(d / real(3)), 0)

    return _antialiased(i, o, scale, align_corners, real, 3, kernel)


def _resized(x, rules):
    """Apply one rule for each of the last dimensions."""
    y = wide(x)
    for axis, (place, weight) in enumerate(rules, x.ndim - len(rules)):
        i, (o, taps) = y.shape[axis], place.shape
        if weight is None and o % i == 0 and np.array_equal(place[:, 0], np.arange(o) // (o // i)):
            y = jnp.repeat(y, o // i, axis, total_repeat_length=o)
            continue
        shape = [-1 if a == axis else 1 for a in range(y.ndim)]
        parts = [jnp.take(y, place[:, t], axis, mode="clip") for t in range(taps)]
        y = parts[0] if weight is None else sum(p * weight[:, t].reshape(shape) for t, p in enumerate(parts))
    return y


def _whole(place, weight):
    """(int32 weights, their binary places): as many places as keep the largest below 2 ** 15; taps at one position are one."""
    first = (place[:, :, None] == place[:, None, :]).argmax(2)
    once, places = np.zeros_like(weight), 0
    np.add.at(once, (np.arange(len(place))[:, None], first), weight)
    while places < 22 and int(once.max() * 2 ** (places + 1) + 0.5) < 1 << 15:
        places += 1
    return np.trunc(once * 2**places + np.copysign(0.5, once)).astype(np.int32), places


def _resized_bytes(x, rules):
    """Bytes are weighted by whole numbers, as by PyTorch's kernel: the last dimension first, each rounded to bytes."""
    y = x.astype(jnp.int32)
    for axis, (place, weight) in reversed(list(enumerate(rules, x.ndim - len(rules)))):
        if y.shape[axis] == len(place):
            continue  # PyTorch copies then, whatever the scale says
        weight, places = _whole(place, weight)
        shape = [-1 if a == axis else 1 for a in range(y.ndim)]
        parts = [jnp.take(y, place[:, t], axis, mode="clip") * w.reshape(shape) for t, w in enumerate(weight.T)]
        y = jnp.clip((sum(parts) + (1 << places - 1)) >> places, 0, 255)
    return y


def _transposed(grad, rules, input_size):
    """The gradient: each dimension's weights as a matrix [out, in], transposed."""
    g = wide(grad)
    for axis, ((place, weight), i) in enumerate(zip(rules, input_size[-len(rules) :]), grad.ndim - len(rules)):
        o = place.shape[0]
        if weight is None and o % i == 0 and np.array_equal(place[:, 0], np.arange(o) // (o // i)):
            g = g.reshape(*g.shape[:axis], i, o // i, *g.shape[axis + 1 :]).sum(axis + 1)
            continue
        matrix = np.zeros((o, i), _real(g))
        np.add.at(matrix, (np.arange(o)[:, None], place), 1 if weight is None else weight)
        rows = precision.matmul(jnp.moveaxis(g, axis, -1), jnp.asarray(matrix))
        g = jnp.moveaxis(rows, -1, axis)
    return g


def _rules(rule, x, input_size, output_size, scales, *align_corners):
    scales = [*scales, *[None] * (len(output_size) - len(scales))]
    sizes = zip(input_size[-len(output_size) :], output_size, scales)
    return [rule(i, o, s, *align_corners, _real(x)) for i, o, s in sizes]


@op(aten.upsample_nearest1d.default, aten.upsample_nearest3d.default, kind="movement")
def nearest(x, output_size, *scales):
    return _resized(x, _rules(_nearest, x, x.shape, output_size, scales)).astype(x.dtype)


@op(aten.upsample_nearest2d.default, kind="movement")
def nearest2d(x, output_size, *scales):
    return _resized(x, _rules(_nearest_of_sizes, x, x.shape, output_size, scales)).astype(x.dtype)


@op(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d_backward.default,
    kind="movement",
)
def nearest_backward(grad, output_size, input_size, *scales):
    return _transposed(grad, _rules(_nearest_of_sizes, grad, input_size, output_size, scales), input_size)


@op(
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    kind="movement",
)
def nearest_exact(x, output_size, *scales):
    return _resized(x, _rules(_nearest_exact, x, x.shape, output_size, scales)).astype(x.dtype)


@op(
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    kind="movement",
)
def nearest_exact_backward(grad, output_size, input_size, *scales):
    return _transposed(grad, _rules(_nearest_exact, grad, input_size, output_size, scales), input_size)


def _copied(i, o, *_):
    """A dimension that keeps its size."""
    return np.arange(o, dtype=np.int32)[:, None], None


def _weighted(rule, forwards, backwards, copies=False):
    """Register the ops that take `align_corners`. copies: the forward copies a dimension of equal size, whatever the scale says."""

    def chosen(i, o, *how):
        return (_copied if copies and i == o else rule)(i, o, *how)

    def forward(x, output_size, align_corners, *scales):
        resized = _resized_bytes if x.dtype == jnp.uint8 else _resized
        return resized(x, _rules(chosen, x, x.shape, output_size, scales, align_corners))

    def backward(grad, output_size, input_size, align_corners, *scales):
        if rule is _cubic and list(output_size) == list(input_size[2:]):
            return grad  # PyTorch's kernel does not look at the scales then
        return _transposed(grad, _rules(rule, grad, input_size, output_size, scales, align_corners), input_size)

    op(*forwards, kind="reduce")(forward)
    op(*backwards, kind="reduce")(backward)


_weighted(
    _linear,
    [aten.upsample_linear1d.default, aten.upsample_bilinear2d.default, aten.upsample_trilinear3d.default],
    [
        aten.upsample_linear1d_backward.default,
        aten.upsample_bilinear2d_backward.default,
        aten.upsample_trilinear3d_backward.default,
    ],
)
_weighted(_cubic, [aten.upsample_bicubic2d.default], [aten.upsample_bicubic2d_backward.default])
_weighted(_linear_antialiased, [aten._upsample_bilinear2d_aa.default], [aten._upsample_bilinear2d_aa_backward.default], copies=True)
_weighted(_cubic_antialiased, [aten._upsample_bicubic2d_aa.default], [aten._upsample_bicubic2d_aa_backward.default], copies=True)
_weighted(_lanczos_antialiased, [aten._upsample_lanczos2d_aa.default], [aten._upsample_lanczos2d_aa_backward.default], copies=True)
