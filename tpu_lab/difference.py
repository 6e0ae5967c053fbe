"""Two profiles of the same work: what changed from one to the other, and what of it is more than noise.

A step's time is the mean of the steady steps, as the report of one profile says it. Two times differ when their means
and their medians are both further apart, the same way, than the middle halves of the steps reach (half the distance of the
quartiles, on either side): one slow step among many moves a mean, and is no change. With fewer than three steps on a side
nobody knows the noise, and no difference is claimed. Counts and bytes are exact.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, fields

import numpy as np

from tpu_lab.metrics import PARTS, Metrics, Split, Step
from tpu_lab.place import op_name, short_file
from tpu_lab.viz import number

ENOUGH = 3  # steps by which noise is known
SCATTERED = 0.5  # of a step: no reader can use a larger "within noise"


@dataclass(frozen=True)
class Spread:
    """Values of several steps: their lower median (one that was measured), half the distance of the quartiles, and the mean."""

    median: float
    half: float | None  # None for a single value
    n: int
    mean: float = float("nan")

    @classmethod
    def of(cls, values) -> Spread:
        values = sorted(values)
        if not values:
            return cls(float("nan"), None, 0)
        low, high = np.percentile(values, [25, 75])
        half = float(high - low) / 2 if len(values) > 1 else None
        return cls(float(statistics.median_low(values)), half, len(values), float(statistics.fmean(values)))


def counted(m: Metrics) -> tuple[Step, ...]:
    """The steps that figures are taken from: steady ones, else those after warm-up, else the whole block as one."""
    return m.steady or tuple(s for s in m.steps if not s.warmup) or (m.span,)


def typical(m: Metrics) -> Step:
    """The step of median time among the counted ones."""
    steps = sorted(counted(m), key=lambda s: s.ns)
    return steps[(len(steps) - 1) // 2]


def mean_split(m: Metrics) -> Split:
    """The parts of the counted steps' mean: those of the report where there are steady steps."""
    splits = [s.split for s in counted(m)]
    return Split(*(statistics.fmean(getattr(split, f.name) for split in splits) for f in fields(Split)))


def mode(m: Metrics) -> str:
    """The mode the work ran in: "compiled" when compiled graphs take most of the device's time."""
    launches = [r for s in counted(m) for r in m.launches_in(s)]
    compiled = sum(r.device_ns for r in launches if r.mode == "compiled")
    if compiled and 2 * compiled > sum(r.device_ns for r in launches):
        return "compiled"
    return str(m.trace.meta.get("mode", ""))


def peak_live(m: Metrics) -> int | None:
    """The most bytes that tensors held on the device in the counted steps; None when nobody noted it."""
    ranges = [s.ops for s in counted(m)]
    found = [size for op, size in m.trace.live if any(a <= op < b for a, b in ranges)]
    return max(found, default=None)


def mfu(m: Metrics, median: bool = False) -> float | None:
    """Model FLOPs / (time of a step x peak), compile time left out; None without a peak, FLOPs or time."""
    split = typical(m).split if median else mean_split(m)
    time = split.total - split.compile
    return m.flops / (time * 1e-9 * m.peak.flops) if m.peak is not None and m.flops and time > 0 else None


@dataclass(frozen=True)
class Quantity:
    """One figure of both profiles. `kind` says how it is written: time, count, size, work, share."""

    name: str
    kind: str
    before: float | None
    after: float | None
    changed: bool
    spread: tuple[Spread, Spread] | None = None  # of times


@dataclass(frozen=True)
class LineChange:
    """One source line and way: its ops and device time a step, before and after."""

    file: str
    line: int
    code: str
    phase: str
    ops: tuple[int, int]
    ns: tuple[float, float]


@dataclass(frozen=True)
class OpChange:
    """An op that only one of the two runs, a step, on one line."""

    side: str  # "before" or "after"
    name: str
    count: int
    file: str
    line: int
    phase: str


@dataclass(frozen=True)
class Difference:
    """All that is known of the change from `before` to `after`."""

    before: Metrics
    after: Metrics
    quantities: tuple[Quantity, ...]
    lines: tuple[LineChange, ...]  # largest change of time first
    ops: tuple[OpChange, ...]
    title: str

    def __getitem__(self, name: str) -> Quantity:
        return next(q for q in self.quantities if q.name == name)


def compare(before: Metrics, after: Metrics, median: bool = False) -> Difference:
    """The difference of two profiles of the same work. median: a step's time is the median, for a page that shows medians."""
    quantities = _quantities(before, after, median)
    return Difference(before, after, quantities, _lines(before, after), _ops(before, after), _title(before, after, quantities))


