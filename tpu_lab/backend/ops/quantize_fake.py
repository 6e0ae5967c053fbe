"""Fake quantization: floats rounded to the values of an integer grid, (round(x / scale) + zero point) cut to its ends.

`mask` is where nothing was cut: there the gradient goes through. Krishnamoorthi 2018; the learnable scale and zero
point have the gradients of Esser et al. 2019 (LSQ) and Jain et al. 2019 (TQT).
"""

from __future__ import annotations

import jax.numpy as jnp
import torch

from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
SMALLEST = 6.1e-5  # the observer's smallest scale


def _fake(x, scale, zero_point, quant_min, quant_max):
    """(x on the grid, the mask); NaN counts as below the grid."""
    kind, x, scale = x.dtype, wide(x), jnp.asarray(scale, jnp.float32)  # as on the CPU, for float64, too
    zero_point = jnp.asarray(zero_point, x.dtype)
    steps = jnp.round(x * (1 / scale)) + zero_point
    steps = jnp.where(jnp.isnan(steps), -jnp.inf, steps)
    y = (jnp.clip(steps, quant_min, quant_max) - zero_point).astype(jnp.float32) * scale
    return y.astype(kind), (steps >= quant_min) & (steps <= quant_max)


def _along(values, x, axis):
    """[C] -> a shape that broadcasts against x along `axis`."""
    return values.reshape([-1 if a == axis % x.ndim else 1 for a in range(x.ndim)])


@op(aten.fake_quantize_per_tensor_affine_cachemask)
def per_tensor(x, scale, zero_point, quant_min, quant_max):
    return _fake(x, scale, zero_point, quant_min, quant_max)


@op(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams)
def per_tensor_of_tensors(x, scale, zero_point, fake_quant_enabled, quant_min, quant_max):
    y, mask = _fake(x, scale.reshape(-1)[0], zero_point.reshape(-1)[0], quant_min, quant_max)
    on = fake_quant_enabled.reshape(-1)[0] != 0
    return jnp.where(on, y, x), mask | ~on


@op(aten.fake_quantize_per_channel_affine_cachemask)
def per_channel(x, scale, zero_point, axis, quant_min, quant_max):
    return _fake(x, _along(scale, x, axis), _along(zero_point, x, axis), quant_min, quant_max)


# Scale and zero point that are learned


def _whole(zero_point, quant_min, quant_max):
    return jnp.clip(jnp.round(zero_point), quant_min, quant_max)


@op(aten._fake_quantize_learnable_per_tensor_affine)
def learnable_per_tensor(x, scale, zero_point, quant_min, quant_max, grad_factor=1.0):
    whole = _whole(zero_point.reshape(-1)[0], quant_min, quant_max)
    return _fake(x, scale.reshape(-1)[0], whole, quant_min, quant_max)[0]


