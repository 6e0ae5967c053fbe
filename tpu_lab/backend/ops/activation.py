"""Activations and their derivatives, term by term as in PyTorch's kernels (aten/src/ATen/native/cpu/Activation.cpp)."""

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend.opmath import rounded, wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten.relu, promote="result")
def relu(x):
    return jnp.maximum(x, 0)


@op(aten.threshold, promote="result")
def threshold(x, limit, value):
    return jnp.where(x <= limit, jnp.asarray(value, x.dtype), x)


@op(aten.threshold_backward, promote="result")
def threshold_backward(g, x, limit):
    return jnp.where(x <= limit, 0, g)


@op(aten.hardtanh, promote="result")
def hardtanh(x, low=-1, high=1):
    return jnp.clip(x, low, high)


@op(aten.hardtanh_backward, promote="result")
def hardtanh_backward(g, x, low, high):
    return jnp.where((x <= low) | (x >= high), 0, g)


@op(aten.leaky_relu, promote="result")
def leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, x * slope)


@op(aten.leaky_relu_backward, promote="result")
def leaky_relu_backward(g, x, slope, of_result):
    return jnp.where(x > 0, g, g * slope)


@op(aten._prelu_kernel, promote="result")
def prelu(x, weight):
    return jnp.where(x > 0, x, weight * x)


@op(aten._prelu_kernel_backward, promote="result")
def prelu_backward(g, x, weight):
    return jnp.where(x > 0, g, weight * g), jnp.where(x > 0, 0, x * g)


@op(aten.elu, promote="result")
def elu(x, alpha=1, scale=1, input_scale=1):
    return jnp.where(x > 0, x * scale, jnp.expm1(jnp.minimum(x, 0) * input_scale) * alpha * scale)


@op(aten.elu_backward, promote="result")
def elu_backward(g, alpha, scale, input_scale, of_result, x):
    """of_result: x is elu's output, from which exp(input) = output / (alpha * scale) + 1."""
    slope = x + alpha * scale if of_result else alpha * scale * jnp.exp(jnp.minimum(x, 0) * input_scale)
    return jnp.where(x <= 0, g * input_scale * slope, g * scale)


@op(aten.celu, promote="result")
def celu(x, alpha=1.0):
    return elu(x, alpha, 1, 1 / alpha)


@op(aten.sigmoid_backward, promote="result")
def sigmoid_backward(g, y):
    return g * jnp.conj((1 - y) * y)


@op(aten.tanh_backward, promote="result")
def tanh_backward(g, y):
    return g * jnp.conj(1 - y * y)


@op(aten.silu, promote="result")
def silu(x):
    return x / (1 + jnp.exp(-x))


@op(aten.silu_backward, promote="result")
def silu_backward(g, x):
    s = jax.nn.sigmoid(x)
    return g * s * (1 + x * (1 - s))


@op(aten.mish, promote="result")
def mish(x):
    return x * jnp.tanh(jnp.log1p(jnp.exp(x)))


@op(aten.mish_backward, promote="result")
def mish_backward(g, x):
    t = jnp.tanh(jnp.log1p(jnp.exp(x)))
    return g * (t + x * jax.nn.sigmoid(x) * (1 - t * t))


KAPPA = 0.044715  # of the tanh approximation of GELU, Hendrycks & Gimpel 2016


@op(aten.gelu, promote="result")
def gelu(x, approximate="none"):
    if approximate == "tanh":
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + KAPPA * x * x * x)))
    return x * 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))


@op(aten.gelu_backward, promote="result")
def gelu_backward(g, x, approximate="none"):
    if approximate == "tanh":
        beta = math.sqrt(2 / math.pi)
        t = jnp.tanh(beta * (x + KAPPA * x * x * x))
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * beta * (1 + 3 * KAPPA * x * x))
    cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    return g * (cdf + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


@op(aten.softplus, promote="result")
def softplus(x, beta=1, threshold=20):
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta)


