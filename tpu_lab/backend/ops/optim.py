"""Fused optimizers and the gradient scaler, step by step as in PyTorch's CPU kernels (native/cpu/Fused*Kernel.cpp).

Each returns the new values of all written arguments in schema order. Hyperparameters are runtime inputs, so a
schedule never recompiles. Scalars are counted in float64, tensors in their own dtype (half types in float32).
"""

import jax.numpy as jnp
import torch

from tpu_lab.backend.registry import op

aten = torch.ops.aten


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _unscaled(grad, grad_scale):
    return _wide(grad) if grad_scale is None else _wide(grad) / grad_scale.astype(_wide(grad).dtype)


def _narrowed(old, new):
    """The new values in the dtypes of the old."""
    return [n.astype(o.dtype) for o, n in zip(old, new)]


def _unless(found_inf, old, new):
    """All new values, or all old ones when the scaler found an infinity."""
    if found_inf is None:
        return new
    skip = found_inf.reshape(()) == 1
    return [[jnp.where(skip, o, n) for o, n in zip(olds, news)] for olds, news in zip(old, new)]


def _adam(decoupled: bool):
    """Adam (decay added to the gradient) or AdamW (decay taken from the parameter)."""

    def step(
        params, grads, means, squares, maxima, steps, *, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize,
        grad_scale=None, found_inf=None,
    ):  # fmt: skip
        old = params, grads, means, squares, maxima
        new = [], [], [], [], []
        for i, (param, grad, count) in enumerate(zip(params, grads, steps)):
            p, g = _wide(param), _unscaled(grad, grad_scale)
            dtype = p.dtype
            number = lambda v: jnp.asarray(v, jnp.float64).reshape(()).astype(dtype)  # noqa: E731
            stored = g
            g = -g if maximize else g
            if decoupled:
                p = p - number(lr * weight_decay) * p
            else:
                g = g + p * number(weight_decay)
            mean = _wide(means[i])
            mean = mean + number(1 - beta1) * (g - mean)
            square = number(beta2) * _wide(squares[i]) + number(1 - beta2) * g * g
            count = count.astype(jnp.float64)
            top = jnp.maximum(_wide(maxima[i]), square) if amsgrad else square
            denominator = jnp.sqrt(top) / number(jnp.sqrt(1 - beta2**count)) + number(eps)
            p = p - number(lr / (1 - beta1**count)) * mean / denominator
            for values, value in zip(new, (p, stored, mean, square, top)):
                values.append(value)
        new = [_narrowed(o, n) for o, n in zip(old, new)]
        return _unless(found_inf, old, new)

    return step


RUNTIME = ("lr", "beta1", "beta2", "weight_decay", "eps")
op(aten._fused_adam_, aten._fused_adam, runtime=RUNTIME)(_adam(decoupled=False))
op(aten._fused_adamw_, aten._fused_adamw, runtime=RUNTIME)(_adam(decoupled=True))


@op(aten._fused_sgd_, aten._fused_sgd, runtime=("lr", "weight_decay", "momentum", "dampening"))
def fused_sgd(
    params, grads, buffers, *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
    grad_scale=None, found_inf=None,
):  # fmt: skip
    """No buffers, no momentum."""
    old, new = (params, grads, buffers), ([], [], [])
    for i, (param, grad) in enumerate(zip(params, grads)):
        p, g = _wide(param), _unscaled(grad, grad_scale)
        dtype = p.dtype
        number = lambda v: jnp.asarray(v, jnp.float64).reshape(()).astype(dtype)  # noqa: E731
        new[1].append(g)
        g = (-g if maximize else g) + p * number(weight_decay)
        if buffers:
            buffer = g if is_first_step else _wide(buffers[i]) * number(momentum) + g * number(1 - dampening)
            new[2].append(buffer)
            g = g + buffer * number(momentum) if nesterov else buffer
        new[0].append(p - number(lr) * g)
    return _unless(found_inf, old, [_narrowed(o, n) for o, n in zip(old, new)])


def _adagrad(params, grads, sums, steps, *, lr, lr_decay, weight_decay, eps, maximize, grad_scale=None, found_inf=None):
    old, new = (params, grads, sums), ([], [], [])
    for param, grad, total, count in zip(params, grads, sums, steps):
        p, g = _wide(param), _unscaled(grad, grad_scale)
        dtype = p.dtype
        number = lambda v: jnp.asarray(v, jnp.float64).reshape(()).astype(dtype)  # noqa: E731
        new[1].append(g)
        g = (-g if maximize else g) + p * number(weight_decay)
        total = _wide(total) + g * g
        rate = lr / (1 + (count.astype(jnp.float64) - 1) * lr_decay)
        new[0].append(p - number(rate) * g / (jnp.sqrt(total) + number(eps)))
        new[2].append(total)
    return _unless(found_inf, old, [_narrowed(o, n) for o, n in zip(old, new)])


ADAGRAD = {"runtime": ("lr", "lr_decay", "weight_decay", "eps")}
op(aten._fused_adagrad_.tensor_lr, aten._fused_adagrad.tensor_lr, **ADAGRAD)(_adagrad)


@op(aten._fused_adagrad_.default, aten._fused_adagrad.default, **ADAGRAD)
def fused_adagrad(params, grads, sums, steps, **options):
    """This overload's schema writes the steps, too; the kernel leaves them."""
    return [*_adagrad(params, grads, sums, steps, **options), steps]


@op(aten._amp_foreach_non_finite_check_and_unscale_, aten._amp_foreach_non_finite_check_and_unscale)
def unscale(grads, found_inf, inv_scale):
    """Gradients times inv_scale, and 1 in found_inf if one of them was not finite."""
    bad = jnp.zeros((), bool)
    for g in grads:
        bad = bad | ~jnp.all(jnp.isfinite(g))
    scaled = [(_wide(g) * inv_scale.reshape(()).astype(_wide(g).dtype)).astype(g.dtype) for g in grads]
    return scaled, jnp.where(bad, jnp.ones_like(found_inf), found_inf)


@op(aten._amp_update_scale_, aten._amp_update_scale)
def update_scale(scale, tracker, found_inf, growth, backoff, interval):
    """After an infinity the scale backs off; after `interval` good steps it grows, unless it would overflow."""
    bad = found_inf.reshape(()) != 0
    good = tracker + 1
    full = good == interval
    grown = scale * jnp.asarray(growth, scale.dtype)
    grown = jnp.where(full & jnp.isfinite(grown), grown, scale)
    new_scale = jnp.where(bad, scale * jnp.asarray(backoff, scale.dtype), grown)
    return new_scale, jnp.where(bad | full, 0, good).astype(tracker.dtype)
