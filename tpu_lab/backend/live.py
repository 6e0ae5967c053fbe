"""Bytes alive on the device over program order, while a profile is active: a weak reference per array, no scanning.

A program's own scratch memory is the compiler's and not in here (CompileRecord.hlo tells it).
"""

from __future__ import annotations

import weakref

import jax

from tpu_lab import trace

_owner: trace.Trace | None = None
_refs: dict[int, _Ref] = {}  # by id of the array: it leaves when the array dies
_total = 0


class _Ref(weakref.ref):
    __slots__ = ("key", "nbytes")


def _gone(ref: _Ref) -> None:
    global _total
    if _refs.get(ref.key) is ref:
        del _refs[ref.key]
        _total -= ref.nbytes


def _add(array) -> None:
    global _total
    ref = _Ref(array, _gone)
    ref.key, ref.nbytes = id(array), array.nbytes
    _refs[ref.key] = ref
    _total += ref.nbytes


def point(active: trace.Trace, arrays, taken=()) -> None:
    """Add (index of the newest op, live bytes) to `active.live` after a launch.

    arrays: what went in and came out, or None to look at all arrays of the process. taken: inputs that were donated.
    """
    global _owner, _total
    if _owner is not active:
        _owner, _total = active, 0
        _refs.clear()
        arrays = None
    for array in taken:
        ref = _refs.get(id(array))
        if ref is not None:
            _gone(ref)
    for array in jax.live_arrays() if arrays is None else arrays:
        if id(array) not in _refs and not array.is_deleted():
            _add(array)
    active.add("live", (active.meta.get("ops", 0) - 1, _total))
