"""Indices out of range are never a guess: IndexError at the op in debug mode, else at the next point that waits.

A lowering that takes indices says in `bounds` which of its arguments must lie where. The program that runs it then
gives one more small output, for each such argument the index that is furthest out, or FINE. It costs no launch: a
fused or compiled program gives it in place of its `done` scalar. And no wait: the outputs are kept here with the lines
of their ops, and read where the host waits anyway (item, a copy to the CPU, synchronize), as far as they are ready.
All that is found wrong at once is one error. Another thread's index is told whoever waits first, as it may be about to
read the result, and its own thread once more.
Other values that PyTorch refuses, a zero that integers are divided by, go the same way and are RuntimeErrors (`never`).
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FINE = -(1 << 63)
LIMIT = 256  # outputs kept unread
SAID = 4  # wrong indices that one error names


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
    thread: int  # that called the op: in fused mode another one may launch it

    def ours(self) -> bool:
        """Does this thread answer for it: it called the op, or whoever did is no Python thread (autograd's), or has ended?"""
        found = threading._active.get(self.thread)
        return self.thread == threading.get_ident() or found is None or isinstance(found, threading._DummyThread)


class Unread:
    """A launch's output that nobody has looked at, or only another thread than those that called its ops."""

    __slots__ = ("checks", "output", "told")

    def __init__(self, output, checks: list[Check]):
        self.output, self.told = output, False
        self.checks: list[Check | None] = [*checks]  # None: the thread that called the op knows


_unread: deque[Unread] = deque()  # oldest first


def real(bounds) -> list[Bound]:
    """Those that can be wrong: integers, and at least one."""
    return [b for b in bounds if b.index is not None and b.index.dtype.kind in "iu" and b.index.size]


def worst(bound: Bound):
    """An int64 scalar: FINE, or the largest index if it is too large, else the smallest."""
    index = bound.index.astype(jnp.int64)
    if bound.ignore is not None:
        index = jnp.where(index == bound.ignore, 0, index)
    low, high = jnp.maximum(index.min(), FINE + 1), index.max()  # what is FINE itself is out by as much
    lowest = -bound.size if bound.negative else 0
    return jnp.where(high >= bound.size, high, jnp.where(low < lowest, low, FINE))


def watch(output, checks: list[Check]) -> None:
    """Keep a launch's output (int64, one element a check) until the host waits."""
    if not isinstance(output, jax.Array):
        return  # a rehearsal: shapes without values
    _unread.append(Unread(output, checks))
    if len(_unread) > LIMIT:
        _forget_fine()
        if len(_unread) > LIMIT:  # LIMIT launches in flight: the oldest has finished but for a moment
            jax.block_until_ready(_unread[0].output)
            _forget_fine()


def _forget_fine() -> None:
    """Drop what is ready and right; what is wrong stays for the next wait."""
    kept = [u for u in _unread if not u.output.is_ready() or (np.asarray(u.output) != FINE).any()]
    _unread.clear()
    _unread.extend(kept[: 2 * LIMIT])


def look(wait: bool = False) -> None:
    """The host has waited: raise OutOfRange (RuntimeError for `never`) for what is wrong in the launches that are ready.

    wait: the device has finished everything.
    """
    if not _unread:
        return
    later, wrong = [], []
    while _unread:
        unread = _unread.popleft()
        if not wait and not unread.output.is_ready():
            later.append(unread)
            continue
        values = np.asarray(unread.output).reshape(-1).tolist()
        found = [(v, c) for v, c in zip(values, unread.checks, strict=True) if v != FINE and c is not None]
        wrong.extend((v, c) for v, c in found if not unread.told or c.ours())
        unread.checks = [None if c is None or c.ours() else c for c in unread.checks]
        unread.told = True
        if any(v != FINE and c is not None for v, c in zip(values, unread.checks, strict=True)):
            later.append(unread)
    _unread.extend(later)
    if wrong:
        kind = OutOfRange if "{}" in wrong[0][1].text else RuntimeError
        more = [_sentence(*w) for w in wrong[1:SAID]] + ([f"and {len(wrong) - SAID} more"] if len(wrong) > SAID else [])
        raise kind("\nalso: ".join([_sentence(*wrong[0]), *more]))


@atexit.register
def _at_the_end() -> None:
    """A program that ends without having waited is told, too: too late to raise."""
    try:
        look(wait=True)
    except (OutOfRange, RuntimeError) as error:
        kind = "IndexError" if isinstance(error, IndexError) else "RuntimeError"
        print(f"{kind}, found when the program ended, as nothing had waited: {error}", file=sys.stderr)


def _sentence(value: int, check: Check) -> str:
    site = check.site
    where = f" at {site.file}:{site.line}: {site.code}" if site.file else ""
    return f"{check.text.format(value)}\n{check.op.removesuffix('.default')}{where}"
