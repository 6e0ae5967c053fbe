"""The cache view: per call site its hits, misses and disk hits, what they cost and saved, and why each miss happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tpu_lab.metrics import Metrics
from tpu_lab.place import place
from tpu_lab.viz import frame, misses, number, theme
from tpu_lab.viz.view import View, template

SITES = 8  # shown open; the others fold to a table
CELLS = 48
SORTS = ("compiles", "wasted")  # seconds compiling; seconds that compiled programs which ran only once
_RANK = {"none": 0, "hit": 1, "disk": 2, "miss": 3}


def rows(m: Metrics, sort: str | None = None):
    """One row a call site: site, code, launches, hits, misses, disk, programs, trace_s, lower_s, compile_s, spent_s,
    saved_s (hits x this site's mean compile time), wasted_s (of spent_s, what went into programs that ran only once
    in this recording), lookup_us (mean), why (a list of sentences). Most seconds spent (or wasted) first."""
    import pandas as pd

    by_site: dict[tuple[str, int], list[int]] = {}
    for i, site in enumerate(m.sites):
        by_site.setdefault(site[:2], []).append(i)
    made, every = compiles_by_launch(m), m.trace.launches
    runs = Counter(r.key for r in every)
    table = []
    for (file, line), members in by_site.items():
        launches = [every[i] for i in members]
        outcome = Counter(r.cache for r in launches)
        own = [made[r.index] for r in launches if r.index in made]
        compiled = [c for c in own if c.tier == "compiled"]
        mean = sum(map(misses.spent, compiled)) / len(compiled) if compiled else 0.0
        table.append(
            {
                "site": place(file, line) or "unknown line",
                "code": m.site(launches[0])[2],
                "launches": len(launches),
                "hits": outcome["hit"],
                "misses": outcome["miss"],
                "disk": outcome["disk"],
                "programs": len({r.key for r in launches}),
                "trace_s": sum(c.trace_ns for c in own) / 1e9,
                "lower_s": sum(c.lower_ns for c in own) / 1e9,
                "compile_s": sum(c.compile_ns for c in own) / 1e9,
                "spent_s": sum(map(misses.spent, own)) / 1e9,
                "saved_s": outcome["hit"] * mean / 1e9,
                "wasted_s": sum(misses.spent(c) for c in own if runs[c.key] == 1) / 1e9,
                "lookup_us": sum(r.lookup_ns for r in launches) / len(launches) / 1e3,
                "why": [c.why for c in own],
                "_members": members,
            }
        )
    first = "wasted_s" if sort == "wasted" else "spent_s"
    table.sort(key=lambda r: (-r[first], -r["spent_s"], -r["launches"], r["site"]))
    frame_ = pd.DataFrame(table, columns=[*_COLUMNS, "_members"])
    members = frame_.pop("_members")
    frame_.attrs["members"] = _Kept(members.tolist())
    return frame_


class _Kept(list):
    """Positions of launches beside a table: pandas copies a table's attributes deeply at every slice."""

    def __deepcopy__(self, memo):
        return self


_COLUMNS = (
    "site", "code", "launches", "hits", "misses", "disk", "programs", "trace_s", "lower_s", "compile_s", "spent_s",
    "saved_s", "wasted_s", "lookup_us", "why",
)  # fmt: skip


def compiles_by_launch(m: Metrics) -> dict:
    return m.compile_of_launch


@dataclass(frozen=True)
class Cell:
    outcome: str
    tip: str


@dataclass(frozen=True)
class Cells:
    shown: tuple[Cell, ...]
    more: str
    label: str
    range: str  # "step 1 to 12", "51 launches"


def cells(m: Metrics, members: list[int]) -> Cells:
    """A cell a step for launches that mostly fall into steps (the worst outcome of the step), else a cell a launch."""
    records = m.trace.launches
    launches = [records[i] for i in members]
    steps = misses.step_of(m)
    inside = [r for r in launches if r.index in steps]
    tally = Counter(r.cache for r in launches)
    words = ", ".join(
        number.plural(tally[k], w, p)
        for k, w, p in (("hit", "hit", "hits"), ("miss", "miss", "misses"), ("disk", "disk hit", "disk hits"))
        if tally[k]
    )
    if len(m.steps) > 1 and len(inside) >= 0.9 * len(launches):
        worst = ["none"] * len(m.steps)
        for r in inside:
            at = steps[r.index] - 1
            if worst[at] != r.cache and _RANK[r.cache] > _RANK[worst[at]]:
                worst[at] = r.cache
        every = [Cell(o, f"step {i}: {theme.WORD[o]}") for i, o in enumerate(worst, 1)]
        what, span = number.plural(len(m.steps), "step"), f"step 1 to {number.count(len(m.steps))}"
    else:
        every = [Cell(r.cache, f"launch {r.index + 1}: {theme.WORD[r.cache]}") for r in launches]
        what = span = number.plural(len(launches), "launch", "launches")
    shown, rest = every[:CELLS], every[CELLS:]
    bad = sum(c.outcome in ("miss", "disk") for c in rest)
    more = (
        f"and {number.count(len(rest))} more" + (f", {number.count(bad)} of them not hits" if bad else "")
        if rest
        else ""
    )
    return Cells(tuple(shown), more, f"{what}: {words}", span)