def _quantities(a: Metrics, b: Metrics, median: bool) -> tuple[Quantity, ...]:
    times = (Spread.of(s.ns for s in counted(a)), Spread.of(s.ns for s in counted(b)))
    shown = [t.median if median else t.mean for t in times]
    out = [Quantity("step" if a.steady and b.steady else "block", "time", shown[0], shown[1], _moved(*times), times)]
    x, y = (typical(m) for m in (a, b))
    splits = [typical(m).split if median else mean_split(m) for m in (a, b)]
    for name in PARTS:  # of the step that is shown: they add up to it
        parts = (_part(a, name.lower()), _part(b, name.lower()))
        own = [getattr(split, name.lower()) for split in splits]
        out.append(Quantity(name, "time", own[0], own[1], _moved(*parts) and _large(parts, times), parts))
    run = [m.launches_in(s) for m, s in ((a, x), (b, y))]

    def exact(name, kind, values) -> Quantity:
        before, after = (None if v is None else float(v) for v in values)
        return Quantity(name, kind, before, after, before != after)

    compiled = [sum(r.compile_ns for r in m.trace.launches) for m in (a, b)]
    misses = [m.outcomes()["miss"] for m in (a, b)]
    ops = [s.ops[1] - s.ops[0] for s in (x, y)]
    disk = [m.outcomes()["disk"] for m in (a, b)]
    used = [mfu(m, median) for m in (a, b)]
    return (
        *out,
        exact("launches", "count", [len(r) for r in run]),
        exact("launches of several ops", "count", [sum(len(r.ops) > 1 for r in launches) for launches in run]),
        exact("programs", "count", [len({r.key for r in launches}) for launches in run]),
        exact("programs in all", "count", [len({r.key for r in m.trace.launches}) for m in (a, b)]),
        exact("ops", "count", ops),
        exact("compile misses", "count", misses),
        exact("disk hits", "count", disk),
        Quantity("compile time", "time", compiled[0], compiled[1], (misses[0], disk[0]) != (misses[1], disk[1])),
        exact("bytes in and out", "size", [sum(r.bytes for r in launches) for launches in run]),
        exact("live bytes, peak", "size", [peak_live(m) for m in (a, b)]),
        exact("FLOPs", "work", [a.flops, b.flops]),
        Quantity("MFU", "share", used[0], used[1], out[0].changed and None not in used),
    )


def _part(m: Metrics, name: str) -> Spread:
    return Spread.of(getattr(s.split, name) for s in counted(m))


def differ(a: Spread, b: Spread) -> bool:
    """Do the middle halves of two sets of times stay apart?"""
    if min(a.n, b.n) < ENOUGH or a.half is None or b.half is None:
        return False
    return abs(a.median - b.median) > a.half + b.half


def _moved(a: Spread, b: Spread) -> bool:
    """Do two sets of times differ, and their means the same way and as far?"""
    if not differ(a, b):
        return False
    gap = (b.mean - a.mean) * (1 if b.median > a.median else -1)
    return gap > (a.half or 0.0) + (b.half or 0.0)


def noise(a: Spread, b: Spread) -> float | None:
    """The smallest difference that would have shown, as a part of `a`; None when there are too few steps to know."""
    if min(a.n, b.n) < ENOUGH or a.half is None or b.half is None or not a.median:
        return None
    return (a.half + b.half) / a.median


def _large(parts, times) -> bool:
    """A part of a step that changed by less than 1% of the step is no news."""
    return abs(parts[0].median - parts[1].median) > 0.01 * max(t.median for t in times)


def _lines(a: Metrics, b: Metrics) -> tuple[LineChange, ...]:
    sides: tuple[dict, dict] = ({}, {})  # a line may have several costs, one a family of modules: here it is one
    for side, m in zip(sides, (a, b)):
        for c in m.costs:
            ops, ns = side.get((c.file, c.line, c.phase, c.code), (0, 0.0))
            side[c.file, c.line, c.phase, c.code] = ops + c.ops, ns + c.ns
    out = []
    for file, line, phase, code in dict.fromkeys([*sides[0], *sides[1]]):
        x, y = (side.get((file, line, phase, code), (0, 0.0)) for side in sides)
        out.append(LineChange(file, line, code, phase, (x[0], y[0]), (x[1], y[1])))
    return tuple(sorted(out, key=lambda c: (-abs(c.ns[1] - c.ns[0]), c.file, c.line, c.phase)))


def _ops(a: Metrics, b: Metrics) -> tuple[OpChange, ...]:
    """Ops on a line that the other does not run there as often. Free views are left out."""
    sides = []
    for m in (a, b):
        ops = [o for o in m.ops_in(typical(m)) if o.kind != "view"]
        sides.append(Counter((op_name(o.name), short_file(o.file), o.line, o.phase) for o in ops))
    out = []
    for side, more in (("before", sides[0] - sides[1]), ("after", sides[1] - sides[0])):
        out += [OpChange(side, name, n, file, line, phase) for (name, file, line, phase), n in more.items()]
    return tuple(sorted(out, key=lambda o: (o.side == "after", -o.count, o.file, o.line, o.name)))


