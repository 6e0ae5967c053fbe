"""Misses in plain sentences: the changed numbers marked, and many alike folded to one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_lab.metrics import Metrics
from tpu_lab.trace import CompileRecord
from tpu_lab.viz import number

_CHANGED = re.compile(r"^(?P<what>.*?: )(?P<new>\w+\[[^\]]*\]), was (?P<old>\w+\[[^\]]*\])(?P<rest>.*)$", re.S)


@dataclass(frozen=True)
class Miss:
    """One line of a ledger. pieces: (text, style) with style "", "code" or "chg"."""

    label: str
    pieces: tuple[tuple[str, str], ...]
    seconds: str
    ns: int

    @property
    def text(self) -> str:
        return "".join(t for t, _ in self.pieces)


def sentence(why: str) -> tuple[tuple[str, str], ...]:
    """`x: f32[31,128], was f32[32,128] (...)` with its changed numbers marked; any other sentence as it is."""
    match = _CHANGED.match(why)
    if not match:
        return ((why, ""),)
    new, old = match["new"], match["old"]
    return ((match["what"], "code"), *_marked(new, old), (", was ", ""), *_marked(old, new), (match["rest"], ""))


def _marked(aval: str, other: str) -> list[tuple[str, str]]:
    """An aval in pieces: the sizes that differ from the other's are marked, or the whole when the ranks differ."""
    head, sizes = aval[:-1].split("[", 1)
    there = other[:-1].split("[", 1)
    mine, theirs = sizes.split(","), there[1].split(",")
    if len(mine) != len(theirs):
        return [(aval, "chg")]
    out = [(head, "code" if head == there[0] else "chg"), ("[", "code")]
    for i, (a, b) in enumerate(zip(mine, theirs)):
        out += [(",", "code")] if i else []
        out.append((a, "code" if a == b else "chg"))
    return [*out, ("]", "code")]


def explain(m: Metrics, compiles: list[CompileRecord], limit: int = 4) -> tuple[Miss, ...]:
    """A line a miss, in order; equal ones of one step, and those of one cause where there are more than `limit`, in one line."""
    steps = step_of(m)
    alike: dict[tuple, list[CompileRecord]] = {}
    for c in compiles:
        alike.setdefault((c.tier, c.cause, c.why, steps.get(c.launch)), []).append(c)
    if len(alike) > limit:
        alike = {}
        for c in compiles:
            alike.setdefault((c.tier, c.cause, _pattern(c.why)), []).append(c)
    if len(alike) > limit + 1:
        alike = {}
        for c in compiles:
            alike.setdefault((c.tier, c.cause), []).append(c)
    out = []
    for members in alike.values():
        on = {steps.get(c.launch, 0) for c in members}
        name = "disk hit" if members[0].tier == "disk" else "miss"
        where = label(min(on)) if len(on) == 1 else ""
        if len(members) > 1 or not where:
            where = number.plural(len(members), name, "misses" if name == "miss" else "disk hits")
        out.append(Miss(where, _together(members), seconds(members), sum(map(spent, members))))
    return tuple(out)


def _pattern(why: str) -> str:
    """Two sentences are alike when they differ in numbers only."""
    return re.sub(r"\d+", "#", why)


def _together(members: list[CompileRecord]) -> tuple[tuple[str, str], ...]:
    """`idx: i64[1,2], then i64[1,3], then ... (a sequence grows by one): pad`; else the first sentence and how many more."""
    if len({c.why for c in members}) == 1:
        return sentence(members[0].why)
    matches = [_CHANGED.match(c.why) for c in members]
    first, second = matches[0], matches[1]
    if (
        first
        and second
        and all(x and x["what"] == first["what"] and x["rest"] == first["rest"] for x in matches)
        and second["new"] != first["new"]
    ):
        last = matches[-1]["new"]  # type: ignore[index]
        return (
            (first["what"], "code"), *_marked(first["new"], second["new"]), (", then ", ""), *_marked(second["new"], first["new"]),
            (" \u2026 " if len(members) > 2 else "", ""), *(_marked(last, second["new"]) if len(members) > 2 else ()), (first["rest"], ""),
        )  # fmt: skip
    return (*sentence(members[0].why), (f", and {len(members) - 1} more of this cause", "dim"))


def spent(c: CompileRecord) -> int:
    """Nanoseconds that making or reading back this program took."""
    return c.trace_ns + c.lower_ns + c.compile_ns


def seconds(members: list[CompileRecord]) -> str:
    """`0.41 + 0.52 + 2.99 s`: trace, lower, compile; for several the mean of each."""
    n = len(members)
    parts = [sum(getattr(c, k) for c in members) / n for k in ("trace_ns", "lower_ns", "compile_ns")]
    unit, factor = number.time_unit(max(max(parts), 1))
    if members[0].tier == "disk":
        text = f"{number.sig(sum(parts) / factor)}{number.NBSP}{unit} to read back"
    else:
        text = f"{' + '.join(number.sig(p / factor) for p in parts)}"
        text = f"({text})" if n > 1 else text
        text = f"{text}{number.NBSP}{unit}"
    return f"{number.count(n)} \u00d7 {text}" if n > 1 else text


def step_of(m: Metrics) -> dict[int, int]:
    """Launch index -> step number, for launches inside steps."""
    return m.step_of_launch


def label(step: int | None) -> str:
    return f"step {number.count(step)}" if step else ""
