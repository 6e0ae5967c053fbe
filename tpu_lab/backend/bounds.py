"""Indices out of range are never a guess: IndexError at the op in debug mode, else at the next point that waits.

A lowering that takes indices says in `bounds` which of its arguments must lie where. The program that runs it then
gives one more small output, for each such argument the index that is furthest out, or FINE. It costs no launch: a
fused or compiled program gives it in place of its `done` scalar. And no wait: the outputs are kept here with the lines
of their ops, and read where the host waits anyway (item, a copy to the CPU, synchronize), as far as they are ready.
Other values that PyTorch refuses, a zero that integers are divided by, go the same way and are RuntimeErrors (`never`).
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FINE = -(1 << 63)
LIMIT = 256  # outputs kept unread


class OutOfRange(IndexError, RuntimeError):
    """An index that is not there. PyTorch's CPU kernels raise one of the two, depending on the op."""


class Bound(NamedTuple):
    """`index` (an integer array) must lie in [0, size), with `negative` in [-size, size); `ignore` is always right."""

    index: Any
    size: int
    words: str = "index {} is out of bounds for dimension {dim} with size {size}"  # PyTorch's; {} is the index
    dim: int = 0
    negative: bool = False
    ignore: int | None = None

    @property
    def text(self) -> str:
        """The words with a {} left for the index."""
        return self.words.replace("{dim}", str(self.dim)).replace("{size}", str(self.size))


def never(wrong, words: str) -> Bound:
    """`wrong` (a boolean array) must be false everywhere. The words name no index: then it is a RuntimeError."""
    return Bound(wrong.astype(jnp.int32), 1, words)


class Check(NamedTuple):
    """What one element of a launch's output is about."""

    text: str
    op: str
    site: tuple  # where.Site


_unread: deque = deque()  # (output, [Check]): oldest first


def real(bounds) -> list[Bound]:
    """Those that can be wrong: integers, and at least one."""
    return [b for b in bounds if b.index is not None and b.index.dtype.kind in "iu" and b.index.size]


def worst(bound: Bound):
    """An int64 scalar: FINE, or the largest index if it is too large, else the smallest."""
    index = bound.index.astype(jnp.int64)
    if bound.ignore is not None:
        index = jnp.where(index == bound.ignore, 0, index)
    low, high = index.min(), index.max()
    lowest = -bound.size if bound.negative else 0
    return jnp.where(high >= bound.size, high, jnp.where(low < lowest, low, FINE))


def watch(output, checks: list[Check]) -> None:
    """Keep a launch's output (int64, one element a check) until the host waits."""
    if not isinstance(output, jax.Array):
        return  # a rehearsal: shapes without values
    _unread.append((output, checks))
    if len(_unread) > LIMIT:
        _forget_fine()
        if len(_unread) > LIMIT:  # LIMIT launches in flight: the oldest has finished but for a moment
            jax.block_until_ready(_unread[0][0])
            _forget_fine()


def _forget_fine() -> None:
    """Drop what is ready and right; what is wrong stays for the next wait."""
    kept = [(o, c) for o, c in _unread if not o.is_ready() or (np.asarray(o) != FINE).any()]
    _unread.clear()
    _unread.extend(kept[: 2 * LIMIT])


def look(wait: bool = False) -> None:
    """The host has waited: raise OutOfRange (RuntimeError for `never`) for the first wrong index among the launches that are ready.

    wait: the device has finished everything.
    """
    if not _unread:
        return
    later = deque()
    while _unread:
        output, checks = _unread.popleft()
        if not wait and not output.is_ready():
            later.append((output, checks))
            continue
        values = np.asarray(output).reshape(-1)
        for value, check in zip(values.tolist(), checks, strict=True):
            if value != FINE:
                _unread.clear()
                raise (OutOfRange if "{}" in check.text else RuntimeError)(_sentence(value, check))
    _unread.extend(later)


def _sentence(value: int, check: Check) -> str:
    site = check.site
    where = f" at {site.file}:{site.line}: {site.code}" if site.file else ""
    return f"{check.text.format(value)}\n{check.op.removesuffix('.default')}{where}"
