"""Where NaN or inf first appears: the op, the ranges of its inputs and results, and the ops on the way there."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass

from tpu_lab.place import op_name, place, short_file
from tpu_lab.trace import OpRecord
from tpu_lab.viz import frame, number
from tpu_lab.viz.view import View, template

SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32", "int16": "i16",
    "int8": "i8", "uint8": "u8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
LARGEST = {"f32": 3.4028235e38, "f16": 65504.0, "bf16": 3.3895314e38, "f64": 1.7976931348623157e308}
GROWS = {"exp": 1.0, "expm1": 1.0, "sinh": 1.0, "cosh": 1.0, "exp2": math.log(2)}  # overflows where e^(factor x) does
BELOW = {"sqrt": 0.0, "rsqrt": 0.0, "log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0, "lgamma": 0.0, "acosh": 1.0}
WITHIN = {"acos", "asin", "atanh"}


@dataclass(frozen=True)
class Span:
    """One tensor of an op. low, high: of its finite elements, None when it has none; below: how many inf are negative."""

    name: str  # "self", "result"
    aval: str  # "f32[8,64]"
    low: float | None
    high: float | None
    nan: int
    inf: int
    below: int
    zeros: int
    size_of_limit: float  # its largest size as a part of the largest its dtype holds

    @property
    def weight(self) -> float:
        """How much it is to blame: not finite, else its size."""
        return math.inf if self.nan or self.inf else max(abs(self.low or 0.0), abs(self.high or 0.0))


@dataclass(frozen=True)
class Seen:
    """An op that went by, the forward op that it belongs to, and its tensors."""

    record: OpRecord
    forward: OpRecord | None
    inputs: tuple[Span, ...]
    outputs: tuple[Span, ...]
    numbers: tuple[float, ...] = ()  # Python numbers among its arguments

    @property
    def name(self) -> str:
        return op_name(self.record.name)

    @property
    def place(self) -> str:
        return place(self.record.file, self.record.line)

    @property
    def title(self) -> str:
        """`exp at model.py:12`; a backward op by its forward op."""
        where = f" at {self.place}" if self.place else ""
        if self.record.phase != "backward":
            return f"{self.name}{where}"
        return (
            f"{self.name}, backward of {op_name(self.forward.name)}{where}"
            if self.forward
            else f"{self.name}, backward{where}"
        )

    @property
    def made(self) -> str:
        """What is in its results: NaN, inf or −inf."""
        if any(s.nan for s in self.outputs):
            return "NaN"
        inf = sum(s.inf for s in self.outputs)
        return "\u2212inf" if inf and inf == sum(s.below for s in self.outputs) else "inf"


@dataclass(frozen=True)
class Looked:
    """What a search saw. came_in: the first op that handed on NaN or inf from the data."""

    made: Seen | None
    came_in: Seen | None
    chain: tuple[Seen, ...]
    near: tuple[Seen, ...]
    count: int
    phases: tuple[str, ...]
    error: str = ""


DIVIDES = ("div", "reciprocal", "true_divide", "floor_divide", "remainder", "fmod", "addcdiv")


def figure(value: float | None) -> str:
    """`104`, `0.25`, `3.40e38`, `1.20e−5`: three digits, with a power of ten where the number is far from one."""
    if value is None:
        return number.NONE
    if math.isinf(value):
        return "inf" if value > 0 else "\u2212inf"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return number.sig(value)
    digits, power = f"{value:.2e}".split("e")
    return f"{digits}e{int(power)}".replace("-", "\u2212")


def why(seen: Seen) -> str:
    """Why this op made it, from its ranges: `input up to 104, above 88.7`; "" when the ranges do not tell."""
    floats = [s for s in seen.inputs if s.aval.split("[")[0] in LARGEST]
    if not floats:
        return ""
    op = re.sub(r"^_?foreach_|_+$|^_", "", seen.name)
    kind = seen.outputs[0].aval.split("[")[0] if seen.outputs else "f32"
    limit, first = LARGEST.get(kind, LARGEST["f32"]), floats[0]
    lows, highs = [s.low for s in floats if s.low is not None], [s.high for s in floats if s.high is not None]
    low, high = min(lows, default=0.0), max(highs, default=0.0)
    if seen.made == "NaN" and any(s.inf for s in floats):
        if "softmax" in op:
            return "a row of nothing but \u2212inf"
        both = any(s.below for s in floats) and any(s.inf > s.below for s in floats)
        if op in ("add", "sub", "rsub", "sum", "cumsum", "mean") and (both or op in ("sub", "rsub")):
            return "inf minus inf"
        if op in ("mul", "mm", "bmm", "addmm", "baddbmm") and any(s.zeros for s in floats):
            return "0 times inf"
        return f"{first.name if first.inf else 'an input'} holds inf"
    if op in GROWS and seen.made != "NaN":
        if (top := math.log(limit) / GROWS[op]) < high:
            return f"input up to {figure(high)}, above {figure(top)}"
        return f"input down to {figure(low)}, below {figure(-top)}"
    if op in BELOW and seen.made == "NaN" and low < BELOW[op]:
        return f"input down to {figure(low)}, below {figure(BELOW[op])}"
    if op in BELOW and first.low is not None and first.low <= BELOW[op]:
        return f"input of {figure(BELOW[op])}"
    if op in WITHIN:
        return f"input from {figure(low)} to {figure(high)}, outside \u22121 to 1"
    if op in DIVIDES:
        divisors = [s for s in floats if s.name.split("[")[0] != first.name.split("[")[0]]
        zeros = max((s.zeros for s in divisors or floats), default=0)
        none = "0 " if seen.made == "NaN" and op not in ("remainder", "fmod") else ""
        if not divisors and 0 in seen.numbers:
            return f"{none}divided by the number 0"
        if zeros and (divisors or op == "reciprocal"):
            return "0 divided by 0" if none else f"divisor 0 in {number.plural(zeros, 'place')}"
    if op == "pow" and seen.made == "NaN":
        return f"base down to {figure(low)}, with a fraction as exponent"
    if op == "pow" and first.zeros and max(abs(low), abs(high)) < 1e10:
        return "0 to a negative power"
    if seen.made != "NaN" and highs:
        size = max(abs(low), abs(high))
        return f"inputs up to {figure(size)}; {kind} ends at {figure(limit)}"
    return f"input from {figure(low)} to {figure(high)}" if highs else ""


def title(v: Looked) -> str:
    """The finding, one sentence."""
    ops = number.plural(v.count, "op")
    if v.made:
        reason = why(v.made)
        return f"{v.made.made} first appears in {v.made.title}" + (f": {reason}" if reason else "")
    if v.came_in:
        return f"{v.came_in.made} came in with the data: first handed on by {v.came_in.title}"
    if not v.count:
        return "No op ran on 'tpu', so nothing was looked at"
    return f"No op makes NaN or inf: {ops} looked at, {' and '.join(v.phases) or 'forward'}"


def rows(v: Looked):
    """One row a tensor: back (0 the op that made it, 1 the op before on the way, ...), op, name, tensor, shape, low, high
    (of its finite elements), nan, inf (counts), module, file, line, code, phase, forward (the forward op's name). When
    nothing was found: no row."""
    import pandas as pd

    table = []
    for back, seen in enumerate(reversed((*v.chain, v.made) if v.made else ())):
        r = seen.record
        for s in (*seen.inputs, *seen.outputs):
            table.append((
                back, r.index, seen.name, s.name, s.aval, s.low, s.high, s.nan, s.inf, r.module, short_file(r.file), r.line,
                r.code, r.phase, op_name(seen.forward.name) if seen.forward else "",
            ))  # fmt: skip
    return pd.DataFrame(table, columns=list(_COLUMNS))


_COLUMNS = (
    "back", "op", "name", "tensor", "shape", "low", "high", "nan", "inf", "module", "file", "line", "code", "phase", "forward",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A tensor (of the op) or an op (on the way there) as it is printed."""

    op: str
    name: str
    shape: str
    module: str
    place: str
    way: str
    low: str
    high: str
    nan: str
    inf: str


@dataclass(frozen=True)
class Model:
    title: str
    meta: tuple
    code: str
    tensors: tuple[Line, ...]
    way_head: str
    way: tuple[Line, ...]
    hint: str


def draw(v: Looked) -> View:
    """The view of a search."""
    model = _model(v)
    return View(
        "nonfinite",
        model.title,
        model.title,
        lambda: rows(v),
        lambda: _text(model),
        lambda: template("nonfinite.html", v=model),
    )


def _model(v: Looked) -> Model:
    meta = [(f"{number.plural(v.count, 'op')} looked at", False)] if v.count else []
    meta += [(" and ".join(v.phases), False)] if v.phases else []
    meta.append(("strict", True))
    shown = v.made or v.came_in
    if shown and shown.record.module:
        meta.append((f"module {shown.record.module}", False))
    if v.error:
        meta.append((f"then the call ended in {v.error}"[:160], False))
    tensors = tuple(_line(shown, s) for s in (*shown.inputs, *shown.outputs)) if shown else ()
    if v.made:
        way, head = v.chain, "How it got there: the op that made the largest input, and so on back"
    else:
        way, head = v.near, "Nearest to their dtype\u2019s limit"
    lines = tuple(_line(s, max(s.outputs, key=lambda o: o.weight)) for s in way if s.outputs)
    return Model(
        title(v), tuple(meta), shown.record.code if shown else "", tensors, head if lines else "", lines, _hint(v)
    )


def _hint(v: Looked) -> str:
    if not v.count:
        return 'Move the model and its inputs with .to("tpu"), or make tensors with device="tpu" inside the function.'
    if v.made or v.came_in:
        return ""
    return "An inf that is written on purpose, such as masked_fill with \u2212inf, is no finding, nor is what ops hand on from it."


def _line(seen: Seen, s: Span) -> Line:
    r = seen.record
    empty = s.low is None and not (s.nan or s.inf)
    return Line(
        f"{seen.name}", s.name, s.aval, r.module or ("optimizer" if r.phase == "optimizer" else ""), seen.place,
        frame.WAY.get(r.phase, ("", ""))[0], number.NONE if empty else figure(s.low), number.NONE if empty else figure(s.high),
        number.count(s.nan), number.count(s.inf),
    )  # fmt: skip


def _text(v: Model) -> list:
    out: list = [*([(line, "b")] for line in textwrap.wrap(v.title, 98)), *frame.meta_lines(v.meta), []]
    if v.code:
        out += [[f"    {v.code}"], []]
    if v.tensors:
        out.append([(f"  {'tensor':<24}{'shape':<26}{'low':>11}{'high':>11}{'NaN':>10}{'inf':>10}", "dim")])
        out += [
            [f"  {t.name[:23]:<24}{t.shape[:25]:<26}{t.low:>11}{t.high:>11}{t.nan:>10}{t.inf:>10}"] for t in v.tensors
        ]
        out.append([])
    if v.way:
        out += [[(v.way_head, "b")]]
        out.append([(f"  {'op':<24}{'shape':<26}{'line':<20}{'way':<7}{'low':>9}{'high':>10}", "dim")])
        out += [
            [f"  {t.op[:23]:<24}{t.shape[:25]:<26}{t.place[-19:]:<20}{t.way:<7}{t.low:>9}{t.high:>10}"] for t in v.way
        ]
    if v.hint:
        out += [*([[]] if v.way else []), *([(line, "dim")] for line in textwrap.wrap(v.hint, 98))]
    return out
