"""The summary: one screen that says where the time went, in how many launches, what was compiled, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tpu_lab import advice
from tpu_lab.metrics import PARTS, Metrics, Split
from tpu_lab.place import place
from tpu_lab.viz import cache, frame, fusions, lanes, memory, misses, number, ops, roofline, summary_text, theme
from tpu_lab.viz.view import View, template

TOP = 5
ROOM = 200_000  # of the 300 KB that a cell may take
FOLDED = (ops, fusions, cache, memory, roofline)  # the views inside, each a closed fold that says its finding
SORTS = tuple(dict.fromkeys((*ops.SORTS, *cache.SORTS)))
ORDER = ("device", "dispatch", "Python", "transfer", "idle", "compile")
PAINTS = {"dispatch": "dispatch", "Python": "python", "transfer": "move", "idle": "idle", "compile": "compile"}


def rows(m: Metrics):
    """One row a figure: part (time, step, work, cache, count, cost), name, value, unit, share (of its part), where."""
    import pandas as pd

    out: list[tuple] = []
    for part, split in (("time", m.whole), ("step", m.step_split if m.steady else None)):
        if split is not None:
            out += [
                (part, name, ns / 1e6, "ms", ns / split.total if split.total else 0.0, "") for name, ns in split.parts()
            ]
            out.append((part, "total", split.total / 1e6, "ms", 1.0, ""))
            out.append((part, "hidden host work", split.hidden / 1e6, "ms", None, ""))
    a_step = "a step" if m.steady else "in the block"
    out.append(("work", f"model FLOPs {a_step}", m.flops, "FLOP", None, ""))
    out.append(("work", f"bytes of launches {a_step}", m.bytes, "B", None, ""))
    if m.peak:
        out.append(("work", "peak", m.peak.flops, "FLOP/s", None, m.peak.source))
        out.append(("work", "MFU", m.mfu, "", m.mfu, m.peak.label))
        out.append(("work", "HFU", m.hfu, "", m.hfu, m.peak.label))
    out += [("cache", name, float(n), "launches", None, "") for name, n in m.outcomes().items()]
    out.append(("count", "steps", float(len(m.steps)), "", None, ""))
    out.append(("count", "steady steps", float(len(m.steady)), "", None, ""))
    out.append(("count", f"ops {a_step}", float(len(m.ops_in(m.span))), "", None, ""))
    out.append(("count", f"launches {a_step}", float(len(m.launches_in(m.span))), "", None, ""))
    out.append(("count", "dropped records", float(m.trace.dropped), "", None, ""))
    total = sum(c.ns for c in m.costs)
    for c in m.costs[:TOP]:
        out.append(("cost", c.name, c.ns / 1e6, "ms", c.ns / total if total else None, place(c.file, c.line)))
    others = m.costs[TOP:]
    if others:
        rest = sum(c.ns for c in others)
        out.append(("cost", f"{len(others)} others", rest / 1e6, "ms", rest / total if total else None, ""))
    return pd.DataFrame(out, columns=["part", "name", "value", "unit", "share", "where"])


@dataclass(frozen=True)
class Segment:
    paint: str
    share: float
    tip: str


@dataclass(frozen=True)
class Part:
    name: str
    paints: tuple[str, ...]
    time: str
    share: str


@dataclass(frozen=True)
class Fact:
    """Numbers with their units, and what they are."""

    figures: tuple[tuple[str, str], ...]
    caption: str


@dataclass(frozen=True)
class CostRow:
    name: str
    place: str
    time: str
    share: str
    paint: str
    bar: float


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    hint: str = ""
    facts: tuple[Fact, ...] = ()
    whole: tuple[Segment, ...] = ()
    whole_label: str = ""
    whole_time: str = ""
    step: tuple[Segment, ...] = ()
    step_label: str = ""
    step_time: str = ""
    step_share: float = 0.0
    once: str = ""
    parts: tuple[Part, ...] = ()
    counts: tuple[str, str] = ("", "")
    ops: Any = None
    phases: tuple = ()
    launches: Any = None
    launches_words: str = ""
    device: Any = None
    device_words: str = ""
    kinds: tuple[tuple[str, str], ...] = ()
    cells: Any = None
    cells_words: str = ""
    misses: tuple = ()
    then: str = ""
    site: str = ""
    cost_unit: str = "ms"
    costs: tuple[CostRow, ...] = ()
    others: CostRow | None = None
    costs_note: str = ""
    findings: tuple = ()
    views: tuple[View, ...] = ()
    foot: tuple[str, str] = ("", "")
    room: int = 0  # characters for the views inside


def draw(m: Metrics, limit: int | None = None, sort: str | None = None, room: int = ROOM) -> View:
    """limit: how many costs are listed. sort: an order of the views inside; the summary itself has one order.
    room: characters for the views inside; one that does not fit is named, not drawn."""
    if sort is not None and sort not in SORTS:
        raise ValueError(f"the summary sorts the views in it by {', '.join(SORTS)}, not by {sort!r}")
    store: dict = {}

    def model() -> Model:
        if "model" not in store:
            store["model"] = _model(m, limit or TOP, sort, room)
        return store["model"]

    title = _title(m)
    return View(
        "summary",
        title,
        title,
        lambda: rows(m),
        lambda: summary_text.lines(m, model()),
        lambda: template("summary.html", v=model()),
    )


def _title(m: Metrics) -> str:
    if why := frame.nothing(m):
        return why
    launches = len(m.launches_in(m.span))
    n = len(m.ops_in(m.span))
    head = f"{number.plural(n, 'op')} run{'s' if n == 1 else ''} as {number.plural(launches, 'launch', 'launches')}"
    if n and not launches and m.trace.meta.get("error"):
        head = f"{number.plural(n, 'op')} called, none launched"
    if not n:
        head = f"{number.plural(launches, 'launch', 'launches')} of compiled code"
    split = m.step_split
    name, ns = split.largest()
    share = number.percent(ns / split.total if split.total else 0.0, 2)
    what = {"device": "on the device", "compile": "compiling" if m.outcomes()["miss"] else "reading programs from disk", "dispatch": "in dispatch", "transfer": "waiting for values",
            "Python": "in Python", "idle": "idle"}[name]  # fmt: skip
    time = number.time(split.total)
    return f"{head}: {time}{' a step' if m.steady else ''}, {share} of it {what}"


def segments(split: Split, matmul: float, order) -> tuple[Segment, ...]:
    """The parts of a bar, in order; the device's part is matmuls, then the rest."""
    out = []
    for name, ns in sorted(split.parts(), key=lambda p: order.index(p[0])):
        share = ns / split.total if split.total else 0.0
        if name == "device":
            for paint, word, part in (("matmul", "matmul", matmul), ("other", "other device work", 1 - matmul)):
                out.append(
                    Segment(paint, share * part, f"{word}: {number.time(ns * part)}, {number.percent(share * part)}")
                )
        else:
            out.append(Segment(PAINTS[name], share, f"{name}: {number.time(ns)}, {number.percent(share)}"))
    return tuple(s for s in out if s.share > 0)


