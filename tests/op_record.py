"""Which test exercises which op, and with which dtypes: `TPU_LAB_OPS=FILE pytest ...` adds what it saw to a CSV file.

Rows: op, dtypes, test. `tpu-lab coverage` shows them from tpu_lab/data/op_tests.csv. A run replaces the test of the ops
it saw and adds to their dtypes; ops it did not see keep their rows. Without the variable nothing is recorded.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

FILE = os.environ.get("TPU_LAB_OPS", "")
current = ""  # the test that runs, as pytest names it
pending: dict[str, set[str]] = {}  # op -> dtypes, of this test, which may still fail
seen: dict[str, tuple[str, set[str]]] = {}  # op -> its first test, dtypes


def note(overload, values) -> None:
    """This overload was called with these values (any nesting), and what it gave is about to be compared."""
    if FILE:
        from tpu_lab.backend import dtypes

        found = {dtypes.aval((), t.dtype).split("[")[0] for t in _tensors(values)}
        name = overload._schema.name.replace("::", ".")
        pending.setdefault(f"{name}.{overload._overloadname or 'default'}", set()).update(found)


def _tensors(value):
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [value] if hasattr(value, "dtype") and hasattr(value, "untyped_storage") else []


def watch_device() -> None:
    """Note every call that reaches the device's door, or the CPU from there."""
    from tpu_lab.backend import dispatch, fallback

    def noting(function, at=0):
        def run(record, args, kwargs, *rest):
            note(record.overload, [args, list(kwargs.values())])
            return function(record, args, kwargs, *rest)

        return run

    dispatch._build, fallback.run = noting(dispatch._build), noting(fallback.run)


def passed(test: str) -> None:
    """A test has ended well: what it noted counts."""
    for op, kinds in pending.items():
        seen.setdefault(op, (test, set()))[1].update(kinds)
    pending.clear()


def write() -> None:
    """Merge what was seen into the file."""
    path, rows = Path(FILE), {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as f:
            rows = {r["op"]: r for r in csv.DictReader(f)}
    for op, (test, kinds) in seen.items():
        old = set(rows[op]["dtypes"].split()) if op in rows else set()
        rows[op] = {"op": op, "dtypes": " ".join(sorted(kinds | old)), "test": test}
    with path.open("w", newline="", encoding="utf-8") as f:
        out = csv.DictWriter(f, ["op", "dtypes", "test"], lineterminator="\n")
        out.writeheader()
        out.writerows(rows[op] for op in sorted(rows))
