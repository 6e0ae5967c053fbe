"""Run ops: strict at once, debug at once and wait, fused when somebody needs a value. All launches happen here."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

import jax
import torch

from tpu_lab import trace
from tpu_lab.backend import bounds, causes, interrupts, launches, live, owners, precision, room, state, where
from tpu_lab.backend.cache import Refused, cache
from tpu_lab.backend.graph import Graph
from tpu_lab.backend.launches import of_op
from tpu_lab.backend.recorder import MODE
from tpu_lab.backend.state import EagerMode, mode_scope  # noqa: F401  (mode_scope: profile() uses it from here)
from tpu_lab.backend.storage import Pending

graph = Graph()  # the current deferred graph
watched = False  # watch.py has taken over `run`: compiled graphs go op by op
_now = time.perf_counter_ns
_FUSED, _STRICT, _DEBUG = EagerMode  # a member by its name is looked up for 0.3 µs, each time


def resolve(cell):
    """The jax.Array of a cell, running the deferred graph if it must be. Uninitialised memory becomes zeros."""
    value = cell.value
    if value is None:
        import jax.numpy as jnp

        value = cell.value = jnp.zeros(cell.base.shape, cell.base.jdtype)
        live.came(value)
    elif value.__class__ is Pending:
        if value.array is None:
            if value.graph is not graph:
                raise RuntimeError(
                    "this tensor's value was lost: the program that computes it failed, and that error was raised "
                    "where it ran. Compute the tensor again"
                )
            flush(None)
        value = cell.value = value.array
    return value


def peek(cell):
    """The cell's value for recording: a jax.Array or a Pending of the current graph."""
    value = cell.value
    if value.__class__ is Pending and value.graph is graph:
        return value
    return resolve(cell)


def traced(cell):
    """The cell's value for a program being traced: a tracer, or an array from outside as a constant."""
    value = cell.value
    return resolve(cell) if value is None or value.__class__ is Pending else value


def run(sig, cells, floats: tuple, ints: tuple, note: list | None = None) -> list:
    """Run or record one op over the cells' values. Returns the new values: fresh outputs, then written bases.

    note: what recorder.begin gave, while a profile is active.
    """
    mode = state.mode()
    if mode is _FUSED:
        if len(graph.nodes) >= graph.flush_at:
            cut()
        checks = () if sig.bounds is None else tuple(checks_of(sig))
        if note is not None and trace.active is not None:
            launches.deferred(trace.active, note)
        while True:
            recording, values = graph, [peek(c) for c in cells]
            for i in sig.writes:
                recording.writes(cells[i])
            pending = recording.add(sig, values, floats, ints, checks)
            if pending is not None:
                return pending
    if graph.nodes:
        flush("debug" if mode is _DEBUG else "strict")
    return _launch(sig, [resolve(c) for c in cells], floats, ints, mode, note)


def cut() -> None:
    """Run the deferred graph if it has become too long: see Graph.full."""
    reason = graph.full()
    if reason is not None:
        after = graph.after()
        flush(reason)
        graph.follow(*after)


def _launch(sig, values, floats, ints, mode, note):
    """One op as one launch."""
    program = sig.program
    made = None
    if program is None or program.key not in cache.programs:
        program = made = sig.program = _compile_op(sig, values, floats, ints, mode)
    else:
        cache.hits += 1
        cache.clock = program.used = cache.clock + 1
    if program.needs > room.LARGE:
        room.check_program(program, launches.site)
    if note is None and mode is _STRICT and sig.bounds is None:
        return sig.jit(values, floats, ints)
    before = _now()
    out = sig.jit(values, floats, ints)
    if sig.bounds is not None:
        *out, worst = out
        bounds.watch(worst, checks_of(sig))
    if mode is _DEBUG:
        jax.block_until_ready(out)
        if note is not None:
            note[MODE] = "debug"
    if note is not None:
        of_op(note, program, before, out, made)
    if mode is _DEBUG:
        bounds.look(wait=True)
    return out


def checks_of(sig) -> list:
    """What to say when an index of this call is out of range."""
    site = launches.site()
    return [bounds.Check(text, sig.name, site, threading.get_ident()) for text in sig.bounds.texts]