def _facts(m: Metrics) -> tuple[Fact, ...]:
    facts = []
    if m.steady:
        mean, error = number.mean_error(s.ns for s in m.steady)
        value, unit = number.time_pair(mean)
        factor = dict(number._TIMES)[unit]
        around = f"\u00b1 {number.error_like(error, mean, factor)} " if error is not None else ""
        facts.append(Fact(((value, around + unit),), f"a step, measured, n = {len(m.steady)}"))
    else:
        facts.append(Fact((number.time_pair(m.wall_ns),), "the whole block, measured once"))
    if m.mfu is not None and m.peak is not None:
        over = " \u00b7 over 100%: check the peak" if m.mfu > 1 else ""
        hardware = ((number.percent(m.hfu), f"HFU, with {m.also_ran}"),) if m.also_ran else ()
        left_out = ", compile left out" if m.step_split.compile else ""
        facts.append(
            Fact(((number.percent(m.mfu), "MFU"), *hardware), f"of {number.rate(m.peak.flops)}, {m.peak.label}{left_out}{over}")
        )
    elif m.flops:
        facts.append(Fact(((number.NONE, "MFU"),), "no peak is known for this chip: give peak_flops="))
    caption = ("model FLOPs a step" if m.steady else "model FLOPs") + (", causal attention half" if m.masked else "")
    if not m.flops:
        facts.append(
            Fact((number.pair(m.bytes, number._SIZES),), "in and out of the launches" + (" a step" if m.steady else ""))
        )
    else:
        facts.append(Fact((number.work_pair(m.flops),), caption))
    n = m.outcomes()
    figures = (
        (number.count(n["hit"]), "hit" if n["hit"] == 1 else "hits"),
        (number.count(n["miss"]), "miss" if n["miss"] == 1 else "misses"),
    )
    facts.append(Fact(figures, f"compile cache, {number.count(n['disk'])} from disk"))
    return tuple(facts)


