"""Random numbers. `key` is a jax PRNG key, new at each call; uniform numbers lie in [0, 1), as in PyTorch."""

import jax.numpy as jnp
import torch
from jax import random

from tpu_lab.backend import dtypes
from tpu_lab.backend.bounds import never
from tpu_lab.backend.registry import op

aten = torch.ops.aten
RANDOM = {"kind": "random", "rng": True, "out": True}


def wide(dtype: torch.dtype):
    """The jax dtype in which numbers of this dtype are drawn: half types in float32, integers in float32, too."""
    return dtypes.to_jax(dtypes.opmath(dtype)) if dtype.is_floating_point else jnp.float32


def uniform_below_one(key, out):
    """Uniform in [0, 1) in the output's own dtype, so that rounding cannot reach 1."""
    shape, dtype = out[0]
    exact = dtypes.to_jax(dtype) if dtype.is_floating_point and dtype.itemsize > 1 else jnp.float32
    return random.uniform(key, shape, exact)


def normal_numbers(key, out):
    shape, dtype = out[0]
    if dtype.is_complex:  # real and imaginary part of variance 1/2, which is jax's rule as well
        return random.normal(key, shape, dtypes.to_jax(dtype))
    return random.normal(key, shape, wide(dtype))


@op(aten.rand.default, aten.rand.generator, aten.rand_like, **RANDOM)
def rand(*args, key, out, **kwargs):
    return uniform_below_one(key, out)


@op(aten.randn.default, aten.randn.generator, aten.randn_like, **RANDOM)
def randn(*args, key, out, **kwargs):
    return normal_numbers(key, out)


@op(aten.normal_functional, aten.normal_, kind="random", rng=True)
def normal_like(x, mean=0.0, std=1.0, *, key):
    """Also for `normal_` itself, whose functional twin has another name than its own."""
    return normal_numbers(key, ((x.shape, dtypes.to_torch(x.dtype)),)) * std + mean


def _deviation(mean, std=1.0, *_, **__):
    return [never(~(std >= 0), "normal expects all elements of std >= 0.0")] if hasattr(std, "dtype") else []


@op(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, bounds=_deviation, **RANDOM)
def normal(mean, std=1.0, *, key, out):
    return normal_numbers(key, out) * std + mean


@op(aten.normal.float_float, **RANDOM)
def normal_sized(mean, std, size, dtype=None, *, key, out):
    return normal_numbers(key, out) * std + mean


@op(aten.uniform, **RANDOM)
def uniform(x, low=0.0, high=1.0, *, key, out):
    return uniform_below_one(key, out) * (high - low) + low


@op(aten.log_normal, **RANDOM)
def log_normal(x, mean=1.0, std=2.0, *, key, out):
    return jnp.exp(normal_numbers(key, out) * std + mean)


@op(aten.exponential, **RANDOM)
def exponential(x, rate=1.0, *, key, out):
    return random.exponential(key, out[0][0], wide(out[0][1])) / rate


@op(aten.geometric, **RANDOM)
def geometric(x, p, *, key, out):
    """Trials up to and with the first success: 1, 2, ..."""
    u = 1 - random.uniform(key, out[0][0], wide(out[0][1]))  # in (0, 1]
    return jnp.maximum(jnp.ceil(jnp.log(u) / jnp.log1p(-p)), 1)


@op(aten.cauchy, **RANDOM)
def cauchy(x, median=0.0, sigma=1.0, *, key, out):
    return random.cauchy(key, out[0][0], wide(out[0][1])) * sigma + median


def _probability(p, *_, **__):
    return [never(~((p >= 0) & (p <= 1)), "Expected p_in >= 0 && p_in <= 1 to be true")]


def _second_probability(x, p=0.5, **__):
    return _probability(p) if hasattr(p, "dtype") else []  # a number is looked at before: refusals.py


@op(aten.bernoulli.default, bounds=_probability, **RANDOM)
def bernoulli(p, *, key, out):
    return random.bernoulli(key, p.astype(wide(out[0][1])), out[0][0])


