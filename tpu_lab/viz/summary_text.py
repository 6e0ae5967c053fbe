"""The summary for a terminal: the page's title, order and words in at most 25 lines of 100 columns."""

from __future__ import annotations

import textwrap
from collections import Counter

from tpu_lab.metrics import Metrics
from tpu_lab.trace import REASONS
from tpu_lab.viz import frame, number, theme

PHASES = ("forward", "backward", "optimizer")

def lines(m: Metrics, v) -> list:
    """At most 25 lines of 100 columns."""
    meta = [(t.split(",")[0], b) if t.endswith(" steady") else (t, b) for t, b in v.meta]
    out: list = [[(v.title, "b")], *frame.meta_lines(meta)[:2]]
    if not v.facts:
        return out + ([[], *([part] for part in textwrap.wrap(v.hint, 98))] if v.hint else [])
    head = "step" if m.steady else "block"
    pairs = _facts(m)
    out.append([])
    for (left, text, rest), (right, more, end) in (pairs[:2], pairs[2:]):
        out.append([f"  {left:<7}", (text, "b"), rest.ljust(max(0, 27 - len(text))) + f" {right:<6}", (more, "b"), end])
    out.append([])
    out += _bar(m, head)
    cells: list = ["  cache  "]
    for c in v.cells.shown[:40]:
        cells.append((theme.GLYPH[c.outcome] or "\u00b7", c.outcome if c.outcome != "none" else "dim"))
    if len(v.cells.shown) > 40:
        cells.append("\u2026")
    why = " \u00b7 ".join(f"{x.label}: {x.text}" for x in v.misses[:2])
    out.append([*cells, f"  {why or v.then}"])
    ways = Counter(op.phase for op in m.ops_in(m.span))
    names = ", ".join(f"{number.count(ways[p])} {p[:3] if p == 'optimizer' else p}" for p in PHASES if ways[p])
    launched = m.launches_in(m.span)
    by = (
        f", {REASONS.get(launched[0].reason, launched[0].reason).split(':')[0]}"
        if len({r.reason for r in launched}) == 1
        else ""
    )
    out.append(
        [
            f"  ops    {v.counts[0]}{f' ({names})' if names else ''}  \u2192  {number.plural(len(launched), 'launch', 'launches')}{by}"
        ]
    )
    if v.costs:
        out += [[], [(f"  {'cost':<40}{'line':<20}{v.cost_unit:>7}{'%':>7}", "dim")]]
        for c in v.costs[:5]:
            bar = max(1, round(20 * c.bar))
            style = {"matmul": "matmul", "move": "move"}.get(c.paint, "other")
            out.append(
                [
                    f"  {_fit(c.name, 39):<40}{_fit(c.place, 19):<20}{c.time:>7}{c.share:>7}   ",
                    (_GLYPHS[style] * bar, style),
                ]
            )
        if v.others:
            out.append([(f"  {v.others.name:<60}{v.others.time:>7}{v.others.share:>7}", "dim")])
    if v.findings:
        out.append([])
        for i, f in enumerate(v.findings, 1):
            out.append([f"  {i}  ", (f.act.rstrip("."), "b"), f": {f.brief}"])
    each, step = m.recording
    cost = (
        f"recording cost {number.time(step)}{' a step' if m.steady else ''} ({number.percent(step / m.step_split.total, 2)}), "
        if each
        else ""
    )
    views, dropped = " ".join(f"p.{view.name}" for view in v.views), f"{number.count(m.trace.dropped)} dropped"
    parts = [dropped, f"more: {views}", cost.rstrip(", ")] if m.trace.dropped else [f"more: {views}", f"{cost}{dropped}"]
    out += [[], [(" \u00b7 ".join(filter(None, parts)), "dim")]]
    return out


def _facts(m: Metrics) -> list[tuple[str, str, str]]:
    """(label, bold figure, the rest) of the four facts, in the order of the page's columns."""
    if m.steady:
        mean, error = number.mean_error(s.ns for s in m.steady)
        unit, factor = number.time_unit(mean)
        around = f" \u00b1 {number.error_like(error, mean, factor)}" if error is not None else ""
        first = ("step", f"{number.sig(mean / factor)} {unit}", f"{around}, n = {len(m.steady)}")
    else:
        first = ("block", number.time(m.wall_ns), ", measured once")
    second = ("bytes", number.size(m.bytes), " in and out")
    if m.mfu is not None and m.peak is not None:
        second = (
            "MFU",
            number.percent(m.mfu),
            (f", HFU {number.percent(m.hfu)}" if m.also_ran else "") + f" of {number.rate(m.peak.flops)} ({m.peak.label})" + (", over 100%: check the peak" if m.mfu > 1 else ""),
        )
    n = m.outcomes()
    how = "to compile" if n["miss"] else "to read programs from disk"
    spent = f" ({number.time(m.whole.compile)} {how})" if m.whole.compile else ""
    cached = (
        "cache",
        f"{number.plural(n['hit'], 'hit')}, {number.plural(n['miss'], 'miss', 'misses')}",
        f"{spent}, {number.count(n['disk'])} from disk",
    )
    return [first, second, ("FLOPs", number.work(m.flops), " a step" if m.steady else ""), cached]


_GLYPHS = {"matmul": "\u2588", "other": "/", "move": ":"}


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"


def _bar(m: Metrics, head: str, width: int = 60) -> list:
    """The bar of a step and its labels: every part that exists has at least one character."""
    split = m.step_split
    small = split.python + split.idle + split.transfer
    parts = [
        ("compile", "x", "miss", split.compile),
        ("matmul", "\u2588", "matmul", split.device * m.matmul_share),
        ("other device" if m.matmul_share else "device", "/", "other", split.device * (1 - m.matmul_share)),
        ("dispatch", "\u2593", "host", split.dispatch),
        ("Python, idle, transfer", "-", "", small),
    ]
    unit, factor = number.time_unit(max(ns for *_, ns in parts))
    bar: list = [f"  {head:<7}"]
    labels: list = ["         "]
    for name, glyph, style, ns in parts:
        if ns <= 0:
            continue
        bar.append((glyph * max(1, round(width * ns / split.total)), style))
        labels += [(glyph, style), f" {name} {number.sig(ns / factor)}{' ' + unit if len(labels) == 1 else ''}  "]
    return [bar, labels]
