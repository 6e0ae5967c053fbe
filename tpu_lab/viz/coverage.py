"""Which ops a model needs: how TPU Lab does each, and whether TorchTPU has it; or the totals of TorchTPU's lists."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass

from tpu_lab.place import family, place, short_file
from tpu_lab.viz import frame, number
from tpu_lab.viz.view import View, template

SHOWN = 12  # rows before the fold
HOW = {
    "lowered": "lowered to XLA",
    "decomposed": "PyTorch\u2019s decomposition, in the program",
    "composite": "PyTorch\u2019s own, of other ops",
    "view": "a view, free",
    "built in": "memory and copies",
    "CPU": "on the CPU, by its nature",
    "outside": "no dense kernel to follow",
    "unknown": "not in this PyTorch",
}
AWAY = ("CPU", "outside", "unknown")
WAY = {"forward": "\u2192 fwd", "backward": "\u2190 bwd", "optimizer": "optimizer"}


@dataclass(frozen=True)
class Need:
    """One op. how: a key of HOW. torch_tpu: "registered" | "missing" | "PyTorch’s" (built from other ops)."""

    name: str  # "aten.add.Tensor"
    how: str
    torch_tpu: str
    calls: int
    phases: tuple[str, ...]
    modules: tuple[str, ...]
    file: str
    line: int
    code: str
    why: str = ""  # the reason for "CPU" and "outside"
    gradient: str = ""  # "formula" | "parts" | ""
    dtypes: str = ""  # "bf16 f32": those with which the tests call it
    test: str = ""

    @property
    def short(self) -> str:
        return self.name.removesuffix(".default")

    @property
    def place(self) -> str:
        return place(self.file, self.line)


@dataclass(frozen=True)
class Covered:
    """The ops of one model (or those that were asked for: model is "")."""

    model: str
    needs: tuple[Need, ...]
    backward: bool
    optimizer: str


def rows(needs):
    """One row an op, in the order of first use: op, tpu_lab, torch_tpu, calls, phase, module, file, line, code, and what
    is known of it: why it is on the CPU, dtypes and test of the clone's tests, gradient."""
    import pandas as pd

    return pd.DataFrame(
        {
            "op": [n.name for n in needs],
            "tpu_lab": [n.how for n in needs],
            "torch_tpu": [n.torch_tpu for n in needs],
            "calls": [n.calls for n in needs],
            "phase": [", ".join(n.phases) for n in needs],
            "module": [n.modules[0] if n.modules else "" for n in needs],
            "file": [short_file(n.file) for n in needs],
            "line": [n.line for n in needs],
            "code": [n.code for n in needs],
            "why": [n.why for n in needs],
            "dtypes": [n.dtypes for n in needs],
            "gradient": [n.gradient for n in needs],
            "test": [n.test for n in needs],
        }
    )


def title(c: Covered) -> str:
    """Will it run on TorchTPU?"""
    if not c.needs:
        return "No op ran on 'tpu': the model called none"
    ops, lacks = number.plural(len(c.needs), "op"), [n for n in c.needs if n.torch_tpu == "missing"]
    if not lacks:
        return f"{ops}; TorchTPU has {'it' if len(c.needs) == 1 else 'them all' if len(c.needs) > 2 else 'both'}"
    first = lacks[0]
    where = f" at {first.place}" if first.place else ""
    if len(c.needs) == 1:
        return f"TorchTPU lacks {first.short}{where}"
    return f"{ops}; TorchTPU lacks {number.count(len(lacks))} of them: {first.short}{where}"


@dataclass(frozen=True)
class Line:
    """One op as it is printed."""

    name: str
    how: str
    words: str
    has: str  # "hit" | "miss" | "none": the cell
    torch_tpu: str
    way: str
    module: str
    place: str
    calls: str


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    lines: tuple[Line, ...]
    more: tuple[Line, ...]
    fold: str
    foot: str
    totals: tuple = ()  # (words, of TorchTPU's, of those it lacks)
    heads: tuple[str, str] = ("", "")
    reasons: tuple = ()  # (why, names) of those that are not on the device


def draw(c: Covered) -> View:
    """The view of a model's ops."""
    how, found = Counter(n.how for n in c.needs), Counter(n.torch_tpu for n in c.needs)
    parts = ["forward"] + ["backward"] * c.backward + [c.optimizer] * bool(c.optimizer)
    meta = [(c.model, True), (", ".join(parts), False)] if c.model else []
    if c.needs:
        meta.append(("TPU Lab: " + ", ".join(f"{number.count(how[h])} {h}" for h in HOW if how[h]), False))
        words = [
            (found["registered"], "registered"),
            (found["PyTorch\u2019s"], "PyTorch\u2019s own"),
            (found["missing"], "missing"),
        ]
        meta.append(("TorchTPU 0.2.0: " + ", ".join(f"{number.count(n)} {w}" for n, w in words if n), False))
    ranked = sorted(c.needs, key=lambda n: (n.torch_tpu != "missing", n.how not in AWAY))
    lines = tuple(_line(n) for n in ranked)
    fold = f"{number.plural(len(lines) - SHOWN, 'other')}, which TorchTPU has" if len(lines) > SHOWN else ""
    if any(n.torch_tpu == "missing" for n in ranked[SHOWN:]):
        fold = number.plural(len(lines) - SHOWN, "other")
    foot = "An op that TorchTPU lacks raises there: \u201cis not implemented for TPU\u201d" if found["missing"] else ""
    model = Model(title(c), tuple(meta), lines[:SHOWN], lines[SHOWN:212], fold, foot)
    finding = model.title
    return View(
        "coverage",
        finding,
        finding,
        lambda: rows(c.needs),
        lambda: _text(model),
        lambda: template("coverage.html", v=model),
    )


