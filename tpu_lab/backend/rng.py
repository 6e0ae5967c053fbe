"""Random numbers as data: (seed, counter) is a runtime input of every random op, never a constant of a program.

Each random op takes the next counter; its key is `fold_in(key(seed), counter)`. So a program with dropout compiles
once, and restoring the state (checkpointing) repeats the masks bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

_MASK = (1 << 64) - 1


class Generator:
    """The device's one generator: `seed` and `counter`, both 64-bit; after 2**63 - 1 the counter comes round to -2**63."""

    def __init__(self, seed: int = 0):
        self.seed, self.counter = seed, 0

    def next(self) -> tuple[int, int]:
        """(seed, counter) of the next random op, as signed 64-bit integers."""
        return self.take(1)

    def take(self, count: int) -> tuple[int, int]:
        """(seed, counter) of the next random op, as signed 64-bit integers; the counters of `count` ops are used up."""
        first, self.counter = _signed(self.counter + 1), _signed(self.counter + count)
        return _signed(self.seed), first


default = Generator(torch.initial_seed())


def manual_seed(seed: int) -> None:
    """Set the seed of device "tpu" and restart its sequence."""
    default.seed, default.counter = int(seed) & _MASK, 0


def initial_seed() -> int:
    """The seed that the current sequence started from."""
    return default.seed


def get_state() -> torch.Tensor:
    """The state as a uint8 CPU tensor of 16 bytes: seed, counter."""
    return torch.tensor([_signed(default.seed), default.counter], dtype=torch.int64).view(torch.uint8).clone()


def set_state(state: torch.Tensor) -> None:
    """Restore what `get_state` gave. ValueError for anything else."""
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.numel() != 16:
        raise ValueError("the rng state of 'tpu' is a uint8 CPU tensor of 16 bytes, as torch.tpu.get_rng_state() gives it")
    seed, counter = state.cpu().contiguous().view(torch.int64).tolist()
    default.seed, default.counter = seed & _MASK, counter


def from_generator(generator: torch.Generator | None) -> tuple[int, int]:
    """(seed, counter) for one op. A CPU generator gives a seed by one draw, so it advances as the user expects."""
    if generator is None:
        return default.next()
    return int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, generator=generator)), 0


def keys(pairs):
    """The keys of many ops at once, made by the instructions of one. pairs: int64[n, 2] of (seed, counter)."""
    return jax.vmap(key)(pairs[:, 0], pairs[:, 1])


def of(ints: list):
    """The key of a random op from its integers: at their end a key that its program made with others, or what makes it."""
    last = jnp.asarray(ints[-1])
    return last if jnp.issubdtype(last.dtype, jax.dtypes.prng_key) else key(jnp.asarray(ints[-2], jnp.int64), last)


def key(seed, counter):
    """The jax key of one op. seed, counter: int64 scalars, traced or not."""
    base = jax.random.wrap_key_data(
        jnp.stack([(seed >> 32).astype(jnp.uint32), seed.astype(jnp.uint32)]), impl="threefry2x32"
    )
    return jax.random.fold_in(jax.random.fold_in(base, (counter >> 32).astype(jnp.uint32)), counter.astype(jnp.uint32))


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >= 1 << 63 else value