@dataclass(frozen=True)
class Site:
    site: str
    code: str
    cells: Cells
    figures: tuple[tuple[str, str], ...]
    misses: tuple[misses.Miss, ...]
    share: float
    spent: str


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    bar: tuple
    bar_label: str
    sites: tuple[Site, ...]
    others: tuple[tuple[str, ...], ...]  # site, launches, hits, misses, disk, spent, saved
    others_words: str
    used: tuple[str, ...]  # which outcomes occur, for the legend
    foot: str
    hint: str = ""


@dataclass(frozen=True)
class Segment:
    paint: str
    share: float
    tip: str


def draw(m: Metrics, limit: int | None = None, sort: str | None = None) -> View:
    """limit: how many call sites stand open. sort: "compiles" (seconds compiling, the order it has anyway) or "wasted"
    (seconds that compiled programs which ran only once)."""
    if sort is not None and sort not in SORTS:
        raise ValueError(f"the cache view sorts by {' or '.join(SORTS)}, not by {sort!r}")
    store: dict = {}

    def model() -> Model:
        if "model" not in store:
            store["model"] = _model(m, view.rows, limit or SITES, sort)
        return store["model"]

    view = View(
        "cache",
        _title(m),
        _finding(m),
        lambda: rows(m, sort),
        lambda: _text(model()),
        lambda: template("cache.html", v=model()),
    )
    return view


def _sites(m: Metrics) -> list[tuple[str, int]]:
    return list(dict.fromkeys(site[:2] for site in m.sites))


def _finding(m: Metrics) -> str:
    n = m.outcomes()
    if not m.trace.launches:
        return "nothing was launched"
    words = [
        number.plural(len(_sites(m)), "call site"),
        number.plural(n["miss"], "miss", "misses") + (" explained" if n["miss"] else ""),
    ]
    return ", ".join(words + ([number.plural(n["disk"], "disk hit")] if n["disk"] else []))


def _title(m: Metrics) -> str:
    if why := frame.nothing(m):
        return why
    n = m.outcomes()
    compiled = [c for c in m.trace.compiles if c.tier == "compiled"]
    total = sum(map(misses.spent, m.trace.compiles))
    if not n["miss"] and not n["disk"]:
        return f"{number.plural(n['hit'], 'launch', 'launches')}, all of them hits: nothing was compiled"
    if not n["miss"]:
        return f"{number.plural(n['disk'], 'program')} read back from disk in {number.time(total)}, nothing compiled"
    head = f"{number.plural(len(compiled), 'compilation')} cost {number.time(sum(map(misses.spent, compiled)))}"
    if not compiled:  # misses whose compile records were dropped
        return f"{number.plural(n['miss'], 'miss', 'misses')}, {number.plural(n['hit'], 'hit')}"
    launches = {r.index: r for r in m.trace.launches}
    at = {c.launch: place(*m.site(launches[c.launch])[:2]) if c.launch in launches else "" for c in compiled}
    steps, by_site = misses.step_of(m), Counter(at.values())
    site, most = by_site.most_common(1)[0]
    causes = Counter(c.cause for c in compiled if at[c.launch] == site)
    grows = [c for c in compiled if c.cause == "shape" and "grows" in c.why]
    if len(grows) > 2:
        return f"{head}; {len(grows)} of them are one growing sequence in {site}"
    late = [c for c in compiled if steps.get(c.launch, 0) > 2]
    if len(m.steps) > 2 and not late and n["hit"]:
        last = max((steps.get(c.launch, 0) for c in compiled), default=0)
        return (
            f"{head}, all by step {last}; then {number.plural(n['hit'], 'hit')}"
            if last
            else f"{head}; {number.plural(n['hit'], 'hit')}"
        )
    if len(by_site) > 1 and most > len(compiled) / 2:
        cause = causes.most_common(1)[0][0]
        return f"{head}; {most} of them in {site}, by {cause}"
    return f"{head}; {number.plural(n['hit'], 'hit')}, {number.count(n['disk'])} from disk"