def draw_lists(registered, missing) -> View:
    """The view of TorchTPU's two lists: what it registers, and what the CPU has and it lacks."""
    have = [sum(n.how not in AWAY for n in list_) for list_ in (registered, missing)]
    text = (
        f"Without a CPU fallback: {number.count(have[0])} of the {number.count(len(registered))} ops TorchTPU has, "
        f"{number.count(have[1])} of {number.count(len(missing))} it lacks"
    )
    counts = [Counter(n.how for n in list_) for list_ in (registered, missing)]
    totals = tuple((HOW[h], *(number.count(c[h]) for c in counts)) for h in HOW if counts[0][h] or counts[1][h])
    rest = [n for n in (*registered, *missing) if n.how in AWAY]
    lines = tuple(_line(n) for n in rest)
    model = Model(
        text, (("aten overloads of TorchTPU 0.2.0", False), ("dtypes, gradient and test of each: --csv or --md", False)), (), lines[:200],
        f"{number.plural(len(rest), 'op')} on the CPU or not in this PyTorch" if rest else "", "", totals,
        ("TorchTPU registers", "TorchTPU lacks"), reasons(rest),
    )  # fmt: skip
    every = (*registered, *missing)
    return View(
        "coverage", text, text, lambda: rows(every), lambda: _text(model), lambda: template("coverage.html", v=model)
    )


def reasons(needs) -> tuple:
    """((why, short names), ...) of the ops that are not on the device, those on the CPU first."""
    found: dict[str, list[str]] = {}
    for n in sorted(needs, key=lambda n: AWAY.index(n.how)):
        found.setdefault(n.why or HOW[n.how], []).append(n.short.removeprefix("aten."))
    return tuple((why, tuple(names)) for why, names in found.items())


def markdown(view: View, needs) -> str:
    """The two lists as a page: the totals, the ops that are not on the device with the reason, then a row an op."""
    listed = [[n for n in needs if n.torch_tpu == "missing"], [n for n in needs if n.torch_tpu != "missing"]]
    missing, registered = (Counter(n.how for n in ops) for ops in listed)
    out = ["# Ops", "", f"{view.title}. Written by `tpu-lab coverage --md`.", ""]
    out += ["| TPU Lab does it as | TorchTPU registers | TorchTPU lacks |", "|---|---:|---:|"]
    out += [f"| {words} | {registered[h]} | {missing[h]} |" for h, words in HOW.items() if registered[h] or missing[h]]
    out += ["", "## Not on the device", ""]
    for why, names in reasons([n for n in needs if n.how in AWAY]):
        out.append(f"- {why}: " + ", ".join(f"`{name}`" for name in names))
    out += ["", "## All", "", "dtypes and test: what the tests call. Gradient: PyTorch’s own formula, or that of the parts.", ""]
    out += ["| op | TorchTPU | TPU Lab | dtypes | gradient | test |", "|---|---|---|---|---|---|"]
    for n in sorted(needs, key=lambda n: n.name):
        out.append(f"| `{n.short}` | {n.torch_tpu} | {n.how} | {n.dtypes} | {n.gradient} | {n.test} |")
    return "\n".join(out) + "\n"


def _line(n: Need) -> Line:
    cell = {"registered": "hit", "missing": "miss"}.get(n.torch_tpu, "none")
    return Line(
        n.short, n.how, HOW[n.how], cell, n.torch_tpu, " ".join(WAY[p] for p in n.phases), family(n.modules), n.place,
        number.count(n.calls) if n.calls else "",
    )  # fmt: skip


def _text(v: Model) -> list:
    out: list = [*([(line, "b")] for line in textwrap.wrap(v.title, 98)), *frame.meta_lines(v.meta), []]
    if v.totals:
        out.append([(f"  {'TPU Lab does it as':<44}{v.heads[0]:>22}{v.heads[1]:>18}", "dim")])
        out += [[f"  {words:<44}{a:>22}{b:>18}"] for words, a, b in v.totals]
        for why, names in v.reasons:
            out += [[], [f"  {number.plural(len(names), 'op')}: {why}"]]
            out += [[(f"    {line}", "dim")] for line in textwrap.wrap(", ".join(names), 92)]
        return out
    if v.lines:
        out.append([(f"  {'op':<36}{'TPU Lab':<12}{'TorchTPU':<13}{'line':<20}{'way':<12}", "dim")])
    mark = {"hit": ("\u2713", "hit"), "miss": ("\u2717", "miss"), "none": (" ", "")}
    for r in v.lines:
        name = r.name if len(r.name) <= 35 else r.name[:34] + "\u2026"
        out.append([mark[r.has], f" {name:<36}{r.how:<12}{r.torch_tpu:<13}{r.place[-19:]:<20}{r.way}"])
    if v.fold:
        out.append([(f"  {v.fold}", "dim")])
    return [*out, *([[], [(v.foot, "dim")]] if v.foot else [])]