@op(aten.softplus_backward, promote="result")
def softplus_backward(g, x, beta, threshold):
    z = jnp.exp(x * beta)
    return jnp.where(x * beta > threshold, g, g * z / (z + 1))


@op(aten.log_sigmoid_forward, promote="result", out=True)
def log_sigmoid_forward(x, out=None):
    """(output, buffer): the buffer holds exp(-|x|), or nothing when PyTorch made it empty."""
    z = jnp.exp(-jnp.abs(x))
    shape = out[1][0] if out is not None else x.shape
    return jnp.minimum(x, 0) - jnp.log1p(z), z if tuple(shape) == x.shape else jnp.zeros(shape, x.dtype)


@op(aten.log_sigmoid_backward)
def log_sigmoid_backward(g, x, buffer):
    z = jnp.exp(-jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
    negative = x < 0
    return g * (jnp.where(negative, 1, 0) - jnp.where(negative, 1, -1) * (z / (1 + z)))


@op(aten.hardswish, promote="result")
def hardswish(x):
    return x * jnp.clip(x + 3, 0, 6) / 6


@op(aten.hardswish_backward, promote="result")
def hardswish_backward(g, x):
    return jnp.where(x <= -3, 0, jnp.where(x < 3, g * (x / 3 + 0.5), g))


@op(aten.hardsigmoid, promote="result")
def hardsigmoid(x):
    return jnp.clip(x + 3, 0, 6) / 6


@op(aten.hardsigmoid_backward, promote="result")
def hardsigmoid_backward(g, x):
    return jnp.where((x > -3) & (x < 3), g / 6, 0)


@op(aten.hardshrink, promote="result")
def hardshrink(x, limit=0.5):
    return jnp.where((x >= -limit) & (x <= limit), 0, x)


@op(aten.softshrink, promote="result")
def softshrink(x, limit=0.5):
    return jnp.where(x > limit, x - limit, jnp.where(x < -limit, x + limit, x * 0))


@op(aten.hardshrink_backward, aten.softshrink_backward, promote="result")
def shrink_backward(g, x, limit):
    return jnp.where((x >= -limit) & (x <= limit), 0, g)


@op(aten.glu, promote="result")
def glu(x, dim=-1):
    a, b = jnp.split(x, 2, axis=dim)
    return a * jax.nn.sigmoid(b)


@op(aten.glu_backward, promote="result", out=True)
def glu_backward(g, x, dim, out=None):
    a, b = jnp.split(x, 2, axis=dim)
    s = rounded(jax.nn.sigmoid(b), out[0][1])  # PyTorch keeps it in the result's own memory
    return jnp.concatenate([g * s, g * a * s * (1 - s)], axis=dim)


@op(aten.logit, promote="float")
def logit(x, eps=None):
    x = x if eps is None else jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


@op(aten.logit_backward, promote="float")
def logit_backward(g, x, eps=None):
    low, high, outside = (0, 1, jnp.nan) if eps is None else (eps, 1 - eps, 0)
    return jnp.where((x < low) | (x > high), outside, g / (x * (1 - x)))


@op(aten.native_dropout_backward, promote="float")
def native_dropout_backward(g, mask, scale):
    return g * mask * scale


@op(aten.glu_jvp)
def glu_jvp(y, x, dx, dim):
    """The tangent of `glu` at x in direction dx."""
    return jax.jvp(lambda x: glu(x, dim), (wide(x),), (wide(dx),))[1]


@op(aten.glu_backward_jvp)
def glu_backward_jvp(grad_x, grad_glu, x, dgrad_glu, dx, dim):
    """The tangent of `glu_backward` in direction (dgrad_glu, dx)."""

    def gradient(grad, x):
        return jax.vjp(lambda x: glu(x, dim), x)[1](grad)[0]

    return jax.jvp(gradient, (wide(grad_glu), wide(x)), (wide(dgrad_glu), wide(dx)))[1]
