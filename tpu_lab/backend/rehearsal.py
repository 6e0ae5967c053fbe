"""A rehearsal: a function runs with all its ops recorded into programs, as in fused mode, and no program runs.

Values have shapes and no bytes, so a model for a large chip rehearses on a laptop: the programs are what the same code
would launch, with the same live results and donations, ready to be lowered for a TPU. Tensors that existed before get
their values back at the end; what was made inside has none, and reading it says so.

As in watch.py the functions that ops go through are exchanged for the time of a block, so nothing is paid outside.
"""

from __future__ import annotations

import contextlib
import math
import weakref

import jax
import numpy as np

from tpu_lab import trace
from tpu_lab.backend import bounds, executor, launches, rng, room, state, where
from tpu_lab.backend.cache import Program, cache, digest
from tpu_lab.backend.storage import Pending


class NoValue(RuntimeError):
    """A rehearsal, or what was made in one, was asked for a value."""


class Shadow:
    """Shape and dtype of an array that was never computed."""

    __slots__ = ("__weakref__", "dtype", "shape")

    def __init__(self, shape, dtype):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> Shadow:
        return self

    def __array__(self, *args, **kwargs):
        site = where.site()
        what = trace.REASONS.get(executor._waiting[0], "its value is read") if executor._waiting else "its value is read"
        place = f"{site.file}:{site.line} ({site.code}): " if site.file else ""
        raise NoValue(
            f"{place}{what}, but compile_for runs nothing, so there is no value. Leave this line out of the function, "
            "or, if the tensor was made in such a function, make it again"
        )


class _Call:
    """Stands for a jitted function: a call gives the shapes of its results."""

    def __init__(self, jitted, args):
        self._jitted = jitted
        self.traced = jitted.trace(*args)

    def __call__(self, *args):
        return jax.tree.map(lambda s: Shadow(s.shape, s.dtype), self.traced.out_info)

    def trace(self, *avals):
        """As the jitted function's."""
        return self._jitted.trace(*avals)


@contextlib.contextmanager
def rehearse():
    """In the block nothing runs. Gives the Trace that the block is recorded in; its `programs` can be lowered. Another
    thread's rehearsal waits for this one."""
    with state.alone("compile_for"), _exchanged() as recorded:
        yield recorded


@contextlib.contextmanager
def _exchanged():
    known: weakref.WeakValueDictionary[int, Shadow] = weakref.WeakValueDictionary()  # by id of the value, which `kept` holds
    kept: list[tuple] = []

    def shadow(cell):
        value = cell.value
        if value.__class__ is Pending and value.array is not None:
            value = value.array
        if value.__class__ is Shadow:
            cell.value = value
            return value
        found = known.get(id(value)) if value is not None else None
        if found is None:
            found = Shadow(cell.base.shape, cell.base.jdtype)
            if value is not None:
                known[id(value)] = found
        kept.append((cell, cell.value))
        cell.value = found
        return found

    def peek(cell):
        value = cell.value
        return value if value.__class__ is Pending and value.graph is executor.graph else shadow(cell)

    def resolve(cell):
        if state.thread.tracing is not None:
            return before["resolve"](cell)
        value = cell.value
        if value.__class__ is Pending and value.array is None and value.graph is executor.graph:
            executor.flush(None)
        return shadow(cell)

    def run(sig, cells, floats, ints, note=None):
        if len(executor.graph.nodes) >= executor.graph.flush_at:
            executor.cut()
        if note is not None:
            launches.deferred(trace.active, note)
        return executor.graph.add(sig, [peek(c) for c in cells], floats, ints)

    def add(key, jitted, args, view, flops, nbytes, site=None):
        site = site or where.site()
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        program = cache.programs[key] = Program(
            key, digest(key), _Call(jitted, avals), view, flops, nbytes, site=f"{site.file}:{site.line}", avals=avals
        )
        return program

    with state.lock:
        deferred, executor.graph = executor.graph, executor.Graph()  # what waits outside goes on waiting
        before = {name: getattr(executor, name) for name in ("run", "peek", "resolve")}
        counts = cache.programs, cache.hits, cache.misses, cache.clock
        random, active, watch = (rng.default.seed, rng.default.counter), trace.active, bounds.watch
        bounds.watch = lambda *_: None  # indices have no values either
        refuse, room.check_op = room.check_op, lambda *_: None  # what does not fit here may fit there, and nothing is made
        executor.run, executor.peek, executor.resolve = run, peek, resolve
        cache.programs, cache.add = {}, add
        recorded = trace.active = trace.Trace()
        recorded.meta["cpu"] = []
    try:
        with where.watch_modules(), state.mode_scope("fused"):
            yield recorded
            executor.flush("synchronize")
    finally:
        with state.lock:
            executor.graph = deferred
            for name, function in before.items():
                setattr(executor, name, function)
            cache.programs, cache.hits, cache.misses, cache.clock = counts
            del cache.add
            rng.default.seed, rng.default.counter = random
            trace.active, bounds.watch, room.check_op = active, watch, refuse
            for cell, value in kept:
                cell.value = value
