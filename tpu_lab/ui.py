"""`Profile.ui()`: pick an op, a line or a fusion with marimo's own tables. The only module that imports marimo.

    picked = profile.ui()                      # a cell
    picked
    profile.marked(picked.value)               # another: every view, with what was picked marked in it

The value is a plain dict, so a test needs no browser: `app.run(defs={"selection": {"op": 17}})`.
"""

from __future__ import annotations

from typing import Any

import marimo as mo

from tpu_lab import fusions
from tpu_lab.viz import linked, number
from tpu_lab.viz.marks import KINDS

ROWS = 8  # of a table at once; it has pages and a search
ELSEWHERE = (
    "Profile.ui() is for marimo, whose tables can be picked from. Elsewhere p.marked({'op': 17}) marks an op in every view, "
    "and {'line': 'model.py:54'} or {'fusion': 'A'} a line or a fusion."
)


class Picker(mo.ui.batch):
    """Three tables in one element, whose value is `{"op": 17, "line": "model.py:54", "fusion": "A"}`.

    An op that is picked brings its line and its fusion along, unless these were picked themselves; what is not
    picked is None.
    """

    _value: Any  # marimo keeps the converted value here

    def __init__(self, profile, html: mo.Html, tables: dict[str, Any]) -> None:
        self._profile, self._page, self._tables = profile, html, tables
        super().__init__(html=html, elements=tables)

    def _convert_value(self, value: dict) -> dict:
        return self._plain(super()._convert_value(value))

    def _on_update_completion(self) -> bool:
        changed = super()._on_update_completion()
        if changed:
            self._value = self._plain(self._value)
        return changed

    def _plain(self, rows: dict) -> dict:
        """The tables' rows as op, line and fusion."""
        chosen = {kind: rows[kind][0][kind] if rows.get(kind) else None for kind in KINDS}
        return linked.resolve(self._profile.metrics, chosen)

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        """For Jupyter, VS Code and Colab, where the tables would be a blank: what to do there."""
        return dict.fromkeys(("text/plain", "text/html", "text/markdown"), ELSEWHERE)

    def _clone(self) -> Picker:
        return Picker(self._profile, self._page, self._tables)


def picker(profile, picked: dict | None = None) -> Picker:
    """Tables of the ops of the drawn step, of the lines they are written on, and of the fusions; one row each.

    picked: the rows that are chosen at first, as `{"op": 17}`."""
    m = profile.metrics
    linked.resolve(m, picked)  # a wrong choice is told before anything is drawn
    letters = fusions.letter_of(m)
    names = ["op", "name", "result", "module", "line", "fusion", "ms"]
    ops = [
        dict(zip(names, (r.op, r.name, r.result, r.module, f"{r.file}:{r.line}" if r.file else "", letters.get(r.op, ""),
                         round(r.device_ms, 4))))
        for r in profile.ops.rows.iloc[slice(*m.span.ops)].itertuples(index=False)
    ]  # fmt: skip
    if picked and picked.get("op") is not None and all(op["op"] != picked["op"] for op in ops):
        first, last = ops[0]["op"], ops[-1]["op"]  # there is one: resolve() found it
        raise ValueError(f"op {picked['op']} is not in the step that the views draw: that has ops {first} to {last}")
    tables = {"op": ops, "line": _sums(ops, "line"), "fusion": _sums(ops, "fusion")}
    elements = {kind: _table(kind, rows, (picked or {}).get(kind)) for kind, rows in tables.items()}
    page = mo.Html(  # lines and fusions side by side where there is room for both
        '<div style="display:grid;grid-template-columns:minmax(0,1fr);gap:16px">{op}<div style="display:grid;gap:16px 32px;'
        'grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))"><div style="min-width:0">{line}</div>'
        '<div style="min-width:0">{fusion}</div></div></div>'
    )
    return Picker(profile, page, elements)


def _sums(ops: list[dict], key: str) -> list[dict]:
    """One row a line or a fusion: how many ops, and their time; the longest first."""
    out: dict[str, dict] = {}
    for op in ops:
        if op[key]:
            row = out.setdefault(op[key], {key: op[key], "ops": 0, "ms": 0.0})
            row["ops"] += 1
            row["ms"] += op["ms"]
    return [{**r, "ms": round(r["ms"], 4)} for r in sorted(out.values(), key=lambda r: -r["ms"])]


def _table(kind: str, rows: list[dict], chosen):
    first = [i for i, row in enumerate(rows) if row[kind] == chosen and chosen is not None]
    return mo.ui.table(
        rows, selection="single", initial_selection=first or None, page_size=ROWS, label=f"pick {'an' if kind == 'op' else 'a'} {kind}",
        show_column_summaries=False, show_data_types=False, show_download=False,
        format_mapping={"ms": number.sig}, text_justify_columns={"ms": "right"} if rows else None,
    )  # fmt: skip
