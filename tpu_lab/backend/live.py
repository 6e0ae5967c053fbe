"""Who is alive on the device while a profile is active: a weak reference per array, no scanning.

When an array dies, its reference is appended to the trace's log, by C code alone; writer.py finds it there between the
launches and makes the curve of live bytes and the life of each array of it. A program's own scratch memory is the
compiler's and not in here (Program.scratch tells it).
"""

from __future__ import annotations

import functools
import math
import weakref

import jax

from tpu_lab import trace
from tpu_lab.backend import writer

_owner: trace.Trace | None = None


def known(array) -> weakref.ref | None:
    """The reference that watches an array for the active trace."""
    for ref in weakref.getweakrefs(array) if _owner is not None else ():
        if getattr(ref.__callback__, "__self__", None) is _owner.log:
            return ref
    return None


def unseen(array) -> bool:
    """Is it an array that nobody watches: no numpy, no scalar of a compiled graph's?"""
    return isinstance(array, jax.Array) and not array.is_deleted() and known(array) is None


def watch(active: trace.Trace, array) -> tuple[weakref.ref, int]:
    """A reference that watches an array, and the array's bytes."""
    return weakref.ref(array, active.log.append), nbytes(array.shape, array.dtype)


@functools.lru_cache(maxsize=4096)
def nbytes(shape, dtype) -> int:
    """`array.nbytes`, which is slow."""
    return math.prod(shape) * dtype.itemsize


def begin(active: trace.Trace, but=()) -> None:
    """Take over: every array alive now was made before the profile, `but` these."""
    global _owner
    if _owner is active:
        return
    _owner, new = active, {id(array) for array in but}
    write = writer.of(active)
    for array in jax.live_arrays():
        if id(array) not in new and known(array) is None:
            write.older(*watch(active, array))


def came(array) -> None:
    """An array has come from the host, or was made for memory that nobody had written."""
    if trace.active is not None and trace.active is _owner and known(array) is None:
        _owner.log.append((*watch(_owner, array), "inputs"))


def name(array, owner: str, called: str) -> None:
    """Say who holds an array: "weights", "optimizer", "gradients"."""
    ref = known(array)
    if ref is not None and _owner is not None:
        _owner.log.append((ref, None, owner, called))


def finish(active: trace.Trace) -> None:
    """The trace ends: what is still alive gets its record, with no end."""
    global _owner
    if _owner is active:
        writer.of(active).finish()
        _owner = None
