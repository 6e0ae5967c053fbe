"""Convolutions in 1 to 3 dimensions: plain, strided, dilated, grouped, transposed; and their gradients.

Two formulations give the same numbers: XLA's convolution, and a matrix product over patches. The second is taken
where the first is slow on CPUs (measured 5 to 20 times): images of at most two positions a side under a bigger
kernel, where most kernel taps see only padding and are left out, and 1x1 kernels, which are a matmul.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend import precision
from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten.convolution, kind="matmul")
def convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups):
    """x: [batch, in, *spatial] or [in, *spatial]; w: [out, in / groups, *kernel], transposed [in, out / groups, *kernel]."""
    if min(padding) < 0:
        raise ValueError("negative padding is not supported")
    if x.ndim < w.ndim:
        return convolution(x[None], w, bias, stride, padding, dilation, transposed, output_padding, groups)[0]
    settings = _settings(w, stride, padding, dilation, transposed, output_padding, groups)
    x, w = (v.astype(jnp.promote_types(x.dtype, w.dtype)) for v in (x, w))
    y = precision.product(lambda x, w, level: _linear(x, w, *settings, level), x, w)
    return y if bias is None else y + bias.reshape(-1, *[1] * (w.ndim - 2))


@op(aten.convolution_backward, kind="matmul")
def convolution_backward(
    grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """(grad of x, of w, of bias); None where the mask says so."""
    if x.ndim < w.ndim:
        gx, gw, gb = convolution_backward(
            grad[None],
            x[None],
            w,
            bias_sizes,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            output_mask,
        )
        return (None if gx is None else gx[0]), gw, gb
    settings = _settings(w, stride, padding, dilation, transposed, output_padding, groups)
    want_x, want_w, want_bias = output_mask

    def for_x(g, w, level):
        return jax.vjp(lambda x: _linear(x, w, *settings, level), x)[1](g)[0]

    def for_w(g, x, level):
        return jax.vjp(lambda w: _linear(x, w, *settings, level), w)[1](g)[0]

    gx = precision.product(for_x, grad, w) if want_x else None
    gw = precision.product(for_w, grad, x) if want_w else None
    gb = grad.sum((0, *range(2, grad.ndim))) if want_bias else None
    return gx, gw, gb


def _settings(w, stride, padding, dilation, transposed, output_padding, groups):
    """Each setting once per spatial dimension (the schema lets one number stand for all)."""
    n = w.ndim - 2
    lists = [list(v) * n if len(v) == 1 else list(v) for v in (stride, padding, dilation, output_padding)]
    return (*lists, transposed, groups)


def _linear(x, w, stride, padding, dilation, output_padding, transposed, groups, level):
    """The convolution without bias: linear in x and in w. level: jax's Precision of its products."""
    x, w = (v.astype(jnp.promote_types(x.dtype, w.dtype)) for v in (x, w))
    kernel, n = w.shape[2:], w.ndim - 2
    if not transposed:
        pads = [(p, p) for p in padding]
        size = [
            (i + 2 * p - d * (k - 1) - 1) // s + 1
            for i, p, d, k, s in zip(x.shape[2:], padding, dilation, kernel, stride)
        ]
        tiny = max(x.shape[2:]) <= 2 and max(kernel) > 1
        if x.size and w.size and (tiny or (max(kernel) == 1 and not any(padding))):
            return _by_patches(x, w, size, stride, padding, dilation, groups, level)
        return _xla(x, w, stride, pads, [1] * n, dilation, groups, level)
    # A transposed convolution is a plain one with the kernel flipped, in and out exchanged, over a spread-out input.
    i, o = w.shape[0], w.shape[1]
    w = w.reshape(groups, i // groups, o, *kernel).swapaxes(1, 2).reshape(groups * o, i // groups, *kernel)
    w = jnp.flip(w, range(2, w.ndim))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel)]
    pads = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding)]
    return _xla(x, w, [1] * n, pads, stride, dilation, groups, level)


def _xla(x, w, stride, pads, spread, dilation, groups, level):
    return lax.conv_general_dilated(
        x,
        w,
        stride,
        pads,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=level,
    )


def _by_patches(x, w, size, stride, padding, dilation, groups, level):
    """Matrix product of the kernel with the patches, leaving out the taps that see only padding."""
    padded = jnp.pad(x, [(0, 0), (0, 0), *[(p, p) for p in padding]])
    slices, taps = [], []
    for number, tap in enumerate(itertools.product(*map(range, w.shape[2:]))):
        first = [t * d for t, d in zip(tap, dilation)]
        last = [f + (o - 1) * s for f, o, s in zip(first, size, stride)]
        if all(
            any(p <= i < p + n for i in range(f, e + 1, s))
            for f, e, s, p, n in zip(first, last, stride, padding, x.shape[2:])
        ):
            place = tuple(slice(f, e + 1, s) for f, e, s in zip(first, last, stride))
            slices.append(padded[(slice(None), slice(None), *place)])
            taps.append(number)
    batch, channels = x.shape[:2]
    patches = jnp.stack(slices, 2).reshape(batch, groups, channels // groups, len(taps), -1)
    kernel = w.reshape(groups, w.shape[0] // groups, w.shape[1], -1)
    kernel = kernel if len(taps) == kernel.shape[3] else jnp.stack([kernel[..., t] for t in taps], -1)
    y = jnp.einsum("gock,bgckp->bgop", kernel, patches, precision=level)
    return y.reshape(batch, w.shape[0], *size)
