"""The record of each launch, and the clock that notes when the device has finished it."""

from __future__ import annotations

import contextlib
import dataclasses
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


def so_far(active: trace.Trace) -> int:
    """The index that the next launch record will have."""
    return active.meta.get("launches", 0)


def record(active, program, made, reason, mode, site, times, counts: Counts, wait_for, arrays=None, taken=()) -> None:
    """Append a LaunchRecord (and a CompileRecord if `made`, the program, is new).

    times: (start, call into XLA, call returned), host clock in ns. wait_for: an output that is ready when the launch
    is; the clock's thread holds it until then, so it must not be one whose donation matters. arrays, taken: see live.py.
    """
    start, before, after = times
    index = so_far(active)
    active.meta["launches"] = index + 1
    compile_ns = 0 if made is None else round(sum(made.seconds) * 1e9)
    ops = tuple(active.meta.get("unlaunched", ()))
    active.meta["unlaunched"] = []
    launch = trace.LaunchRecord(
        index=index, ops=ops, cache="hit" if made is None else "disk" if made.tier == "disk" else "miss",
        reason=reason, file=site.file, line=site.line, code=site.code, mode=mode, key=program.digest, time_ns=start,
        lookup_ns=max(before - start - compile_ns, 0), compile_ns=compile_ns, dispatch_ns=after - before, device_ns=0,
        flops=program.flops, bytes=program.nbytes, inputs=counts.inputs, outputs=counts.outputs,
        donated=counts.donated, step=len(active.steps),
    )  # fmt: skip
    position = len(active.launches)
    active.add("launches", launch)
    active.programs[program.digest] = program  # hlo(), stablehlo(), lower(platform): what ran, as text
    live.point(active, arrays, taken)
    if made is not None:
        active.add("compiles", record_compile(made, index))
    if position < len(active.launches):
        _watch((active, position, before, wait_for))


# --- the device clock ------------------------------------------------------------------------------------------------

_watched: queue.SimpleQueue = queue.SimpleQueue()
_watcher: threading.Thread | None = None


def _watch(item) -> None:
    global _watcher
    if _watcher is None or not _watcher.is_alive():
        _watcher = threading.Thread(target=_watch_loop, name="tpu_lab device clock", daemon=True)
        _watcher.start()
    _watched.put(item)


def _watch_loop() -> None:
    """Note when each launch is ready: device time = ready - max(its dispatch, the one before it ready)."""
    last = 0
    while True:
        item = _watched.get()
        if isinstance(item, threading.Event):
            item.set()
            continue
        active, position, before, wait_for = item
        with contextlib.suppress(Exception):  # a deleted or failed result has no time of its own
            jax.block_until_ready(wait_for)
            ready = _now()
            launch = active.launches[position]
            begun = max(before, last)
            active.launches[position] = dataclasses.replace(launch, device_ns=max(ready - begun, 0), ready_ns=ready)
            last = ready
        del item, wait_for


def drain() -> None:
    """Wait until the device time of every recorded launch is known."""
    if _watcher is not None and _watcher.is_alive():
        event = threading.Event()
        _watched.put(event)
        event.wait()
