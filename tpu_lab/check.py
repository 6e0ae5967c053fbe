"""Ticks and hints for tutorials: predict, do, check, look.

    sheet = tpu_lab.check.Sheet("03", "One launch a step")
    a = sheet.predict("3.1", launches_strict, actual=len(p.trace.launches), right="Strict launches each op on its own.")
    b = sheet.do("3.2", tpu_lab.check.attempt(step, x), title="fuse the step", par={"launches": 1}, hints=("...",))
    sheet.show(a, b)

A blank is `...` or None: "not tried". A wrong answer is never an exception: what the learner's function raises becomes
a hint with its line. All is a function of its arguments; cells may run again in any order. The teacher's own mistakes
(an unknown score, no such line) raise as usual.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import numbers
import re
import statistics
import textwrap
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch

from tpu_lab import errors
from tpu_lab import ran as _ran
from tpu_lab.backend.trial import lowered as lowered
from tpu_lab.profile import Profile, profile
from tpu_lab.ran import TRAINING as TRAINING
from tpu_lab.score import KINDS, CodeLine, Outcome, Score, Tally
from tpu_lab.viz import check as page
from tpu_lab.viz.check import Checked

_SAME: Any = object()
MINE = re.compile(r"\s*#\s*yours\b.*$")  # the mark on the lines that a learner fills in


@dataclass(frozen=True)
class Disagree:
    """What a test found. sentence: text in `backticks` is code. at: a record, or a line of the learner's code counted
    from 1, that is marked. record: how to get at the record: "p.ops.rows.loc[613]"."""

    sentence: str
    at: Any = None
    record: str = ""


@dataclass(frozen=True)
class Attempt:
    """The learner's function, run once. value: what it gave. profile: its recording, or None when it did not run.

    tried: False for a blank; then `error` says what is missing, in words. error: what it raised, in words, else "".
    line: where, counted from 1 in its source, 0 when not known. source, file, first: its lines and where they begin.
    """

    name: str
    value: Any = None
    profile: Profile | None = None
    tried: bool = True
    error: str = ""
    line: int = 0
    source: tuple[str, ...] = ()
    file: str = ""
    first: int = 1

    def line_of(self, record) -> int:
        """The line of the source, from 1, that an op's, launch's or wait's record names; 0 when it is none of these."""
        line = record.line - self.first + 1
        return line if record.file == self.file and 1 <= line <= len(self.source) else 0


def attempt(
    fn: Any,
    *args,
    name: str = "",
    mode: str | None = None,
    steps: int = 1,
    warmup: int = 0,
    gives: bool = True,
    fresh: bool = False,
    shows: Any = _SAME,
    **kwargs,
) -> Attempt:
    """Run the learner's function and record what runs on "tpu"; whatever it raises is kept, not raised. A default device,
    dtype or mode that it sets ends with it.

    mode, steps, warmup: as in `tpu_lab.profile`. gives: it has to return something; None then means "not tried".
    fresh: forget all programs first, so that misses are counted from none. name: for what is no function.
    shows: the learner's function, where `fn` only leads to it.
    """
    learnt = fn if shows is _SAME else shows
    name = name or getattr(learnt, "__name__", "this")
    if learnt is None or learnt is ...:
        return Attempt(name, tried=False, error=f"`{name}` is blank.")
    if not callable(learnt):
        return Attempt(name, error=f"`{name}` should be a function, not {_kind(learnt)}.")
    source, file, first = _source(learnt)
    known: dict[str, Any] = {"source": source, "file": file, "first": first}
    if blank := _blank_line(source):
        return Attempt(name, tried=False, error=f"line {blank} of `{name}` is still blank.", **known)
    if later := _runs_later(fn):
        return Attempt(name, error=f"`{name}` {later}", **known)
    if fresh:
        torch.tpu._clear_cache()
    run = profile(mode=mode, steps=steps, warmup=warmup, name=name)(fn)
    try:
        with _set_back():
            value = run(*args, **kwargs)
        torch.tpu.synchronize()  # a wrong index that nothing waited for is told here, not in the next cell
    except (Exception, SystemExit) as error:
        with contextlib.suppress(Exception):
            torch.tpu.synchronize()
        said = errors.line(error)
        line = _line_of(error, file, first, len(source))
        where = f" in line {line}" if line else ""
        words = f"`{name}` stopped{where}: {type(error).__name__}" + (f": {said}" if said else "")
        return Attempt(name, None, run.profile, error=words.rstrip(".") + ".", line=line, **known)
    if gives and (value is None or value is ...):
        return Attempt(
            name,
            value,
            run.profile,
            tried=False,
            error=f"`{name}` returns `{'None' if value is None else '...'}`.",
            **known,
        )
    return Attempt(name, value, run.profile, **known)