def _model(m: Metrics, table, limit: int, sort: str | None) -> Model:
    meta = frame.provenance(m)
    if not len(table):
        hint = frame.nothing_hint(m) if frame.nothing(m) else "Ops ran, but none needed a launch."
        return Model(_title(m), tuple(meta), (), "", (), (), "", (), "", hint)
    n = m.outcomes()
    meta = [p for p in meta if p[1] or "XLA" not in p[0]]
    keys = len({r.key for r in m.trace.launches})
    meta += [
        (number.plural(len(table), "call site"), False),
        (number.plural(keys, "program"), False),
        (f"{n['disk']} read from disk", False),
    ]
    total = float(table.spent_s.sum())
    made = compiles_by_launch(m)
    sites, others, launches = [], [], m.trace.launches
    for r, members in zip(table.itertuples(index=False), table.attrs["members"]):
        spent = number.time(r.spent_s * 1e9)
        saved = number.time(r.saved_s * 1e9) if r.misses or not r.disk else number.NONE  # read back: nobody saw it compile
        if len(sites) >= limit:
            others.append((r.site, *(number.count(v) for v in (r.launches, r.hits, r.misses, r.disk)), spent, saved))
            continue
        own = [made[i] for i in (launches[k].index for k in members) if i in made]
        figures = (
            (number.count(r.hits), "hit" if r.hits == 1 else "hits"), (number.count(r.misses), "miss" if r.misses == 1 else "misses"),
            (number.count(r.disk), "disk"), (spent, "spent"), (saved, "saved"),
        )  # fmt: skip
        share = r.spent_s / total if total else 0.0
        sites.append(Site(r.site, r.code, cells(m, members), figures, misses.explain(m, own), share, spent))
    bar = [
        Segment("compile", s.share, f"{s.site}: {s.spent}, {number.percent(s.share)}")
        for s in sites[:4]
        if s.share >= 0.1
    ]
    left = 1 - sum(s.share for s in bar)
    if bar and left > 0.005:
        bar.append(Segment("compile", left, f"others: {number.time(left * total * 1e9)}, {number.percent(left)}"))
    label = "seconds compiling by call site: " + ", ".join(s.tip for s in bar)
    rest = table.iloc[limit:]
    words = f"{number.plural(len(rest), 'more call site')}: {number.plural(int(rest.misses.sum()), 'miss', 'misses')}, {number.time(rest.spent_s.sum() * 1e9)}"
    used = [k for k in ("hit", "miss", "disk") if n[k]]
    if any(c.outcome == "none" for s in sites for c in s.cells.shown):
        used.append("none")
    foot = "saved: hits \u00d7 this site\u2019s mean compile time"
    if sort == "wasted":
        wasted = number.time(float(table.wasted_s.sum()) * 1e9)
        foot = f"sorted by wasted: {wasted} compiled programs that ran once \u00b7 {foot}"
    return Model(
        _title(m),
        tuple(meta),
        tuple(bar),
        label,
        tuple(sites),
        tuple(others[:40]),
        words if len(rest) else "",
        tuple(used),
        foot,
    )


def _text(v: Model) -> list:
    import textwrap

    out: list = [[(v.title, "b")], *frame.meta_lines(v.meta)]
    if v.hint:
        return [*out, [], *([part] for part in textwrap.wrap(v.hint, 98))]
    for s in v.sites:
        out += [[], [(s.site, "b"), f"  {s.code}"]]
        line: list = ["  "]
        for c in s.cells.shown:
            line.append((theme.GLYPH[c.outcome] or "\u00b7", c.outcome if c.outcome != "none" else "dim"))
        out.append([*line, ("  " + s.cells.more, "dim")] if s.cells.more else line)
        out.append(["  " + "  ".join(f"{value} {name}" for value, name in s.figures)])
        for miss in s.misses:
            room = 96 - 12 - len(miss.seconds) - 2
            parts = textwrap.wrap(theme.clean(miss.text), room) or [""]
            out.append([(f"  {miss.label:<12}", "dim"), f"{parts[0]:<{room}}  ", (miss.seconds, "dim")])
            out += [[f"  {'':<12}{part}"] for part in parts[1:]]
    if v.others_words:
        out += [[], [(v.others_words, "dim")]]
    return [*out, [], [(v.foot, "dim")]]
