"""A model on "tpu" beside the same on the CPU: its modules by relative error, against the tolerance of their dtype."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from tpu_lab.viz import frame, number
from tpu_lab.viz.nonfinite import figure
from tpu_lab.viz.view import View, template

SHOWN = 12  # rows before the fold


class Difference(NamedTuple):
    """One call of a module, or one gradient."""

    name: str  # "h.0.attn"; "" is the model itself
    kind: str  # the module's class, or "gradient"
    order: int  # in which it was compared: program order
    shape: str
    error: float  # |tpu - cpu| / |cpu|, 2-norm
    largest: float  # largest |tpu - cpu|
    excess: float  # largest |tpu - cpu| / (atol + rtol |cpu|): over 1 is too much
    rtol: float
    atol: float
    inherited: float | None  # the error of its inputs


@dataclass(frozen=True)
class Comparison:
    """Everything that was compared, and under which conditions."""

    model: str
    found: tuple[Difference, ...]
    silent: bool  # dropout was switched off
    random: str | bool  # False, or what to say of random numbers that were drawn all the same: where, or the way out
    mode: str
    precision: str  # torch.tpu.precision, "" when nobody chose
    tolerance: tuple[float, float] | None  # the caller's


def rows(c: Comparison):
    """One row a module call or gradient, largest error first: module, kind, order, shape, error, inherited, largest,
    of_tolerance (largest difference as a part of what is allowed), within, rtol, atol."""
    import pandas as pd

    ranked = sorted(c.found, key=lambda d: (-d.error, d.order))
    return pd.DataFrame(
        {
            "module": [d.name or c.model for d in ranked],
            "kind": [d.kind for d in ranked],
            "order": [d.order for d in ranked],
            "shape": [d.shape for d in ranked],
            "error": [d.error for d in ranked],
            "inherited": [d.inherited for d in ranked],
            "largest": [d.largest for d in ranked],
            "of_tolerance": [d.excess for d in ranked],
            "within": [d.excess <= 1 for d in ranked],
            "rtol": [d.rtol for d in ranked],
            "atol": [d.atol for d in ranked],
        }
    )


def title(c: Comparison) -> str:
    """Who differs, or that nobody does."""
    if not c.found:
        return "Nothing to compare: no module gave a tensor"
    worst = max(c.found, key=lambda d: d.error)
    wrong = sorted((d for d in c.found if d.excess > 1), key=lambda d: d.order)
    what = "modules and gradients" if any(d.kind == "gradient" for d in c.found) else "modules"
    if len(c.found) == 1:
        what = "module"
    if not wrong:
        return (
            f"All {number.count(len(c.found))} {what} agree within tolerance: error at most {power(worst.error)}, at {worst.name or c.model}"
            if len(c.found) > 1
            else f"{worst.name or c.model} agrees within tolerance: error {power(worst.error)}"
        )
    first = wrong[0]
    return (
        f"{number.count(len(wrong))} of {number.count(len(c.found))} {what} differ beyond tolerance, "
        f"first {first.name or c.model}: error {power(first.error)}"
    )


def power(value: float | None) -> str:
    """`1.20e−5`: an error, always with its power of ten, so that a column reads from top to bottom."""
    if not value or math.isinf(value):
        return figure(value)
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}".replace("-", "−")


@dataclass(frozen=True)
class Line:
    """One row as it is printed."""

    name: str
    kind: str
    shape: str
    error: str
    inherited: str
    excess: str
    ok: bool
    share: float  # of the bar, on a scale of powers of ten from 1e-8 to 1


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    lines: tuple[Line, ...]
    more: tuple[Line, ...]
    fold: str
    foot: str


def draw(c: Comparison) -> View:
    """The view of a comparison."""
    model = _model(c)
    return View(
        "compare",
        model.title,
        model.title,
        lambda: rows(c),
        lambda: _text(model),
        lambda: template("compared.html", v=model),
    )


def _model(c: Comparison) -> Model:
    meta: list[tuple[str, bool]] = [(c.model, False), (c.mode, True), ("tpu against cpu", False)]
    if c.precision:
        meta.append((f"float32 precision {c.precision}", False))
    if c.silent:
        meta.append(("dropout off, as random numbers differ between devices", False))
    if c.random:
        meta.append((f"random numbers were drawn and differ: {c.random}", True))
    ranked = sorted(c.found, key=lambda d: (-d.error, d.order))

    def line(d: Difference) -> Line:
        share = 0.0 if not d.error else 1.0 if math.isinf(d.error) else 1 + math.log10(d.error) / 8
        share = min(max(share, 0.0), 1.0)
        name = d.name or c.model
        return Line(name, d.kind, d.shape, power(d.error), power(d.inherited), figure(d.excess), d.excess <= 1, share)

    lines = [line(d) for d in ranked]
    rest = ranked[SHOWN:]
    fold = f"{number.plural(len(rest), 'other')}: error at most {power(rest[0].error)}" if rest else ""
    tolerances = sorted({(d.rtol, d.atol) for d in c.found})
    told = " \u00b7 ".join(f"rtol {power(r)}, atol {power(a)}" for r, a in tolerances[:3])
    whose = "yours" if c.tolerance else "torch.testing\u2019s for the dtype"
    return Model(
        title(c),
        tuple(meta),
        tuple(lines[:SHOWN]),
        tuple(lines[SHOWN:212]),
        fold,
        f"tolerance, {whose}: {told}" if c.found else "",
    )


def _text(v: Model) -> list:
    out: list = [*([(line, "b")] for line in textwrap.wrap(v.title, 98)), *frame.meta_lines(v.meta), []]
    if v.lines:
        out.append([(f"  {'module':<34}{'kind':<15}{'shape':<16}{'error':>10}{'inputs':>10}{'of tol.':>9}", "dim")])
    for r in v.lines:
        mark = ("\u2713", "hit") if r.ok else ("\u2717", "miss")
        out.append(
            [
                mark,
                f" {_tail(r.name, 33):<34}{r.kind[:14]:<15}{r.shape[:15]:<16}{r.error:>10}{r.inherited:>10}{r.excess:>9}",
            ]
        )
    if v.fold:
        out.append([(f"  {v.fold}", "dim")])
    return [*out, [], *([(line, "dim")] for line in textwrap.wrap(v.foot, 98))]


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "\u2026" + text[1 - width :]