@contextlib.contextmanager
def _set_back():
    """What an answer sets for the whole process is set back, so that it changes no other check."""
    dtype, device, gradients = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    mode = torch.tpu.eager_mode
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.tpu.eager_mode != mode:
            torch.tpu.eager_mode = mode


@dataclass(frozen=True)
class Sheet:
    """The checks of one tutorial. number: "03". title: what is reached when all tick."""

    number: str
    title: str

    def predict(
        self,
        number: str,
        given: Any,
        actual: Any,
        *,
        title: str = "predict",
        name: str = "",
        right: str = "",
        hints: Sequence[str] = (),
        within: float = 0.0,
        record: str = "",
    ) -> Checked:
        """A typed answer against what was recorded.

        name: of the learner's variable, to show it. right: the sentence behind "Right.". within: how far a number may be
        off, as a part of `actual`. record: how to look at what disagrees. Numbers, words, bools and tuples can be asked.
        """
        code = (CodeLine(f"{name} = ", _written(given)),) if name else ()
        if given is None or given is ...:
            words = f"type your answer into `{name}`." if name else "type your answer."
            return page.draw(Outcome(number, title, "open", "", f"Not tried: {words}", code))
        wrong = _differs(given, actual, within)
        if wrong is None:
            return page.draw(Outcome(number, title, "pass", "Right.", right, code))
        return page.draw(Outcome(number, title, "fail", f"Not yet: {wrong}", "", code, tuple(hints), record=record))

    def do(
        self,
        number: str,
        given: Any,
        *,
        title: str = "do",
        name: str = "",
        par: Mapping[str, float] | None = None,
        ran: Sequence[str] | None = None,
        test: Callable[[Any], str | Disagree | None] | None = None,
        right: str = "Done.",
        why: str = "",
        todo: str = "",
        hints: Sequence[str] = (),
        code: str = "",
    ) -> Checked:
        """An `attempt`, a Profile or any value, judged by `test` and by par.

        test: gets `given`; None when all is well, else a sentence or a Disagree. par: score -> what the solution reaches,
        a step (misses: in all); launches, misses, ops, bytes, peak, flops decide, MFU and time (ns) only show. ran: what each
        step has to run on the device, as in `ran.lacking`: TRAINING, or () when it has to compute; what is scored against
        par has to launch something in any case. right, why: the verdict, bold, and the sentence behind it. todo: said while
        it is not tried. code: shown when given has none.
        """
        if unknown := set(par or {}) - set(KINDS):
            raise ValueError(f"no score {min(unknown)!r}: there are {', '.join(KINDS)}")
        tried = given if isinstance(given, Attempt) else Attempt(name or "this", given, source=tuple(code.splitlines()))
        if given is None or given is ... or not tried.tried:
            said = tried.error or (f"`{name}` is blank." if name else "fill in the blank.")
            return page.draw(
                Outcome(number, title, "open", "", f"Not tried: {said} {todo}".rstrip(), shown(tried.source))
            )
        if tried.error:
            marked = shown(tried.source, tried.line)
            return page.draw(Outcome(number, title, "fail", "Not yet:", tried.error, marked, tuple(hints)))
        recorded = tried.profile if isinstance(given, Attempt) else given
        scores = tuple(Score(kind, measure(recorded, kind), value) for kind, value in (par or {}).items())
        counted = any(score.decides and score.par > 0 for score in scores)
        found = _tested(test, given)
        if found is None and isinstance(recorded, Profile) and (counted or ran is not None):
            lacks = _ran.lacking(recorded.metrics, ran)
            found = Disagree(lacks, record="p.ops") if lacks else None
        if found is not None:
            at = found.at if isinstance(found.at, int) or found.at is None else tried.line_of(found.at)
            short = len(found.sentence) <= 48
            lead, rest = (f"Not yet: {found.sentence}", "") if short else ("Not yet:", found.sentence)
            marked = shown(tried.source, at or 0)
            return page.draw(Outcome(number, title, "fail", lead, rest, marked, tuple(hints), scores, found.record))
        if missed := [s for s in scores if s.decides and not s.reached]:
            worst = missed[0]
            lead = f"Not yet: {worst.write(worst.yours)} {_counted(worst)}, par is {worst.write(worst.par)}."
            return page.draw(Outcome(number, title, "fail", lead, "", shown(tried.source), tuple(hints), scores))
        better = [s.name for s in scores if s.decides and s.gain > 0]
        listed = " and ".join(filter(None, (", ".join(better[:-1]), *better[-1:])))
        rest = f"Better than par in {listed}. {why}" if better else why
        return page.draw(Outcome(number, title, "pass", right, rest.strip(), shown(tried.source), scores=scores))

    def show(self, *checks: Checked, code: bool = True) -> Checked:
        """All checks under their title: "One launch a step: 2 of 4 checks tick". code: with the learner's lines."""
        return page.draw_all(Tally(self.number, self.title, tuple(o for c in checks for o in c.outcomes)), code)


