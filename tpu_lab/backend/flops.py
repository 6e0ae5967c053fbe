"""FLOPs of one ATen call from its shapes, one multiply-add = 2: PyTorch's own formulas (torch.utils.flop_counter), and ours.

Ours are for products that PyTorch has no formula for, and for the gradients of convolutions: there its formula forgets
that a weight's gradient has groups, too. Elementwise work counts 0.
"""

from __future__ import annotations

import math

import torch
from torch.utils import flop_counter

aten = torch.ops.aten


def _mv(matrix, vector, *_, **__):
    return 2 * math.prod(matrix.shape)


def _addmv(_, matrix, vector, *__, **___):
    return 2 * math.prod(matrix.shape)


def _dot(a, b, *_, **__):
    return 2 * a.numel()


def _addbmm(_, a, b, *__, **___):
    """a: [batch, n, m], b: [batch, m, p]."""
    return 2 * math.prod(a.shape) * b.shape[-1]


def _grouped_mm(a, b, offs=None, *_, **__):
    """What is in groups meets one matrix of the other side each: [M, K] or [G, M, K] with [K, N] or [G, K, N]."""
    if a.dim() == 3 and offs is not None:
        return 2 * math.prod(b.shape) * a.shape[1]
    return 2 * math.prod(a.shape) * b.shape[-1]


def _convolution_backward(gradient, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, mask, **_):
    """Each of the two gradients is as many multiply-adds as the convolution itself: weight is [out, in / groups, ...]."""
    places = x if transposed else gradient
    once = 2 * x.shape[0] * math.prod(places.shape[2:]) * math.prod(weight.shape)
    return once * (mask[0] + mask[1])


OURS = {
    aten.mv: _mv, aten.addmv: _addmv, aten.dot: _dot, aten.vdot: _dot, aten.addbmm: _addbmm,
    aten._grouped_mm: _grouped_mm,
    aten.convolution_backward: _convolution_backward,
}  # fmt: skip


def formula(packet):
    """f(*arguments, out_val=results) -> FLOPs for an op's functional form, over meta tensors; None if there is none."""
    return OURS.get(packet) or flop_counter.flop_registry.get(packet)


def count(found, args, kwargs, out) -> int:
    """FLOPs of a call; 0 where the formula is None or does not know this form of the call: no figure rather than a wrong one.

    out: its result on meta, a tuple of several.
    """
    if found is None or out is None:
        return 0
    try:
        return int(found(*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=out))
    except Exception:
        return 0
