"""A profile as a timeline in Chrome's trace format, which https://ui.perfetto.dev opens.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(complete events "X", flows "s" and "f", counters "C", metadata "M"; times in µs). An event takes at most 250 bytes.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from tpu_lab.place import op_name, place

HOST, DEVICE = 1, 2  # Perfetto draws one group of tracks a "process"
STEPS, OPS, LAUNCHES, WAITS = 1, 2, 3, 4
TRACKS = {STEPS: "steps", OPS: "ops", LAUNCHES: "launches and compiles", WAITS: "waits and copies"}
SCALE = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def write(trace, metrics, path) -> None:
    """Write the timeline; a path that ends in .gz is compressed (Perfetto reads that, too)."""
    document = {"traceEvents": events(trace, metrics), "displayTimeUnit": "ms"}
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def events(trace, metrics) -> list[dict]:
    """The events in the order of their tracks; times in µs since the recording began."""
    start = trace.start_ns

    def at(ns: float) -> float:
        return round((ns - start) / 1e3, 3)

    def slice_(pid: int, tid: int, name: str, begin: float, ns: float, kind: str, **args) -> dict:
        event = {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": _short(name),
            "cat": kind,
            "ts": at(begin),
            "dur": round(ns / 1e3, 3),
        }
        return event | ({"args": args} if args else {})

    out = _names(trace)
    for step in metrics.steps:
        words = "warm-up " if step.warmup else "first " if step.misses else ""
        out.append(slice_(HOST, STEPS, f"{words}step {step.number}", step.start_ns, step.ns, "step"))
    for op in trace.ops:
        args = {"at": _short(place(op.file, op.line), -32)} if op.file else {}
        args |= {} if op.launch is None else {"launch": op.launch}
        out.append(slice_(HOST, OPS, op_name(op.name), op.time_ns, op.host_ns or op.record_ns, op.phase, **args))
    made = {c.launch: c for c in trace.compiles}
    begins, ends = metrics.timeline.device
    for launch, begin, end in zip(trace.launches, begins.tolist(), ends.tolist()):
        host = launch.lookup_ns + launch.compile_ns + launch.dispatch_ns
        out.append(slice_(HOST, LAUNCHES, f"launch {launch.index}: {launch.cache}", launch.time_ns, host, launch.mode,
                          ops=len(launch.ops), why=launch.reason))  # fmt: skip
        if launch.compile_ns:
            record = made.get(launch.index)
            why = {"why": _short(record.why, 90)} if record is not None else {}
            name = f"{'read back' if launch.cache == 'disk' else 'compile'} {launch.key}"
            out.append(
                slice_(HOST, LAUNCHES, name, launch.time_ns + launch.lookup_ns, launch.compile_ns, "compile", **why)
            )
        if launch.device_ns:
            out.append(slice_(DEVICE, 1, f"launch {launch.index}: {len(launch.ops)} ops", begin, end - begin, launch.mode,
                              flops=launch.flops, bytes=launch.bytes))  # fmt: skip
            flow = {"cat": "flow", "name": "runs", "id": launch.index}
            dispatched = max(launch.time_ns, min(launch.time_ns + host - 1000, int(begin)))
            out.append({"ph": "s", "pid": HOST, "tid": LAUNCHES, "ts": at(dispatched), **flow})
            out.append({"ph": "f", "bp": "e", "pid": DEVICE, "tid": 1, "ts": at(begin), **flow})
    for wait in trace.waits:
        args = {"at": _short(place(wait.file, wait.line), -32)} if wait.file else {}
        args |= {"bytes": wait.bytes} if wait.bytes else {}
        out.append(slice_(HOST, WAITS, wait.what, wait.time_ns, wait.wait_ns + wait.copy_ns, "wait", **args))
    return out + _live(trace, at)


def _names(trace) -> list[dict]:
    device, platform = trace.meta.get("device") or "device", trace.meta.get("platform", "tpu")
    device = device if device == platform else f"{device} ({platform})"
    out = [_name("process_name", pid, 0, name) for pid, name in ((HOST, "host"), (DEVICE, _short(device)))]
    out += [_name("thread_name", HOST, tid, name) for tid, name in TRACKS.items()]
    out.append(_name("thread_name", DEVICE, 1, "launches, in order"))
    order = [{"ph": "M", "pid": HOST, "tid": t, "name": "thread_sort_index", "args": {"sort_index": t}} for t in TRACKS]
    return out + order


def _name(what: str, pid: int, tid: int, name: str) -> dict:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _live(trace, at) -> list[dict]:
    """Live bytes on the device as a counter: only where they change, in the unit that suits the peak."""
    times = {op.index: op.time_ns for op in trace.ops}
    peak = max((size for _, size in trace.live), default=0)
    unit = next((u for u in reversed(SCALE) if peak >= SCALE[u]), "KiB")
    out, last = [], None
    for index, size in trace.live:
        if index in times and size != last:
            value = round(size / SCALE[unit], 3)
            out.append(
                {
                    "ph": "C",
                    "pid": DEVICE,
                    "tid": 0,
                    "name": "live",  # a viewer adds the argument's name
                    "ts": at(times[index]),
                    "args": {unit: value},
                }
            )
            last = size
    return out


def _short(text: str, length: int = 48) -> str:
    """At most `length` bytes: the first ones, or the last when length is negative; no control characters, which JSON
    writes with six."""
    raw = re.sub(r"[\x00-\x1f\x7f]", " ", text).encode("utf-8", "replace")
    if len(raw) <= abs(length):
        return raw.decode()
    if length > 0:
        return raw[: length - 3].decode("utf-8", "ignore") + "\u2026"
    return "\u2026" + raw[length + 3 :].decode("utf-8", "ignore")
