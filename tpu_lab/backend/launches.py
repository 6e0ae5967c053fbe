"""The record of each launch, and the clock that notes when the device has finished it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import NamedTuple

import jax

from tpu_lab import trace
from tpu_lab.backend import live
from tpu_lab.backend.cache import record_compile

op_site = None  # where.Site of the op that is being called, while a profile is active
_now = time.perf_counter_ns


class Counts(NamedTuple):
    """Arrays that went in and came out of a launch, and inputs whose memory it took over."""

    inputs: int
    outputs: int
    donated: int


def record(active, program, made, reason, mode, site, times, counts: Counts, wait_for, inputs, outputs, at=None, taken=()) -> None:
    """Append a LaunchRecord (and a CompileRecord if `made`, the program, is new).

    times: (start, call into XLA, call returned), host clock in ns. wait_for: an output that is ready when the launch
    is; the clock's thread holds it until then, so it must not be one whose donation matters. inputs, outputs, at, taken: see live.py.
    """
    start, before, after = times
    index = active.launch_count
    active.launch_count = index + 1
    compile_ns = 0 if made is None else round(sum(made.seconds) * 1e9)
    ops, active.unlaunched = tuple(active.unlaunched), []
    launch = trace.LaunchRecord(
        index, ops, "hit" if made is None else "disk" if made.tier == "disk" else "miss", reason, site.file, site.line,
        site.code, mode, program.digest, start, max(before - start - compile_ns, 0), compile_ns, after - before, 0,
        program.flops, program.nbytes, counts.inputs, counts.outputs, counts.donated, len(active.steps),
    )  # fmt: skip
    kept = len(active.launches) < active.limit
    active.add("launches", launch)
    active.programs[program.digest] = program  # hlo(), stablehlo(), lower(platform): what ran, as text
    live.point(active, inputs, outputs, ops, at, taken)
    if made is not None:
        active.add("compiles", record_compile(made, index))
    if kept:
        _clock(launch, before, after, wait_for)


# --- the device clock ------------------------------------------------------------------------------------------------

_watched: queue.SimpleQueue = queue.SimpleQueue()
_watcher: threading.Thread | None = None
_asked = _seen = 0  # launches given to the watcher, and those it has done with
_last = 0  # when the newest finished launch was ready


def _clock(launch, before, after, wait_for) -> None:
    """Note when the launch is ready: at once for a small program that ran within its dispatch, else when the thread sees it."""
    global _watcher, _asked, _last
    if _asked == _seen and (wait_for[0] if wait_for.__class__ is list and wait_for else wait_for).is_ready():
        launch.device_ns, launch.ready_ns, _last = max(after - max(before, _last), 0), after, after
        return
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch_loop, name="tpu_lab device clock", daemon=True)
        _watcher.start()
    _asked += 1
    _watched.put((launch, before, wait_for))


def _watch_loop() -> None:
    """Note when each launch is ready: device time = ready - max(its dispatch, the one before it ready)."""
    global _seen, _last
    while True:
        item = _watched.get()
        if isinstance(item, threading.Event):
            item.set()
            continue
        launch, before, wait_for = item
        with contextlib.suppress(Exception):  # a deleted or failed result has no time of its own
            jax.block_until_ready(wait_for)
            ready = _now()
            launch.device_ns, launch.ready_ns, _last = max(ready - max(before, _last), 0), ready, ready
        _seen += 1
        del item, wait_for


def drain() -> None:
    """Wait until the device time of every recorded launch is known."""
    if _watcher is not None and _watcher.is_alive():
        event = threading.Event()
        _watched.put(event)
        event.wait()
