"""The TPU compiler's view in a terminal, from the same model as the page."""

from __future__ import annotations

import textwrap

from tpu_lab.viz import frame
from tpu_lab.viz.v6e import Model

WIDTH, BAR = 98, 48


def lines(v: Model) -> list:
    """At most 100 columns; the hatches are letters here."""
    out: list = [[(v.title, "b")], *frame.meta_lines(v.meta), []]
    if v.facts:
        out.append([(" \u00b7 ".join(f"{n} {u}, {caption}" for n, u, caption in v.facts[:2]), "")])
        out.append([(" \u00b7 ".join(f"{n} {u}, {caption}" for n, u, caption in v.facts[2:]), "")])
        out.append([])
    out.append([(f"{'Does it fit':<24}", "b"), (f"| is the limit, {v.limit[0]}", "dim")])
    for bar in v.fit:
        wall = round(v.limit[1] * BAR)
        filled = max(1, round(bar.share * BAR))
        drawn = "".join("x" if bar.over and k < filled else "\u2588" if k < filled else "|" if k == wall else " " for k in range(BAR + 2))
        out.append([f"{bar.name:<24}", (drawn, "miss" if bar.over else "host"), f" {bar.words}{', does not fit' if bar.over else ''}"])
    for space in v.spaces:
        out += [[], [(f"{space.name:<6}", "b"), f"{space.caption}, in {space.unit}:"]]
        pieces = [f"{s.letter + ' ' if s.letter else ''}{s.words} {s.size}" for s in space.segments]
        out += [[f"      {line}"] for line in textwrap.wrap(" \u00b7 ".join(pieces), WIDTH - 6)]
    if v.rows:
        out += [[], [(f"{v.section:<70}{v.unit + ' useful':>12}{'held':>8}{'×':>7}", "dim")]]
        for r in v.rows:
            laid = f"{r.shape} {r.layout}"
            out.append([f"{_cut(r.what, 21):<22}{_cut(laid, 47):<48}{r.logical:>12}{r.held:>8}{r.factor:>7}"])
        if v.more_words:
            out.append([(v.more_words, "dim")])
    if v.say:
        out += [[], [v.say]]
    out.append([])
    out += [[line] for line in textwrap.wrap(" ".join(v.advice), WIDTH)]
    return [*out, [], [(v.foot[0], "dim")]]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"