@op(aten._fake_quantize_learnable_per_channel_affine)
def learnable_per_channel(x, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    whole = _whole(zero_point, quant_min, quant_max)
    return _fake(x, _along(scale, x, axis), _along(whole, x, axis), quant_min, quant_max)[0]


def _learned(grad, x, scale, zero_point, quant_min, quant_max, grad_factor):
    """Gradients of x, and of scale and zero point before their sums."""
    y, mask = _fake(x, scale, zero_point, quant_min, quant_max)
    steps = jnp.round(x * (1 / scale)) + zero_point
    at_end = jnp.where(steps < quant_min, quant_min - zero_point, quant_max - zero_point)
    for_scale = jnp.where(mask, (y - x) / scale, at_end) * grad * grad_factor
    return jnp.where(mask, grad, 0), for_scale, jnp.where(mask, 0, -scale) * grad * grad_factor


@op(aten._fake_quantize_learnable_per_tensor_affine_backward)
def learnable_per_tensor_backward(grad, x, scale, zero_point, quant_min, quant_max, grad_factor=1.0):
    whole = jnp.trunc(jnp.clip(zero_point.reshape(-1)[0] + 0.5, quant_min, quant_max))  # PyTorch rounds otherwise here
    gx, gs, gz = _learned(grad, x, scale.reshape(-1)[0], whole, quant_min, quant_max, grad_factor)
    return gx, gs.sum().reshape(1), gz.sum().reshape(1)


@op(aten._fake_quantize_learnable_per_channel_affine_backward)
def learnable_per_channel_backward(grad, x, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    s, z = _along(scale, x, axis), _along(_whole(zero_point, quant_min, quant_max), x, axis)
    gx, gs, gz = _learned(grad, x, s, z, quant_min, quant_max, grad_factor)
    others = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    return gx, gs.sum(others), gz.sum(others)


# The observer of quantization-aware training: a moving average of the ends, then fake quantization


def _ends(x, row):
    return (x.min(1), x.max(1)) if row else (x.min().reshape(1), x.max().reshape(1))


def _parameters(low, high, quant_min, quant_max, symmetric):
    """(scale, zero point) of a grid from low to high that has an exact zero."""
    low, high = jnp.minimum(low.astype(jnp.float64), 0), jnp.maximum(high.astype(jnp.float64), 0)
    steps = quant_max - quant_min
    if symmetric:
        bottom, top = -(steps // 2 + 1), steps // 2
        scale = jnp.maximum(abs(low / bottom), abs(high / top))
        both = (low < 0) & (high > 0)
        low, high = jnp.where(both, scale * bottom, low), jnp.where(both, scale * top, high)
    scale = ((high - low) / steps).astype(jnp.float32)  # rounded here, as in PyTorch: it decides ties below
    scale = jnp.where((scale == 0) | jnp.isinf(1 / scale), 0.1, scale).astype(jnp.float64)
    small, grow = scale < SMALLEST, SMALLEST / scale
    only_high, only_low = low == 0, high == 0
    new_high = jnp.where(only_high, SMALLEST * steps, jnp.where(only_low, 0, high * grow))
    new_low = jnp.where(only_high, 0, jnp.where(only_low, -SMALLEST * steps, low * grow))
    low, high, scale = (
        jnp.where(small, n, o) for n, o in ((new_low, low), (new_high, high), (SMALLEST, scale))
    )
    from_low, from_high = quant_min - low / scale, quant_max - high / scale
    exact = abs(quant_min) - abs(low / scale) < abs(quant_max) - abs(high / scale)
    zero = jnp.where(exact, from_low, from_high)
    if symmetric:
        zero = jnp.where(both, (quant_min + quant_max) / 2, zero)
    return scale, jnp.clip(jnp.round(zero), quant_min, quant_max)


@op(aten._fused_moving_avg_obs_fq_helper.default)
def observed(
    x, observer_on, fake_quant_on, running_min, running_max, scale, zero_point, averaging_const, quant_min, quant_max,
    ch_axis, per_row_fake_quant=False, symmetric_quant=False,
):  # fmt: skip
    """(x on the grid, mask, then the new running minimum, maximum, scale and zero point)."""
    watch, fake = observer_on.reshape(-1)[0] != 0, fake_quant_on.reshape(-1)[0] != 0
    rows = jnp.moveaxis(x, ch_axis, 0).reshape(x.shape[ch_axis], -1) if per_row_fake_quant else x
    averaging_const, new = jnp.asarray(averaging_const, running_min.dtype), []
    for old, now in zip((running_min, running_max), _ends(rows, per_row_fake_quant)):
        moved = jnp.where(jnp.isinf(old), now, old + averaging_const * (now - old))
        new.append(jnp.where(watch, moved, old).astype(old.dtype))
    s, z = _parameters(*new, quant_min, quant_max, symmetric_quant)
    s, z = s.reshape(scale.shape).astype(scale.dtype), z.reshape(zero_point.shape).astype(zero_point.dtype)
    s, z = jnp.where(fake, s, scale), jnp.where(fake, z, zero_point)
    if per_row_fake_quant:
        y, mask = _fake(x, _along(s, x, ch_axis), _along(z, x, ch_axis), quant_min, quant_max)
    else:
        y, mask = _fake(x, s.reshape(-1)[0], z.reshape(-1)[0], quant_min, quant_max)
    return jnp.where(fake, y, x), mask | ~fake, *new, s, z


@op(aten.dequantize.self)
def dequantize(x):
    """A tensor of floats has nothing to undo."""
    return x