@op(aten.bernoulli.p, aten.bernoulli.Tensor, bounds=_second_probability, **RANDOM)
def bernoulli_like(x, p=0.5, *, key, out):
    return random.bernoulli(key, jnp.asarray(p, jnp.float32), out[0][0])


def integers(key, shape, low, high):
    """Uniform integers in [low, high), both Python ints within int64."""
    if high > 2**63 - 1:  # up to the largest int64 itself: the range has no int64 end
        bits = random.bits(key, shape, jnp.uint64)
        span = high - low
        bits = bits if span >= 2**64 else bits % jnp.uint64(span)
        return bits.astype(jnp.int64) + low
    return random.randint(key, shape, low, high, jnp.int64)


@op(aten.randint.default, aten.randint.generator, **RANDOM)
def randint(high, size, dtype=None, *, key, out):
    return integers(key, out[0][0], 0, high)


@op(aten.randint.low, aten.randint.low_generator, **RANDOM)
def randint_from(low, high, size, dtype=None, *, key, out):
    return integers(key, out[0][0], low, high)


@op(aten.randint_like.default, aten.randint_like.generator, **RANDOM)
def randint_like(x, high, dtype=None, *, key, out):
    return integers(key, out[0][0], 0, high)


@op(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype, **RANDOM)
def randint_like_from(x, low, high, dtype=None, *, key, out):
    return integers(key, out[0][0], low, high)


MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _end(dtype) -> int:
    """One past the largest number that `random_()` draws: floats up to where all integers are exact."""
    if dtype in MANTISSA:
        return 2 ** MANTISSA[dtype] + 1
    return 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1


@op(aten.random.default, **RANDOM)
def random_(x, *, key, out):
    return integers(key, out[0][0], 0, _end(out[0][1]))


@op(aten.random.to, **RANDOM)
def random_to(x, to, *, key, out):
    return integers(key, out[0][0], 0, to)


@op(getattr(aten.random, "from"), **RANDOM)
def random_from(x, low, to, *, key, out):
    return integers(key, out[0][0], low, _end(out[0][1]) if to is None else to)


@op(aten.randperm.default, aten.randperm.generator, aten.randperm.out, aten.randperm.generator_out, **RANDOM)
def randperm(n, dtype=None, *, key, out):
    return random.permutation(key, n)


def _weights(p, *_, **__):
    return [
        never(~(p >= 0) | jnp.isinf(p), "probability tensor contains either `inf`, `nan` or element < 0"),
        never(p.sum(-1) <= 0, "invalid multinomial distribution (sum of probabilities <= 0)"),
    ]


@op(aten.multinomial, bounds=_weights, **RANDOM)
def multinomial(p, count, replacement=False, *, key, out):
    """Indices by weight; without replacement by the Gumbel top-k trick (Vieira 2014; Kool et al. 2019)."""
    logits = jnp.log(p.astype(jnp.promote_types(p.dtype, jnp.float32)))
    if replacement:
        draws = random.categorical(key, logits, axis=-1, shape=(count, *logits.shape[:-1]))
        return jnp.moveaxis(draws, 0, -1)
    noisy = logits + random.gumbel(key, logits.shape, logits.dtype)
    return jnp.argsort(-noisy, axis=-1)[..., :count]


@op(aten.native_dropout, **RANDOM)
def native_dropout(x, p, train=None, *, key, out):
    """(output, mask): kept values are divided by 1 - p; `train=None` means training."""
    if train is False:
        return x, jnp.ones(x.shape, bool)
    if p == 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    mask = random.bernoulli(key, jnp.float32(1 - p), x.shape)
    return jnp.where(mask, x * jnp.asarray(1 / (1 - p), x.dtype), x * 0), mask


@op(aten._fused_dropout, **RANDOM)
def fused_dropout(x, keep, *, key, out):
    """(output, mask of bytes): here the number is the share that is kept."""
    output, mask = native_dropout(x, 1 - keep, True, key=key, out=out)
    return output, mask
