"""A tutorial's check on the page and in a terminal: glyph, the learner's code, the verdict, a hint, bullet bars."""

from __future__ import annotations

import textwrap

from tpu_lab.score import Outcome, Score, Tally
from tpu_lab.viz import number, theme
from tpu_lab.viz.view import View, template

GLYPH = {"pass": "\u2713", "fail": "\u2717", "open": "\u25cb"}
SAID = {"pass": "passed", "fail": "not yet", "open": "not tried"}
BAR = 28  # characters of a bullet bar in a terminal


class Checked(View):
    """A check, or all of a tutorial, that shows itself. state: "pass", "fail" or "open". rows: one line a score."""

    outcomes: tuple[Outcome, ...] = ()

    def __bool__(self) -> bool:
        raise TypeError("a check is shown, not asked: its state is .passed")

    @property
    def passed(self) -> bool:
        return bool(self.outcomes) and all(outcome.state == "pass" for outcome in self.outcomes)

    @property
    def state(self) -> str:
        states = {outcome.state for outcome in self.outcomes}
        return states.pop() if len(states) == 1 else "fail" if "fail" in states else "open"

    def hint(self, which: int) -> str:
        """A hint by its number, from 1; the last one for a number too large."""
        hints = [hint for outcome in self.outcomes for hint in outcome.hints]
        if not hints:
            return "There is no hint: " + ("it ticks." if self.passed else "try the blank.")
        return hints[min(max(which, 1), len(hints)) - 1]


def draw(outcome: Outcome) -> Checked:
    """One check."""
    title = theme.clean(f"{outcome.heading}: {SAID[outcome.state]}")
    view = Checked(
        "check",
        title,
        outcome.lead,
        lambda: _rows((outcome,)),
        lambda: _text(outcome),
        lambda: template("check.html", v=None, cells=[_cell(outcome)], code=True),
    )
    view.outcomes = (outcome,)
    return view


def draw_all(tally: Tally, code: bool = True) -> Checked:
    """Title, strip of states, and each check. code: with the learner's lines."""
    meta = [(f"tutorial {tally.tutorial}", False), ("checks rerun when a cell changes", False)]
    if any(outcome.scores for outcome in tally.outcomes):
        meta.append(("par is what the solution reaches", False))
    head = {
        "title": tally.sentence,
        "meta": meta,
        "strip": [(o.state, f"{o.heading}: {SAID[o.state]}") for o in tally.outcomes],
    }

    def lines() -> list:
        glyph = {"pass": "hit", "fail": "miss"}
        strip = [(f"[{GLYPH[o.state]}]", glyph.get(o.state, "dim")) for o in tally.outcomes]
        out = [[(tally.sentence, "b")], [(" \u00b7 ".join(text for text, _ in meta), "dim")], strip]
        for outcome in tally.outcomes:
            out += [[], *_text(outcome, code)]
        return out

    view = Checked(
        "checks",
        tally.sentence,
        f"{tally.passed} of {len(tally.outcomes)}",
        lambda: _rows(tally.outcomes),
        lines,
        lambda: template("check.html", v=head, cells=[_cell(o) for o in tally.outcomes], code=code),
    )
    view.outcomes = tally.outcomes
    return view


def _rows(outcomes):
    """One row a score; a check without scores has one row: check, title, state, verdict, score, yours, par, word."""
    import pandas as pd

    columns = ["check", "title", "state", "verdict", "score", "yours", "par", "word"]
    rows = []
    for o in outcomes:
        scores = [(s.name, s.yours, s.par, s.word) for s in o.scores] or [("", None, None, "")]
        rows += [(o.number, o.title, o.state, f"{o.lead} {o.rest}".strip(), *score) for score in scores]
    return pd.DataFrame(rows, columns=columns)


def pieces(text: str) -> list[tuple[str, str]]:
    """(text, style) of a sentence in which `backticks` mark code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one that nothing closes is a character like another
        parts[-2:] = ["`".join(parts[-2:])]
    return [(part, "code" if i % 2 else "") for i, part in enumerate(parts) if part]


def _cell(o: Outcome) -> dict:
    """What the template shows of one check."""
    return {
        "heading": o.heading,
        "state": o.state,
        "said": SAID[o.state],
        "lines": o.code,
        "lead": pieces(o.lead),
        "rest": pieces(o.rest),
        "first": pieces(o.hints[0]) if o.hints else [],
        "hints": [(i, pieces(hint)) for i, hint in enumerate(o.hints[1:], 2)],
        "of": len(o.hints),
        "record": o.record,
        "scores": [_score(s) for s in o.scores],
    }


def _score(s: Score) -> dict:
    yours, par = s.bar()
    return {"name": s.name, "yours": s.write(s.yours), "par": s.write(s.par), "reached": s.reached, "known": s.yours is not None, "word": s.word,
            "bar": f"{100 * yours:.2f}", "tick": f"{100 * par:.2f}"}  # fmt: skip


def _text(o: Outcome, code: bool = True) -> list:
    """The check in a terminal: what is underlined on the page stands between « and », a marked line has a >."""
    style = {"pass": "hit", "fail": "miss", "open": "dim"}[o.state]
    out: list = [[(GLYPH[o.state], style), " ", (o.heading, "b")]]
    for line in o.code if code else ():
        out.append([("  > " if line.marked else "    ", style), line.before, (line.blank, "b")])
    said = f"{o.lead} {o.rest}".strip()
    if o.hints:
        said += f" Hint 1 of {len(o.hints)}: {o.hints[0]}" if len(o.hints) > 1 else f" Hint: {o.hints[0]}"
    out += [["  ", line] for line in textwrap.wrap(said.replace("`", ""), 96)]
    if o.scores:
        out.append([(f"  {'score':<10}{'yours':>12}{'par':>12}", "dim")])
    for s in o.scores:
        yours, par = (round(BAR * part) for part in s.bar())
        bar = "".join(
            "|" if i == par else ("\u2588" if s.reached else "\u2593") if i < yours else " " for i in range(BAR + 1)
        )
        glyph = (GLYPH["pass"], "hit") if s.reached else (GLYPH["fail"] if s.yours is not None else " ", "miss")
        out.append([f"  {s.name:<10}{s.write(s.yours):>12}{s.write(s.par):>12}   {bar}  ", glyph, f" {s.word}"])
    more = []
    if len(o.hints) > 1:
        more.append(f"{number.plural(len(o.hints) - 1, 'more hint')}: .hint(2)")
    if o.record:
        more.append(f"the record: {o.record}")
    if more:
        out.append([("  " + "   ".join(more), "dim")])
    return out
