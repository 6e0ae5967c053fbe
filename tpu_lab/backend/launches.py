"""The note of each launch, and the clock that sees when the device has finished it. writer.py makes the records."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from typing import NamedTuple

import jax

from tpu_lab import trace
from tpu_lab.backend import live, where
from tpu_lab.backend.cache import record_compile

# What stands where in the note of a launch of a deferred or compiled graph:
#     ready, program, made, mode, start, before, after, noted, index, born, reason, site, ops, newest, at, came, taken, counts
# That of one op in strict or debug mode is part of the op's own note (recorder.py).
# And a frozenset: indices of ops that did not run; -1 - index for one that no launch will.
# ready: host clock when its results were ready, 0 not yet, -1 nobody will know. made: the program if it is new. start,
# before, after, noted: host clock when lookup began, XLA was called, XLA returned, this file was done. index: its own.
# born, came, taken: weak references to its results, to inputs that nobody has seen, to donated ones. newest: the newest op.

SURE = 8  # a program that was done this often when its dispatch returned is not asked each time
op: list | None = None  # the note of the op that is being called, while a profile is active
_now, ref = time.perf_counter_ns, weakref.ref


class Counts(NamedTuple):
    """Arrays that went in and came out of a launch, and inputs whose memory it took over."""

    inputs: int
    outputs: int
    donated: int


def of_op(note: list, program, before: int, out: list, made=None) -> None:
    """Note the launch of one op in strict or debug mode. Every op pays for this: no call that can be saved.

    A small program runs within its dispatch, by a rule of XLA:CPU's that looks at the program alone. Whether it did costs
    1 to 2 µs to ask: after SURE times in a row it is asked every 64th launch, while nothing else is running.
    """
    after = _now()
    active = trace.active
    if active is None:
        return
    note[10] = index = active.launch_count
    active.launch_count = index + 1
    ready = 0
    if _asked == _seen:
        ready = after if program.quick >= SURE and index & 63 else _asked_now(program, out, after)
    append, log = active.note, active.log
    note[12] = ready
    note[13] = program, before, after, ref(out[0], append) if len(out) == 1 else [ref(array, append) for array in out]
    try:
        apart = log[-1] is not note  # another launch, or the end of an array, came first
    except IndexError:  # somebody has read the log meanwhile, maybe on another thread just now
        apart = True
    if apart:
        note[14] = True
        append(note)
    if made is not None:
        note[16] = made
        active.add("compiles", record_compile(made, index))
    if not ready:
        _watch(active, index, note, 12, smallest(out))
    if note[2]:
        note[3] += _now() - after


def _asked_now(program, out: list, after: int) -> int:
    """When a launch of one op was ready, if it is."""
    if smallest(out).is_ready():
        program.quick += 1
        return after
    program.quick = 0
    return 0


def smallest(out: list):
    """One result to wait for: all are ready at once, and the clock's thread should keep as little alive as can be."""
    return out[0] if len(out) == 1 else min(out, key=lambda array: array.size)


def record(active, program, made, reason, mode, site, times, counts: Counts, wait_for, inputs, outputs, at=None, taken=()) -> None:
    """Note the launch of a deferred or compiled graph.

    times: (start, call into XLA, call returned), host clock in ns. made: the program, if it is new. wait_for: an output
    that is ready when the launch is; the clock's thread holds it until then, so it must not be one whose donation
    matters. inputs, outputs: its arrays. at: for each output the position of its op, None where that is unknown; without
    `at` the first op made them all. taken: inputs that were donated.
    """
    if live._owner is not active:
        live.begin(active, outputs)
    gone = [seen for array in taken if (seen := live.known(array)) is not None]
    came = [live.watch(active, array) for array in inputs if live.unseen(array)]
    born = [live.watch(active, array) for array in outputs]
    index = active.launch_count
    active.launch_count = index + 1
    ops, active.unlaunched = active.unlaunched, []
    ready = times[2] if _asked == _seen and (wait_for[0] if wait_for.__class__ is list else wait_for).is_ready() else 0
    note = [ready, program, made, mode, *times, 0, index, born, reason, site, ops, active.op_count - 1, at, came, gone, counts]
    active.log.append(note)
    if made is not None:
        active.add("compiles", record_compile(made, index))
    if not ready:
        _watch(active, index, note, 0, wait_for)
    note[7] = _now()


def deferred(active, note: list) -> None:
    """The op has become part of the deferred graph: the next launch will run it."""
    note[10] = active.launch_count
    active.unlaunched.append(note[9])


def left_out(active, numbers) -> None:
    """These of the deferred ops are not part of the program that is launched: nobody holds what they make."""
    numbers = [n for n in numbers if 0 <= n < len(active.unlaunched)]
    if numbers:
        active.log.append(frozenset([active.unlaunched[n] for n in numbers]))


def dropped(active) -> None:
    """None of the deferred ops will run."""
    if active is not None and active.unlaunched:
        left_out(active, range(len(active.unlaunched)))
        active.log.append(frozenset([-1 - index for index in active.unlaunched]))
        active.unlaunched = []


def site() -> where.Site:
    """The user's line of the op that is being called: in backward, while a profile is active, that of its forward op."""
    if trace.active is None or op is None or op[11]:  # it has returned
        return where.site(2)
    return where.read(op[4])


# --- the device clock ------------------------------------------------------------------------------------------------

_watched: queue.SimpleQueue = queue.SimpleQueue()
_watcher: threading.Thread | None = None
_asked = _seen = 0  # launches given to the watcher, and those it has done with


def _watch(active, index: int, note: list, slot: int, wait_for) -> None:
    """A launch that was not ready when its dispatch returned: the thread notes when it is, in that slot of its note."""
    global _watcher, _asked
    if index >= active.limit:  # it will have no record
        note[slot] = -1
        return
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch_loop, name="tpu_lab device clock", daemon=True)
        _watcher.start()
    _asked += 1
    _watched.put((note, slot, wait_for))


def _watch_loop() -> None:
    global _seen
    while True:
        item = _watched.get()
        if isinstance(item, threading.Event):
            item.set()
            continue
        note, slot, wait_for = item
        ready = -1
        with contextlib.suppress(Exception):  # a deleted or failed result has no time of its own
            jax.block_until_ready(wait_for)
            ready = _now()
        note[slot] = ready
        _seen += 1
        del item, note, wait_for


def drain() -> None:
    """Wait until the device time of every recorded launch is known."""
    if _watcher is not None and _watcher.is_alive():
        event = threading.Event()
        _watched.put(event)
        event.wait()
