"""A profile as a file: a page, JSON with a schema version, a timeline for ui.perfetto.dev."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

from tpu_lab.place import op_name, place
from tpu_lab.trace import CompileRecord, LaunchRecord, OpRecord, Trace, WaitRecord

SCHEMA, VERSION = "tpu-lab-profile", 1
_KINDS = {"ops": OpRecord, "launches": LaunchRecord, "compiles": CompileRecord, "waits": WaitRecord}
_META = (
    "name",
    "file",
    "line",
    "end_line",
    "mode",
    "platform",
    "compiler",
    "device",
    "jax",
    "cores",
    "error",
    "cpu",
    "peak",
    "version",
)


def to_html(profile, path) -> None:
    """The summary with its folds as one offline file."""
    from tpu_lab.viz import view

    Path(path).write_text(view.page(profile.summary), encoding="utf-8")


def to_json(profile, path) -> None:
    """{"schema", "version", "meta", "summary": [...], "trace": {"ops": {"fields": [...], "rows": [...]}, ...}}."""
    trace = profile.trace
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "meta": {k: trace.meta[k] for k in _META if k in trace.meta},
        "summary": json.loads(profile.summary.rows.to_json(orient="records")),
        "trace": {
            **{name: _table(getattr(trace, name), kind) for name, kind in _KINDS.items()},
            **{k: getattr(trace, k) for k in ("limit", "steps", "marks", "live", "dropped", "start_ns", "end_ns")},
        },
    }
    Path(path).write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def read_json(path) -> Trace:
    """The trace in a file that `to_json` wrote; ValueError when it is not one."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a profile of TPU Lab")
    if document["version"] > VERSION:
        raise ValueError(
            f"{path} has schema version {document['version']}; this TPU Lab reads up to {VERSION}: update it"
        )
    stored = document["trace"]
    trace = Trace(limit=stored["limit"], steps=stored["steps"], dropped=stored["dropped"], meta=document["meta"])
    trace.start_ns, trace.end_ns = stored["start_ns"], stored["end_ns"]
    trace.marks = [tuple(m) for m in stored["marks"]]
    trace.live = [tuple(m) for m in stored["live"]]
    for name, kind in _KINDS.items():
        names = stored[name]["fields"]
        rows = ({k: tuple(v) if isinstance(v, list) else v for k, v in zip(names, row)} for row in stored[name]["rows"])
        getattr(trace, name).extend(kind(**row) for row in rows)
    return trace


def _table(records, kind) -> dict:
    names = [
        f.name for f in fields(kind) if f.name != "hlo"
    ]  # a program's text is not a record: fetched when asked for
    return {"fields": names, "rows": [[getattr(r, n) for n in names] for r in records]}


def to_perfetto(profile, path) -> None:
    """Chrome's trace format: host ops, launches, waits and the device as four tracks, times in µs from the start."""
    trace, start = profile.trace, profile.trace.start_ns

    def event(track, name, begin, ns, **args):
        return {
            "ph": "X",
            "pid": 1,
            "tid": track,
            "name": name[:60],
            "ts": round((begin - start) / 1e3, 3),
            "dur": round(ns / 1e3, 3),
        } | ({"args": args} if args else {})

    names = ("ops", "launches", "waits", "device")
    events = [{"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": n}} for i, n in enumerate(names)]
    for op in trace.ops:
        events.append(
            event(0, op_name(op.name), op.time_ns, op.host_ns or op.record_ns, at=place(op.file, op.line)[-40:])
        )
    begins, ends = profile.metrics.timeline.device
    for launch, begin, end in zip(trace.launches, begins.tolist(), ends.tolist()):
        host = launch.lookup_ns + launch.compile_ns + launch.dispatch_ns
        events.append(event(1, f"{launch.reason}, {launch.cache}", launch.time_ns, host, ops=len(launch.ops)))
        if launch.device_ns:
            events.append(event(3, f"launch {launch.index}", begin, end - begin, ops=len(launch.ops)))
    for wait in trace.waits:
        events.append(
            event(2, wait.what, wait.time_ns, wait.wait_ns + wait.copy_ns, at=place(wait.file, wait.line)[-40:])
        )
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    data = text.encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)