def _model(m: Metrics, top: int, sort: str | None, room: int) -> Model:
    title, meta = _title(m), tuple(frame.provenance(m))
    if frame.nothing(m):
        return Model(title, meta, hint="" if m.trace.meta.get("recording") else frame.nothing_hint(m))
    split, span = m.step_split, m.span
    whole = segments(m.whole, m.matmul_share, ("compile", *ORDER[:-1]))
    step = segments(split, m.matmul_share, ORDER)
    parts = []
    for name, ns in sorted(split.parts(), key=lambda p: ORDER.index(p[0])):
        paints = ("matmul", "other") if name == "device" else (PAINTS[name],)
        parts.append(Part(name, paints, number.time(ns), number.percent(ns / split.total if split.total else 0.0)))
    lane, words = lanes.launch_lane(m, span)
    words += f" \u00b7 {number.size(sum(r.bytes for r in m.launches_in(span)))} in and out"
    device = lanes.device_lane(m, span) if span.ops[1] > span.ops[0] else None
    strip, strip_words, why, then, site = _cache(m)
    kinds = [(k, w) for k, w in (("matmul", "matmul"), ("other", "elementwise"), ("move", "data movement"), ("free", "view, free"))
             if any(theme.paint(o.kind) == k for o in m.ops_in(span))]  # fmt: skip
    device_words = ""
    if device:
        at = f" in step {span.number}" if m.steady else ""
        device_words = f"width is device time, {number.time(float(m.ops_time[slice(*span.ops)].sum()))}{at}, shared within a launch by FLOPs and bytes"
    costs, others, unit = _costs(m, top)
    return Model(
        title, meta, "", _facts(m), whole, _bar_label(m.whole), number.time(m.wall_ns), step if m.steady else (), _bar_label(split),
        number.time(split.total), split.total / m.whole.total if m.steady and m.whole.total else 0.0,
        f"compile {number.time(m.whole.compile)}, {number.plural(len(m.trace.compiles), 'program')}" if m.steady and m.whole.compile else "", tuple(parts),
        (number.count(len(m.ops_in(span))), number.count(len(m.launches_in(span)))), lanes.ops_lane(m, span), lanes.phases(m, span), lane,
        words, device, device_words, tuple(kinds), strip, strip_words, why, then, site, unit, costs, others,
        "device time a step" if m.steady else "device time", tuple(advice.findings(m)),
        tuple(v.draw(m, sort=sort if sort in getattr(v, "SORTS", ()) else None) for v in FOLDED), _foot(m), room,
    )  # fmt: skip


def _bar_label(split: Split) -> str:
    return ", ".join(f"{name} {number.time(ns)}" for name, ns in split.parts() if ns > 0)


def _cache(m: Metrics) -> tuple:
    """(cells, their words, a line a miss, what the hits cost, the call site)."""
    strip = cache.cells(m, list(range(len(m.trace.launches))))
    sites = list(dict.fromkeys(site[:2] for site in m.sites))
    site = place(*sites[0]) if len(sites) == 1 else number.plural(len(sites), "call site")
    lines = misses.explain(m, m.trace.compiles, 4)
    if len(lines) > 5:
        rest = lines[4:]
        more = misses.Miss(f"{len(rest)} more", (("other causes, in the cache view", ""),), "", sum(x.ns for x in rest))
        lines = (*lines[:4], more)
    hits = [r for r in m.trace.launches if r.cache == "hit"]
    then = ""
    if hits:
        each = sum(r.lookup_ns for r in hits) / len(hits)
        then = f"{'then ' if lines else ''}{number.time(each)} to find a program again, each launch"
    return strip, strip.range, lines, then, site


def _costs(m: Metrics, top: int) -> tuple[tuple[CostRow, ...], CostRow | None, str]:
    total = sum(c.ns for c in m.costs)
    if not total:
        return (), None, "ms"
    unit, factor = number.time_unit(m.costs[0].ns)
    longest = m.costs[0].ns
    out = [
        CostRow(
            c.name,
            place(c.file, c.line),
            number.sig(c.ns / factor),
            number.cell(c.ns / total),
            theme.paint(c.kind),
            c.ns / longest,
        )
        for c in m.costs[:top]
    ]
    rest = m.costs[top:]
    others = None
    if rest:
        ns = sum(c.ns for c in rest)
        others = CostRow(
            number.plural(len(rest), "other"), "", number.sig(ns / factor), number.cell(ns / total), "", 0.0
        )
    return tuple(out), others, unit


def _foot(m: Metrics) -> tuple[str, str]:
    each, step = m.recording
    trace = m.trace
    records = len(trace.ops) + len(trace.launches) + len(trace.compiles) + len(trace.waits)
    words = []
    if each:
        share = step / m.step_split.total if m.step_split.total else 0.0
        words.append(
            f"Recording cost {number.time(each)} an op, {number.time(step)}{' a step' if m.steady else ''} ({number.percent(share, 2)})"
        )
    dropped = f"{number.count(trace.dropped)} dropped" if trace.dropped else "none dropped"
    words.append(f"{number.plural(records, 'record')}, {dropped}")
    if m.late_ns > 1e5:
        words.append(f"the device went on for {number.time(m.late_ns)} after the block")
    return " \u00b7 ".join(words), "TPU Lab" + (f" {trace.meta['version']}" if trace.meta.get("version") else "")


assert set(PARTS) == set(ORDER)
