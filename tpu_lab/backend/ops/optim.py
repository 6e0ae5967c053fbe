"""Fused optimizers and the gradient scaler, step by step as in PyTorch's CPU kernels (native/cpu/Fused*Kernel.cpp).

Each returns the new values of all written arguments in schema order. Hyperparameters are runtime inputs in
float64, so a schedule never recompiles; tensors are counted in their own dtype (half types in float32).
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


def _numbers(params, *values):
    """Dtype -> the hyperparameters in it, for the dtypes of the parameters: each is narrowed once."""
    return {t: [jnp.asarray(v).reshape(()).astype(t) for v in values] for t in dict.fromkeys(_wide(p).dtype for p in params)}


def _counts(steps, dtype):
    """The step counts as one vector: one instruction for all of them."""
    return jnp.stack([count.reshape(()).astype(dtype) for count in steps])


def _correction(beta, counts):
    """1 - beta ** counts, to the last digits also in float32. PyTorch's kernels take powers in float64 for that, but a
    TPU emulates float64: a power takes hundreds of instructions."""
    return -jnp.expm1(counts * jnp.log1p((beta - 1).astype(counts.dtype)))


def _adam(decoupled: bool):
    """Adam (decay added to the gradient) or AdamW (decay taken from the parameter)."""

    def step(
        params, grads, means, squares, maxima, steps, *, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize,
        grad_scale=None, found_inf=None,
    ):  # fmt: skip
        old = params, grads, means, squares, maxima
        new = [], [], [], [], []
        numbers = _numbers(params, lr, weight_decay, lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps)
        kinds = {t: _counts(steps, t) for t in numbers}
        rates = {t: numbers[t][0] / _correction(beta1, counts) for t, counts in kinds.items()}
        roots = {t: jnp.sqrt(_correction(beta2, counts)) for t, counts in kinds.items()}
        for i, (param, grad) in enumerate(zip(params, grads)):
            p, g = _wide(param), _unscaled(grad, grad_scale)
            _, decay, shrink, move, keep, add, epsilon = numbers[p.dtype]
            stored = g
            g = -g if maximize else g
            if decoupled:
                p = p - shrink * p
            else:
                g = g + p * decay
            mean = _wide(means[i])
            mean = mean + move * (g - mean)
            square = keep * _wide(squares[i]) + add * g * g
            top = jnp.maximum(_wide(maxima[i]), square) if amsgrad else square
            p = p - rates[p.dtype][i] * mean / (jnp.sqrt(top) / roots[p.dtype][i] + epsilon)
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
    numbers = _numbers(params, lr, weight_decay, momentum, 1 - dampening)
    for i, (param, grad) in enumerate(zip(params, grads)):
        p, g = _wide(param), _unscaled(grad, grad_scale)
        rate, decay, keep, add = numbers[p.dtype]
        new[1].append(g)
        g = (-g if maximize else g) + p * decay
        if buffers:
            buffer = g if is_first_step else _wide(buffers[i]) * keep + g * add
            new[2].append(buffer)
            g = g + buffer * keep if nesterov else buffer
        new[0].append(p - rate * g)
    return _unless(found_inf, old, [_narrowed(o, n) for o, n in zip(old, new)])


def _adagrad(params, grads, sums, steps, *, lr, lr_decay, weight_decay, eps, maximize, grad_scale=None, found_inf=None):
    old, new = (params, grads, sums), ([], [], [])
    numbers = _numbers(params, lr, weight_decay, lr_decay, eps)
    rates = {t: rate / (1 + (_counts(steps, t) - 1) * slower) for t, (rate, _, slower, _) in numbers.items()}
    for i, (param, grad, total) in enumerate(zip(params, grads, sums)):
        p, g = _wide(param), _unscaled(grad, grad_scale)
        _, decay, _, epsilon = numbers[p.dtype]
        new[1].append(g)
        g = (-g if maximize else g) + p * decay
        total = _wide(total) + g * g
        new[0].append(p - rates[p.dtype][i] * g / (jnp.sqrt(total) + epsilon))
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