def measure(recorded: Profile | None, kind: str) -> float | None:
    """One figure of a profile, a step; misses: programs that were not in memory, in all. Time is without compiling.

    From three steps on it is the median step's, as the first one sets things up and the last may leave work undone; of
    fewer steps the mean, of a block without steps the whole; FLOPs are the mean of all. Steps are those of `ran.steps`.
    """
    if not isinstance(recorded, Profile):
        return None
    m, steps = recorded.metrics, _ran.steps(recorded.metrics)

    def typical(count: Callable) -> float:
        counts = [count(ops, launches) for ops, launches, _ in steps]
        return statistics.median(counts) if len(counts) > 2 else sum(counts) / len(counts)

    readers: dict[str, Callable[[], float | None]] = {
        "launches": lambda: typical(lambda ops, launches: len(launches)),
        "misses": lambda: sum(launch.cache != "hit" for launch in m.trace.launches),
        "ops": lambda: typical(lambda ops, launches: len(ops)),
        "bytes": lambda: typical(lambda ops, launches: sum(launch.bytes for launch in launches)),
        "peak": lambda: max((live for _, live in m.trace.live), default=0),
        "flops": lambda: sum(map(_ran.work, steps)) / len(steps),
        "MFU": lambda: m.mfu,
        "time": lambda: statistics.median(ns for _, _, ns in steps),
    }
    return readers[kind]()


def shown(source: Sequence[str], marked: int = 0) -> tuple[CodeLine, ...]:
    """Lines as they are shown: what ends in `# yours`, or is a bare `...`, is underlined; line `marked` (from 1) stands out."""
    lines = []
    for number, line in enumerate(source, 1):
        text, mine = MINE.sub("", line), bool(MINE.search(line)) or line.strip() == "..."
        body = text.lstrip() if mine else ""
        lines.append(CodeLine(text[: len(text) - len(body)], body, number == marked))
    return tuple(lines)


def _tested(test: Callable | None, given: Any) -> Disagree | None:
    """What the test says of what was given; a value that the test cannot even read disagrees, too."""
    if test is None:
        return None
    try:
        found = test(given)
    except Exception as error:
        said = errors.line(error, 160)
        return Disagree(f"the check cannot use this result ({type(error).__name__}{': ' + said if said else ''}).")
    return Disagree(found) if isinstance(found, str) else found


