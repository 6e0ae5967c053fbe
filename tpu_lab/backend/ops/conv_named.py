"""Convolutions under the names of PyTorch's own CPU kernels, which take the kernel's size and no groups."""

import torch

from tpu_lab.backend import precision
from tpu_lab.backend.ops.conv import convolution, convolution_backward
from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _kernel(weight, kernel_size):
    """[out, in, *kernel] of a weight that may come as the matrix [out, in * taps]."""
    return weight if weight.ndim > 2 else weight.reshape(weight.shape[0], -1, *kernel_size)


@op(aten._slow_conv2d_forward.default, aten._slow_conv2d_forward.output, kind="matmul")
@op(aten.slow_conv3d_forward.default, aten.slow_conv3d_forward.output, kind="matmul")
@op(aten.slow_conv_dilated2d.default, aten.slow_conv_dilated3d.default, kind="matmul")
def slow_conv(x, weight, kernel_size, bias=None, stride=(1,), padding=(0,), dilation=(1,)):
    w = _kernel(weight, kernel_size)
    return convolution(x, w, bias, stride, padding, dilation, False, (0,), 1)


@op(aten.slow_conv_transpose2d, aten.slow_conv_transpose3d, kind="matmul")
def slow_conv_transpose(
    x, weight, kernel_size, bias=None, stride=(1,), padding=(0,), output_padding=(0,), dilation=(1,)
):
    y = convolution(x, weight, bias, stride, padding, dilation, True, output_padding, 1)
    return y[None] if x.ndim == 3 else y  # PyTorch keeps a batch of one in two dimensions


@op(aten._slow_conv2d_backward.output_mask, aten._slow_conv2d_backward.grad_input, kind="matmul")
def slow_conv2d_backward(grad, x, weight, kernel_size, stride, padding, output_mask=(True, True, True)):
    """(grad of x, of the weight, of the bias); the form with three `grad_` arguments wants all."""
    w = _kernel(weight, kernel_size)
    gx, gw, gb = convolution_backward(
        grad, x, w, [w.shape[0]], stride, padding, (1,), False, (0,), 1, list(output_mask)
    )
    return gx, None if gw is None else gw.reshape(weight.shape), gb


@op(aten.linear_backward, kind="matmul")
def linear_backward(x, grad, weight, output_mask):
    """(grad of x, of the weight [out, in], of the bias)."""
    rows, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return (
        precision.matmul(grad, weight) if output_mask[0] else None,
        precision.matmul(rows.T, flat) if output_mask[1] else None,
        rows.sum(0) if output_mask[2] else None,
    )
