"""Connectionist temporal classification (Graves et al. 2006): the forward variables by one scan over time.

A target of S labels becomes 2 S + 1 places with blanks around each label. Sums are of logarithms; `NEVER` stands for
log 0 inside, since gradients of real infinities are NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpu_lab.backend.opmath import wide
from tpu_lab.backend.registry import op

aten = torch.ops.aten
NEVER = -1e30


def _places(targets, target_lengths, blank):
    """[batch, 2 S + 1] labels with blanks between; `targets` is [batch, longest] or all of them one after the other."""
    longest, targets = max(target_lengths, default=0), targets.astype(jnp.int32)
    if targets.ndim == 1:
        starts = np.cumsum([0, *target_lengths[:-1]])
        at = np.minimum(starts[:, None] + np.arange(longest), max(targets.shape[0] - 1, 0))
        targets = targets[at] if targets.shape[0] else jnp.zeros((len(target_lengths), longest), jnp.int32)
    places = jnp.full((len(target_lengths), 2 * longest + 1), blank, jnp.int32)
    return places.at[:, 1::2].set(targets[:, :longest])


def _forward(log_probs, places, input_lengths, target_lengths):
    """(negative log likelihood [batch], log alpha [batch, time, places])."""
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(places, (log_probs.shape[0], *places.shape)), 2)
    emitted = jnp.maximum(emitted, NEVER)
    count = places.shape[1]
    number = jnp.arange(count)
    ends = 2 * jnp.asarray(target_lengths, jnp.int32)[:, None]
    jump = (number >= 2) & (number % 2 == 1) & (places != jnp.roll(places, 2, 1))  # over a blank, to another label

    def step(alpha, emitted):
        moved = [jnp.pad(alpha, ((0, 0), (k, 0)), constant_values=NEVER)[:, :count] for k in (1, 2)]
        ways = jnp.stack([alpha, moved[0], jnp.where(jump, moved[1], NEVER)])
        alpha = jnp.maximum(jax.nn.logsumexp(ways, 0) + emitted, NEVER)
        return alpha, alpha

    first = jnp.where((number < 2) & (number <= ends), emitted[0], NEVER)
    _, rest = jax.lax.scan(step, first, emitted[1:])
    alphas = jnp.concatenate([first[None], rest]).swapaxes(0, 1)
    at_end = jnp.asarray(np.maximum(np.array(input_lengths) - 1, 0), jnp.int32)[:, None, None]
    last = jnp.take_along_axis(alphas, at_end, 1)[:, 0]
    final = jnp.take_along_axis(last, jnp.concatenate([ends, jnp.maximum(ends - 1, 0)], 1), 1)
    final = jnp.stack([final[:, 0], jnp.where(ends[:, 0] > 0, final[:, 1], NEVER)])
    return -jax.nn.logsumexp(final, 0), alphas


@op(aten._ctc_loss.default, kind="reduce")
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """log_probs: [time, batch, classes] -> (negative log likelihood [batch], log alpha [batch, time, 2 S + 1])."""
    places = _places(targets, target_lengths, blank)
    nll, alphas = _forward(wide(log_probs), places, input_lengths, target_lengths)
    impossible = nll > -NEVER / 2
    return (
        jnp.where(impossible, jnp.inf, nll),  # `zero_infinity` is applied by the caller, and in the backward
        jnp.where(alphas < NEVER / 2, -jnp.inf, alphas),
    )


@op(aten._ctc_loss_backward.default, kind="reduce")
def ctc_loss_backward(
    grad, log_probs, targets, input_lengths, target_lengths, nll, log_alpha, blank, zero_infinity=False
):
    """PyTorch's gradient has the softmax's `exp(log_probs)` already in it, and is 0 after the end of each input.

    Where no path fits the input it is NaN, or 0 with `zero_infinity`.
    """
    x, places = wide(log_probs), _places(targets, target_lengths, blank)
    grad = wide(grad)
    pull = jax.vjp(lambda x: _forward(x, places, input_lengths, target_lengths)[0], x)[1](grad)[0]
    time = jnp.arange(x.shape[0])[:, None]
    inside = time < jnp.asarray(np.array(input_lengths), jnp.int32)
    total = jnp.exp(x) * grad[:, None] + pull
    total = jnp.where((nll == jnp.inf)[:, None], 0 if zero_infinity else jnp.nan, total)
    return jnp.where(inside[:, :, None], total, 0)