def _counted(score: Score) -> str:
    words = {"launches": "launch" if score.yours == 1 else "launches", "misses": "miss" if score.yours == 1 else "misses",
             "peak": "at the peak", "flops": "of work", "bytes": "moved"}  # fmt: skip
    return words.get(score.name, score.name)


def _differs(given: Any, actual: Any, within: float) -> str | None:
    """In what way an answer is not `actual`, without giving it away; None when it is right."""
    try:
        if isinstance(actual, bool):
            if not isinstance(given, bool):
                return f"`{_written(given)}` is neither `True` nor `False`, and one of them is asked for."
            return None if given is actual else f"the run does not say `{_written(given)}`."
        if isinstance(actual, numbers.Real):
            if isinstance(given, (str, bool)):
                return f"that is {'text' if isinstance(given, str) else f'`{given}`'}, and a number is asked for."
            value, true = float(given), float(actual)
            if math.isnan(value):
                return "that is not a number."
            if abs(value - true) <= within * abs(true) + 1e-9 * abs(true):
                return None
            return f"{_written(given)} is too {'few' if within == 0 and value < true else 'small' if value < true else 'many' if within == 0 else 'large'}."
        if isinstance(actual, str):
            same = isinstance(given, str) and " ".join(given.lower().split()) == " ".join(actual.lower().split())
            return None if same else f"the run does not say `{_written(given)}`."
        if isinstance(actual, (tuple, list)):
            if isinstance(given, numbers.Real) or len(given) != len(actual):
                return f"{len(actual)} values are asked for."
            for i, (a, b) in enumerate(zip(given, actual), 1):  # of another kind first: flipping it would not help
                if isinstance(b, bool) and not isinstance(a, bool) and a is not ...:
                    return f"value {i}: {_differs(a, b, within)}"
            wrong = [i for i, (a, b) in enumerate(zip(given, actual), 1) if a is ... or _differs(a, b, within)]
            return f"value {wrong[0]} disagrees." if wrong else None
        return None if bool(given == actual) else f"the run does not say `{_written(given)}`."
    except Exception:  # a value that compares with nothing
        return f"{_kind(given)} is not what is asked for."


def _written(value: Any) -> str:
    """A learner's value in one short line."""
    if value is ...:
        return "..."
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = _kind(value)
    return text if len(text) <= 60 else text[:59] + "\u2026"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _runs_later(fn: Any) -> str:
    """Why a call of the function runs none of its lines; "" where it does."""
    if inspect.isgeneratorfunction(fn):
        return "has a `yield`: calling it runs none of its lines. Return the result instead."
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        return "is `async`: calling it runs none of its lines. Write a plain `def`."
    return ""


def _source(fn: Callable) -> tuple[tuple[str, ...], str, int]:
    """(lines, file, first line's number) of a function; nothing known: ((), "", 1)."""
    try:
        inner = inspect.unwrap(fn)
        lines, first = inspect.getsourcelines(inner)
        return tuple(textwrap.dedent("".join(lines)).rstrip().splitlines()), inner.__code__.co_filename, max(1, first)
    except (OSError, TypeError, ValueError, AttributeError, IndentationError):
        return (), "", 1


def _blank_line(source: Sequence[str]) -> int:
    """The line, from 1, in which a `...` is left where a value or a statement is asked for, else 0. `x[..., 0]` is none."""
    try:
        tree = ast.parse("\n".join(source))
    except (SyntaxError, ValueError):
        return 0
    slices = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Subscript) for inner in ast.walk(node.slice)}
    left = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value is ... and id(node) not in slices
    ]
    return min(left, default=0)


def _line_of(error: BaseException, file: str, first: int, count: int) -> int:
    """The innermost line of the learner's own source on the way to the error, from 1; 0 when none is."""
    found, frame = 0, error.__traceback__
    while frame is not None:
        line = frame.tb_lineno - first + 1
        if frame.tb_frame.f_code.co_filename == file and 1 <= line <= count:
            found = line
        frame = frame.tb_next
    return found