def _compile_op(sig, values, floats, ints, mode):
    key = ("op", sig.id)
    found = cache.get(key)
    if found is not None:
        return found
    site = where.compile_site()
    leaves = tuple((sig.argument(i), repr(w)) for i, w in enumerate(sig.windows))
    layouts = tuple((sig.argument(i), w.layout()) for i, w in enumerate(sig.windows))
    view = causes.View(
        "strict", (site.file, site.line), ((sig.name, sig.inputs, sig.static),), leaves,
        options=(*sig.options, *precision.options([sig.precision])), layouts=layouts, within=where.within(),
    )  # fmt: skip
    return cache.add(key, sig.jit, (values, floats, ints), view, sig.flops, sig.nbytes, site)


def flush(reason: str | None) -> None:
    """Run the deferred graph as one program and put its live values in place.

    reason: a key of trace.REASONS; None takes what `waiting` says, or "item".
    If the compile fails, nothing has run: the graph stays as it was, to be tried once more. When that fails, too, or it
    needs more memory than there is, it is dropped: tensors that it would have written keep what they held before, and
    reading one of its other results says that it is lost.
    """
    with state.lock:
        if not graph.nodes:
            return
        with interrupts.hold():
            _run_graph(reason)


def _run_graph(reason: str | None) -> None:
    global graph
    active = trace.active
    start = _now() if active is not None else 0
    plan = graph.plan(state.compiler_options)
    if plan is None:  # nobody holds a result: nothing to run
        graph.close()
        graph = Graph()
        launches.dropped(active)
        return
    reason = reason or (_waiting[0] if _waiting else "item")  # the outermost: a fallback copies to the CPU
    made, program = None, cache.get(plan.key)
    if program is None:
        try:
            program = made = _compile_graph(plan)
        except Refused:
            raise  # nothing is wrong with the graph
        except Exception:
            if graph.failed:  # twice: it would stand in the way of every later op
                _drop()
            else:
                graph.failed = True
            raise
    try:
        room.check_program(program, where.site)
    except torch.OutOfMemoryError:
        _drop()
        raise
    done, graph = graph, Graph()
    at = done.made(plan.positions, len(active.unlaunched)) if active is not None else None
    earlier = len(done.nodes) - len(active.unlaunched) if active is not None else 0  # recorded before the profile
    done.close()  # it drops our references to the leaves: donation needs them gone
    before = _now() if active is not None else 0
    arrays, token = program.call(plan.floats, plan.ints, *plan.leaves)
    after = _now() if active is not None else 0
    for pending, array in zip(plan.alive, arrays, strict=True):
        pending.array = array
    if plan.checks:
        bounds.watch(token, plan.checks)
    if active is not None:
        counts = launches.Counts(len(plan.leaves), len(arrays), len(plan.donated))
        times = (start, before, after)
        taken = [plan.leaves[n] for n in plan.donated]
        site = where.site()
        launches.left_out(active, [n - earlier for n in program.dead])
        launches.record(active, program, made, reason, "fused", site, times, counts, token, plan.leaves, arrays, at, taken)
        owners.settle(plan.alive)


def _drop() -> None:
    """Give the deferred graph up, and what it wrote in place with it."""
    global graph
    dropped, graph = graph, Graph()
    dropped.close()
    dropped.undo()
    launches.dropped(trace.active)


def _compile_graph(plan):
    jitted, view = graph.program(plan)
    site = where.compile_site()
    view = dataclasses.replace(view, site=(site.file, site.line))
    dead = graph.dead(plan.positions)
    flops = sum(n.sig.flops for n in graph.nodes) - sum(graph.nodes[n].sig.flops for n in dead)
    nbytes = sum(x.nbytes for x in plan.leaves) + sum(d.itemsize * _size(s) for s, d in _live(plan))
    program = cache.add(plan.key, jitted, (plan.floats, plan.ints, *plan.leaves), view, flops, nbytes, site)
    program.dead = dead
    return program


def _size(shape) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def _live(plan):
    shapes = graph.bases()
    return [shapes[p] for p in plan.positions]


_waiting: list[str] = []


@contextlib.contextmanager
def waiting(reason: str):
    """Inside the block a flush is because of `reason`."""
    _waiting.append(reason)
    try:
        yield
    finally:
        _waiting.pop()


def forget() -> None:
    """Drop all programs and what is deferred and unreachable; values stay."""
    flush("synchronize")
    cache.clear()