# --- the sentence -----------------------------------------------------------------------------------------------------


def _title(a: Metrics, b: Metrics, quantities) -> str:
    """`Fused instead of strict: 743 launches became 1, step 190 → 145 ms`: what was changed, and what came of it.

    A miss is news where other programs were needed; where a program is only new to this session, it is none.
    """
    q = {x.name: x for x in quantities}
    if not (a.trace.launches or b.trace.launches):
        return "No op ran on 'tpu' in either profile"
    for name, m in (("first", a), ("second", b)):
        if not (m.trace.launches or m.trace.ops):
            return f"The {name} profile recorded no op on 'tpu'"
    time = quantities[0]
    clauses = []
    work = q["FLOPs"]
    if _much(work):  # a faster step of less work is no news
        clauses.append(f"work {arrow(work)}")
    elif q["launches"].changed:
        clauses.append(_became(q["launches"], "launch", "launches"))
    elif _much(q["bytes in and out"]):
        clauses.append(f"bytes in and out {arrow(q['bytes in and out'])}")
    elif q["programs in all"].changed and q["compile misses"].changed:
        clauses.append(_became(q["compile misses"], "miss", "misses"))
    elif q["ops"].changed:
        clauses.append(_became(q["ops"], "op", "ops"))
    elif q["bytes in and out"].changed:
        clauses.append(f"bytes in and out {arrow(q['bytes in and out'])}")
    assert time.spread is not None
    limit = noise(*time.spread)
    instead = _instead(a, b)
    if time.changed:
        if not clauses and not instead and _programs(a) == _programs(b):
            clauses.append("the same programs")  # then it is the host or the machine that has changed
        clauses.append(f"{time.name} {arrow(time)}")
    elif limit is not None and limit > SCATTERED:
        clauses.append("times too scattered to compare")
    elif limit is not None and (clauses or instead):
        clauses.append(f"time the same within noise, \u00b1 {number.percent(limit, 2)}")
    elif limit is not None:
        return f"No difference above noise, \u00b1 {number.percent(limit, 2)}"
    elif not clauses:
        clauses.append(f"{time.name} {arrow(time)}, too few steps to tell a difference from noise")
    text = ", ".join(clauses)
    return f"{instead}: {text}" if instead else text[0].upper() + text[1:]


def _instead(a: Metrics, b: Metrics) -> str:
    """`Fused instead of strict`, `Matmuls in bf16 instead of f32`; "" when both are the same in both."""
    modes, types = (mode(a), mode(b)), (_multiplied(a), _multiplied(b))
    if modes[0] != modes[1] and all(modes):
        return f"{modes[1].capitalize()} instead of {modes[0]}"
    if types[0] != types[1] and all(types):
        return f"Matmuls in {types[1]} instead of {types[0]}"
    return ""


def _multiplied(m: Metrics) -> str:
    """The type that most of the FLOPs of the typical step's matmuls are done in: "f32"; "" without a matmul."""
    work: Counter = Counter()
    for op in m.ops_in(typical(m)):
        if op.kind == "matmul" and op.inputs:
            work[str(op.inputs[-1]).partition("[")[0]] += op.flops
    return work.most_common(1)[0][0] if work else ""


def _programs(m: Metrics) -> Counter:
    """The programs that the typical step launches, and how often each."""
    return Counter(r.key for r in m.launches_in(typical(m)))


def _much(q: Quantity) -> bool:
    """More than 1% of what it was; both sides are known."""
    return bool(q.before and q.after) and abs((q.after or 0) / (q.before or 1) - 1) > 0.01


def _became(q: Quantity, one: str, many: str) -> str:
    before, after = int(q.before or 0), int(q.after or 0)
    return f"{number.plural(before, one, many)} became {number.count(after)}"


def arrow(q: Quantity) -> str:
    """`190 → 145 ms`: both in the unit of the larger."""
    if q.before is None or q.after is None:
        return f"{write(q.kind, q.before)} \u2192 {write(q.kind, q.after)}"
    largest = max(abs(q.before), abs(q.after))
    units = {"time": number.time_unit, "size": number.size_unit, "work": number.work_unit}.get(q.kind)
    if units is None:
        return f"{write(q.kind, q.before)} \u2192 {write(q.kind, q.after)}"
    name, factor = units(largest) if largest else (units(1)[0], 1.0)
    return f"{number.sig(q.before / factor)} \u2192 {number.sig(q.after / factor)}{number.NBSP}{name}"


def write(kind: str, value: float | None) -> str:
    """A value as it is written by itself."""
    if value is None:
        return number.NONE
    if kind == "count":
        return number.count(int(value))
    return {"time": number.time, "size": number.size, "work": number.work, "share": number.percent}[kind](value)
