"""What is picked in one view is marked in the others: by attributes that every view writes on its rows and marks.

`data-op="17"` (the op's number), `data-line="model.py:54"` (as `place` writes it), `data-fusion="A"` (the group's
letter). A view need not know what is picked: the mark is one style rule beside it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from markupsafe import escape

KINDS = ("op", "line", "fusion")


def style(picked: Mapping | None) -> tuple[str, str]:
    """(id, rules) for `{"op": 17, "line": "model.py:54", "fusion": "A"}`; the rules hold inside the root that carries
    `data-marks=id`. ("", "") when nothing is picked. ValueError for another key."""
    if unknown := set(picked or ()) - set(KINDS):
        raise ValueError(f"views mark by {', '.join(KINDS)}, not by {', '.join(sorted(map(str, unknown)))}")
    chosen = [(kind, str(picked[kind])) for kind in KINDS if picked and picked.get(kind) not in (None, "")]
    if not chosen:
        return "", ""
    marks = hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]
    root = f'.tl.tl.tl[data-marks="{marks}"]'
    rules = []
    for kind, value in chosen:
        what = f'[data-{kind}="{_quoted(value)}"]'
        ground, bar = (".34", "5px") if kind == "op" else (".16", "2px")  # the op stands out among those of its line
        rules[:0] = [
            f"{root} tr{what}>td{{background:rgb(128 128 128/{ground})}}",
            f"{root} tr{what}>:first-child{{box-shadow:inset {bar} 0 currentColor}}",
            f"{root} :is(div,span,summary,li,th,td){what}{{outline:2px solid currentColor;outline-offset:1px}}",
            f"{root} svg {what}{{stroke:currentColor;stroke-width:2.5px;stroke-opacity:1;fill-opacity:1}}",
        ]
    return marks, "".join(rules)


def unfold(html: str, picked: Mapping | None) -> tuple[str, int]:
    """(html with every fold open that holds a mark, how many marks there are)."""
    wanted = {
        f'data-{kind}="{escape(str(picked[kind]))}"' for kind in KINDS if picked and picked.get(kind) not in (None, "")
    }
    if not wanted:
        return html, 0
    folds: list[int] = []
    inside: set[int] = set()
    count = 0
    marks = "|".join(map(re.escape, sorted(wanted)))
    for found in re.finditer(f"<details>|<details |</details>|{marks}", html):
        if found[0] == "</details>":
            folds.pop()
        elif found[0].startswith("<details"):
            folds.append(found.start())
        else:
            count += 1
            inside.update(folds)
    for start in sorted(inside, reverse=True):
        end = start + len("<details")
        html = html if html.startswith(" open", end) else f"{html[:end]} open{html[end:]}"
    return html, count


def _quoted(value: str) -> str:
    """The inside of a CSS string: all but letters and digits of ASCII as escapes, so that no text of a user ends it."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\{ord(c):x} " for c in value)
