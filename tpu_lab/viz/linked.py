"""Several views with one op, line or fusion marked in all of them: what is picked in one is found in the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tpu_lab import fusions
from tpu_lab.metrics import Metrics
from tpu_lab.place import op_name, place
from tpu_lab.viz import frame, marks, number
from tpu_lab.viz.view import View, template


def resolve(m: Metrics, picked: Mapping | None) -> dict:
    """{"op", "line", "fusion"}, each None when not known: an op brings its line and its fusion along.

    KeyError when there is no op of that number; ValueError for another key."""
    if unknown := set(picked or ()) - set(marks.KINDS):
        raise ValueError(f"pick by {', '.join(marks.KINDS)}, not by {', '.join(sorted(map(str, unknown)))}")
    out = {kind: (picked or {}).get(kind) or None for kind in ("line", "fusion")}
    number_ = (picked or {}).get("op")
    if number_ is None:
        return {"op": None, **out}
    record = next((r for r in m.trace.ops if r.index == number_), None)
    if record is None:
        raise KeyError(f"no op {number_} in this profile: it has {len(m.trace.ops)}")
    out["line"] = out["line"] or place(record.file, record.line) or None
    out["fusion"] = out["fusion"] or fusions.letter_of(m).get(record.index)
    return {"op": record.index, **out}


@dataclass(frozen=True)
class Part:
    name: str
    finding: str
    body: Markup
    marks: int


def draw(m: Metrics, views: Sequence[View], picked: Mapping | None) -> View:
    """picked: {"op": 17}, {"line": "model.py:54"}, {"fusion": "A"} or several. Views that have a mark stand open."""
    chosen = resolve(m, picked)
    store: dict = {}

    def parts() -> list[Part]:
        if "parts" not in store:
            unfolded = [(v, *marks.unfold(str(v.body), chosen)) for v in views]
            store["parts"] = [Part(v.name, v.finding, Markup(html), count) for v, html, count in unfolded]
        return store["parts"]

    def rows():
        import pandas as pd

        return pd.DataFrame([(p.name, p.marks) for p in parts()], columns=["view", "marks"])

    def lines() -> list:
        found = [f"{p.name} {p.marks}" for p in parts() if p.marks]
        what = f"marks: {', '.join(found)}" if found else "pick an op, a line or a fusion to see it in every view"
        return [[(title, "b")], *frame.meta_lines(meta), [(what, "dim")]]

    title, meta = _title(m, chosen), frame.provenance(m)
    body = lambda: template("linked.html", title=title, meta=meta, views=parts(), picked=any(chosen.values()))  # noqa: E731
    return View("linked", title, title, rows, lines, body, picked=chosen)


def _title(m: Metrics, chosen: dict) -> str:
    """`Op 17, addmm at model.py:54 in fusion A`, and of what was picked elsewhere `Op 17, addmm; line model.py:60`."""
    title, letters = "", fusions.letter_of(m)
    ops = [r for r in m.trace.ops if r.index == chosen["op"]]
    if ops:
        title = f"op {number.count(ops[0].index)}, {op_name(ops[0].name)}"[:40]
    if chosen["line"]:
        its_own = any(place(r.file, r.line) == chosen["line"] for r in ops)
        title += f" at {chosen['line']}"[:40] if its_own else f"{'; ' if title else ''}line {chosen['line']}"[:40]
    if chosen["fusion"]:
        there = ops or [r for r in m.trace.ops if chosen["line"] and place(r.file, r.line) == chosen["line"]]
        its_own = any(letters.get(r.index) == chosen["fusion"] for r in there)
        title += f"{' in ' if its_own else '; ' if title else ''}fusion {chosen['fusion']}"
    return f"{title[0].upper()}{title[1:]}, in every view" if title else "Nothing is picked"
