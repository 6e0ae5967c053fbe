"""Bytes alive on the device over program order, while a profile is active, and who holds them: a weak reference per
array, no scanning. An array's life becomes one HeldRecord when it ends.

A program's own scratch memory is the compiler's and not in here (Program.scratch tells it).
"""

from __future__ import annotations

import functools
import math
import weakref

import jax

from tpu_lab import trace
from tpu_lab.backend import memory

_owner: trace.Trace | None = None
_refs: dict[int, _Ref] = {}  # by id of the array: it leaves when the array dies
_total = 0
_Held = trace.HeldRecord


class _Ref(weakref.ref):
    """owner, name: as in HeldRecord. born: position in `Trace.live`. op: what made it, None if no launch did."""

    __slots__ = ("born", "key", "name", "nbytes", "op", "owner")


def _gone(ref: _Ref, taken: bool = False) -> None:
    global _total
    if _refs.get(ref.key) is ref:
        del _refs[ref.key]
        _total -= ref.nbytes
        if (active := _owner) is not None:
            if len(active.held) < active.limit:
                active.held.append(_Held(ref.op, ref.born, len(active.live), ref.nbytes, ref.owner, ref.name, taken))
            else:
                active.dropped += 1


def _add(array, op: int | None, owner: str) -> None:
    global _total
    ref = _Ref(array, _gone)
    ref.key, ref.nbytes = id(array), _nbytes(array.shape, array.dtype)
    ref.born, ref.op, ref.owner, ref.name = len(_owner.live), op, owner, ""  # type: ignore[union-attr]
    _refs[ref.key] = ref
    _total += ref.nbytes


@functools.lru_cache(maxsize=4096)
def _nbytes(shape, dtype) -> int:
    """`array.nbytes`, which is slow."""
    return math.prod(shape) * dtype.itemsize


def begin(active: trace.Trace) -> None:
    """Take over: every array alive now was made before the profile."""
    global _owner, _total
    if _owner is active:
        return
    _owner, _total = None, 0
    _refs.clear()
    _owner = active
    for array in jax.live_arrays():
        _add(array, None, "before")


def point(active: trace.Trace, inputs, outputs, ops, at=None, taken=()) -> None:
    """Add (index of the newest op, live bytes) to `active.live` after a launch.

    inputs, outputs: its arrays. ops: the indices of what it ran; at: for each output the position of its op in there,
    None where that is unknown; without `at` the first op made them all. taken: inputs that were donated.
    """
    if _owner is not active:
        begin(active)
    for array in taken:
        ref = _refs.get(id(array))
        if ref is not None:
            _gone(ref, taken=True)
    refs = _refs
    for array in inputs:
        if id(array) not in refs and isinstance(array, jax.Array) and not array.is_deleted():  # not numpy, a compiled graph's scalars
            _add(array, None, "inputs")
    made = ops[0] if ops else None
    for k, array in enumerate(outputs):
        if at is not None:
            made = ops[at[k]] if at[k] is not None and at[k] < len(ops) else None
        ref = refs.get(id(array))
        if ref is None:
            _add(array, made, "")
        elif ref.owner == "before" and ref.born == len(active.live):  # the very first launch: `begin` saw its results
            ref.op, ref.owner = made, ""
    if len(active.live) < active.limit:
        active.live.append((active.op_count - 1, _total))
    else:
        active.dropped += 1
    if _total > memory.peak:
        memory.peak = _total


def name(array, owner: str, called: str) -> None:
    """Say who holds an array: "weights", "optimizer", "gradients"."""
    ref = _refs.get(id(array))
    if ref is not None:
        ref.owner, ref.name = owner, called


def finish(active: trace.Trace) -> None:
    """The trace ends: what is still alive gets its record, with no end."""
    global _owner
    if _owner is not active:
        return
    if active.live and active.live[-1][1] != _total:  # what went after the last launch
        active.add("live", (active.op_count - 1, _total))
    _owner = None
    for ref in list(_refs.values()):
        active.add("held", trace.HeldRecord(ref.op, ref.born, None, ref.nbytes, ref.owner, ref.name))
    _refs.clear()
