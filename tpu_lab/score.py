"""A tutorial's check as a record: what was given, how it was judged, and its score against par. Pure data and words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpu_lab.viz import number

# What is scored: name -> (how it is written, is more better, does it decide). A count and the bytes are the same on each
# run and decide whether a check passes; times are not, and only show.
KINDS = {
    "launches": ("count", False, True),
    "misses": ("count", False, True),
    "ops": ("count", False, True),
    "bytes": ("bytes", False, True),
    "peak": ("bytes", False, True),
    "flops": ("flops", False, True),
    "MFU": ("share", True, False),
    "time": ("time", False, False),
}
PAR_AT = {
    "count": 0.4,
    "bytes": 0.68,
    "flops": 0.68,
    "time": 0.68,
    "share": 0.8,
}  # of a bar's width, so that ticks line up
NEAR = 0.005  # a difference that three digits do not show


@dataclass(frozen=True)
class Score:
    """One figure against par. yours: None where nothing was measured."""

    name: str
    yours: float | None
    par: float

    @property
    def kind(self) -> str:
        return KINDS[self.name][0]

    @property
    def decides(self) -> bool:
        """Whether missing par fails the check."""
        return KINDS[self.name][2]

    @property
    def gain(self) -> float:
        """How much better than par, as a part of par; 0 within what three digits show, negative when worse."""
        if self.yours is None:
            return -math.inf
        more_is_better = KINDS[self.name][1]
        ahead = self.yours - self.par if more_is_better else self.par - self.yours
        if self.kind == "count" or not self.par:
            return ahead / max(1.0, abs(self.par))
        return 0.0 if abs(ahead) <= NEAR * abs(self.par) else ahead / abs(self.par)

    @property
    def reached(self) -> bool:
        return self.gain >= 0

    @property
    def word(self) -> str:
        """Which way, in words: `par`, `5% fewer`, `2 too many`, `1.3 points over`."""
        if self.yours is None:
            return "not measured"
        if not self.gain:
            return "par"
        better, off = self.gain > 0, abs(self.yours - self.par)
        if self.kind == "count":
            return f"{number.count(round(off))} {'fewer' if better else 'too many'}"
        if self.kind == "share":
            return f"{number.sig(100 * off, 2)} points {'over' if better else 'under'}"
        if not self.par:
            return "over"
        if better:
            part = f"{100 * self.gain:.0f}%" if self.gain >= 0.01 else "1%"
            return f"{part} {'faster' if self.kind == 'time' else 'fewer'}"
        times = self.yours / self.par
        part = f"{max(1, round(100 * (times - 1)))}%" if times < 2 else f"{number.sig(times, 2)}\u00d7"
        return f"{part} {'slower' if self.kind == 'time' else 'over' if times < 2 else 'par'}"

    def write(self, value: float | None) -> str:
        """A value in this score's unit."""
        if value is None:
            return number.NONE
        writers = {"bytes": number.size, "flops": number.work, "share": number.percent, "time": number.time}
        return writers[self.kind](value) if self.kind in writers else number.count(round(value))

    def bar(self) -> tuple[float, float]:
        """(your bar's end, par's tick), parts of the width. Par's tick stays in place unless your bar needs the room."""
        full = max(self.par / PAR_AT[self.kind], (self.yours or 0.0) / 0.98) or 1.0
        return (self.yours or 0.0) / full, self.par / full


@dataclass(frozen=True)
class CodeLine:
    """One line of the learner's code as it is shown. blank: what the learner wrote, underlined; the part before it is given."""

    before: str
    blank: str = ""
    marked: bool = False  # the line that disagrees


@dataclass(frozen=True)
class Outcome:
    """How one check went. lead: the verdict, shown bold. rest: what follows it; text in `backticks` is code.

    state: "pass", "fail" or "open" (not tried). hints: all of them; the first is shown, the others folded.
    record: how to get at the record that disagrees: "p.ops.loc[613]".
    """

    number: str
    title: str
    state: str
    lead: str
    rest: str = ""
    code: tuple[CodeLine, ...] = ()
    hints: tuple[str, ...] = ()
    scores: tuple[Score, ...] = ()
    record: str = ""

    @property
    def heading(self) -> str:
        return f"{self.number} \u00b7 {self.title}"


@dataclass(frozen=True)
class Tally:
    """The checks of one tutorial together."""

    tutorial: str
    title: str
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> int:
        return sum(outcome.state == "pass" for outcome in self.outcomes)

    @property
    def sentence(self) -> str:
        """`One launch a step: 2 of 4 checks tick`."""
        n = len(self.outcomes)
        if not n:
            return f"{self.title}: no check yet"
        if self.passed == n:
            return f"{self.title}: all {n} checks tick" if n > 1 else f"{self.title}: the check ticks"
        return f"{self.title}: {self.passed} of {n} checks tick"
