"""A profile as a file: a page with every view, and JSON with a schema version from which all of it can be had again.

The JSON holds the records, and the texts of the programs that ran (zlib and base64), so that a view that reads programs
draws the same from a file; it says how many texts were left out.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tpu_lab.trace import CompileRecord, HeldRecord, LaunchRecord, OpRecord, Trace, WaitRecord

SCHEMA, VERSION = "tpu-lab-profile", 1
_KINDS = {"ops": OpRecord, "launches": LaunchRecord, "compiles": CompileRecord, "waits": WaitRecord, "held": HeldRecord}
_PLAIN = ("limit", "steps", "steppers", "marks", "live", "dropped", "lines", "op_count", "launch_count", "start_ns", "end_ns", "writing_ns")
PAGE = 800_000  # characters of the views in a page
TEXT_BYTES = 8 << 20  # of compressed program texts in a file
STABLEHLO = 16  # programs whose StableHLO is stored: making it means tracing again


def to_html(profile, path) -> None:
    """The summary with every other view folded in it, as one offline file."""
    from tpu_lab.viz import summary, view

    whole = summary.draw(profile.metrics, room=PAGE)
    Path(path).write_text(view.page(whole), encoding="utf-8")


def to_json(profile, path) -> None:
    """{"schema", "version", "meta", "summary": [...], "trace": {"ops": {"fields": [...], "rows": [...]}, ...},
    "programs": {key: {"hlo": ..., "stablehlo": ...}}, "scratch": {key: bytes}}. path: a path, or a text file that is open."""
    trace = profile.trace
    programs, left_out = _programs(profile)
    meta = {k: v for k, v in trace.meta.items() if k != "recording" and _is_plain(v)}
    if profile.metrics.peak is not None:  # of the machine that ran it, not of the one that reads it
        meta["peak"] = asdict(profile.metrics.peak)
    if profile._flops is not None:
        meta["flops"] = profile._flops
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "meta": meta | ({"texts_left_out": left_out} if left_out else {}),
        "summary": json.loads(profile.summary.rows.to_json(orient="records")),
        "trace": {
            **{name: _table(getattr(trace, name), kind) for name, kind in _KINDS.items()},
            **{k: getattr(trace, k) for k in _PLAIN},
        },
        "programs": programs,
        "scratch": {key: n for key in programs if (n := scratch(trace.programs[key])) is not None},
    }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"
    if hasattr(path, "write"):
        path.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _programs(profile) -> tuple[dict[str, dict[str, str]], int]:
    """(key -> compressed texts, how many programs were left out). Those of the step that the views draw come first."""
    trace, metrics = profile.trace, profile.metrics
    drawn = [r.key for r in metrics.launches_in(metrics.span)]
    keys = [k for k in dict.fromkeys([*drawn, *trace.programs]) if k in trace.programs]
    out: dict[str, dict[str, str]] = {}
    left = TEXT_BYTES
    for key in keys:
        program: Any = trace.programs[key]
        texts = {"hlo": program.hlo} | ({"stablehlo": program.stablehlo} if len(out) < STABLEHLO else {})
        packed = {}
        for name, text in texts.items():
            try:
                packed[name] = base64.b64encode(zlib.compress(text().encode(), 6)).decode()
            except Exception:  # a text that its maker cannot give is no reason to lose the records
                continue
        size = sum(map(len, packed.values()))
        if "hlo" in packed and size <= left:
            out[key] = packed
            left -= size
    return out, len(keys) - len(out)


def scratch(program: Any) -> int | None:
    """Bytes of temporary buffers of a program while it runs, the compiler's figure, if it is known."""
    ask = getattr(program, "scratch", None)
    return ask() if ask is not None else None


@dataclass(frozen=True)
class StoredProgram:
    """A program read from a file: its texts, nothing that runs. `Trace.programs` holds these after `from_json`."""

    key: str
    texts: dict[str, bytes]  # compressed: "hlo", "stablehlo"
    avals: tuple = ()
    temporary: int | None = None

    def scratch(self) -> int | None:
        """Bytes of temporary buffers while it runs, as its compiler planned them; None when the file does not say."""
        return self.temporary

    def hlo(self) -> str:
        """The optimised HLO text."""
        return self._text("hlo")

    def stablehlo(self, platform: str | None = None) -> str:
        """The StableHLO text; LookupError for another platform than the recording's, or when it was not stored."""
        if platform not in (None, "cpu"):
            self.lower(platform)
        return self._text("stablehlo")

    def lower(self, platform: str | None = None):
        """LookupError: what was read from a file cannot be lowered again."""
        raise LookupError(
            f"program {self.key} was read from a file, which holds texts only: record the profile again to lower it"
            f"{f' for {platform}' if platform else ''}"
        )

    def _text(self, name: str) -> str:
        if name not in self.texts:
            raise LookupError(
                f"the file holds no {name} text of program {self.key}: record the profile again to see it"
            )
        return zlib.decompress(self.texts[name]).decode()


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
    trace = Trace(meta=document["meta"], **{k: stored[k] for k in _PLAIN if k in stored})
    trace.marks = [tuple(m) for m in stored["marks"]]
    trace.live = [tuple(m) for m in stored["live"]]
    for name, kind in _KINDS.items():
        if name not in stored:  # a file from before there were such records
            continue
        names = stored[name]["fields"]
        rows = ({k: tuple(v) if isinstance(v, list) else v for k, v in zip(names, row)} for row in stored[name]["rows"])
        getattr(trace, name).extend(kind(**row) for row in rows)
    sizes = document.get("scratch", {})
    for key, texts in document.get("programs", {}).items():
        packed = {name: base64.b64decode(text) for name, text in texts.items()}
        trace.programs[key] = StoredProgram(key, packed, temporary=sizes.get(key))
    return trace


def _is_plain(value) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _table(records, kind) -> dict:
    names = [f.name for f in fields(kind) if f.name != "hlo"]  # a program's text is stored with the programs
    return {"fields": names, "rows": [[getattr(r, n) for n in names] for r in records]}
