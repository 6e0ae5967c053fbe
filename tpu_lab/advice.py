"""At most three findings, each certain from the records: what to do, the evidence with its line, what it would gain.

A finding that would have to guess is not one. Ordered by the time each could save at most.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from tpu_lab.metrics import Metrics
from tpu_lab.place import op_name, place
from tpu_lab.viz import number


@dataclass(frozen=True)
class Finding:
    """kind: which rule found it. act: the advice, one short sentence. evidence: what was counted, with its line, and the change."""

    kind: str
    act: str
    evidence: str
    brief: str  # the evidence for a terminal's line, without a full stop
    file: str
    line: int
    gain_ns: float  # at most this much a step (or once), for the order


_COPIES = {"item": ".item()", "bool": "bool()", "int": "int()", "float": "float()", "index": "range() or an index",
           "print": "print()", "numpy": "numpy()", "cpu": ".cpu()"}  # fmt: skip


def findings(m: Metrics, limit: int = 3) -> list[Finding]:
    """The findings of one trace, most time first."""
    found = [f for rule in RULES if (f := rule(m))]
    return sorted(found, key=lambda f: -f.gain_ns)[:limit]


CHANGES = {  # cause of a miss -> what to do about it
    "shape": "pad the inputs to a few fixed sizes",
    "constant": "keep that argument the same in every step, or, if it is a number to compute with, pass it as a tensor",
    "live set": "hold the same results in every step",
    "dtype": "give the inputs one dtype",
    "mode": "stay in one eager mode",
    "option": "set compiler options once, before the loop",
    "ops": "keep data-dependent branches out of the step",
    "view": "give the step tensors that lie alike in memory, with .contiguous() before it",
    "donation": "let go of old values in every step alike",
}


def compiles(m: Metrics) -> Finding | None:
    """Compiling goes on after the first step: one line misses at least 5 times for a cause other than being new, or
    at least a quarter of the steps compile."""
    late_ones = _after_first(m)
    again = [
        c
        for c in m.trace.compiles
        if c.launch in late_ones and c.tier == "compiled" and c.cause not in ("first", "live set") and not _last(c.why)
    ]
    if not again:
        return None
    site_of = {r.index: site[:2] for r, site in zip(m.trace.launches, m.sites)}
    (file, line), _ = Counter(site_of.get(c.launch, ("", 0)) for c in again).most_common(1)[0]
    own = [c for c in again if site_of.get(c.launch, ("", 0)) == (file, line)]
    late = [s for s in m.steps[2:] if s.misses]
    if len(own) < 5 and not (len(m.steps) > 4 and len(late) >= len(m.steps) / 4):
        return None
    spent = sum(c.trace_ns + c.lower_ns + c.compile_ns for c in own)
    cause = Counter(c.cause for c in own).most_common(1)[0][0]
    n = number.plural(len(own), "program")
    return Finding(
        "compiles", f"Stop compiling again, {number.time(spent)} of {number.time(m.wall_ns)}.",
        f"{n} at {place(file, line)} differ only by {cause} (\u201c{own[-1].why[:90]}\u201d): {CHANGES.get(cause, 'keep the step the same')}.",
        f"{n} at {place(file, line)} differ only by {cause}",
        file, line, spent,
    )  # fmt: skip


def _last(why: str) -> bool:
    return "last batch" in why


def _after_first(m: Metrics) -> set[int]:
    """Launches that are not a first time by nature: fused or compiled, at a line that launched something before, or
    any mode after the first step."""
    out, seen = set(), set()
    first_end = m.steps[0].end_ns if m.steps else None
    for r, (file, line, _) in zip(m.trace.launches, m.sites):
        site = file, line
        if (r.mode in ("fused", "compiled") and site in seen) or (first_end is not None and r.time_ns >= first_end):
            out.add(r.index)
        seen.add(site)
    return out


def last_batch(m: Metrics) -> Finding | None:
    """A fused or compiled program that was made for a smaller last batch, at a line that ran before."""
    late_ones = _after_first(m)
    own = [
        c
        for c in m.trace.compiles
        if c.launch in late_ones and c.tier == "compiled" and c.cause == "shape" and _last(c.why)
    ]
    if not own:
        return None
    launch = next((r for r in m.trace.launches if r.index == own[0].launch), None)
    file, line = (launch.file, launch.line) if launch else ("", 0)
    spent = sum(c.trace_ns + c.lower_ns + c.compile_ns for c in own)
    return Finding(
        "last batch", "Drop or pad the last batch.",
        f"Its smaller shape at {place(file, line)} made {number.plural(len(own), 'program')} of {'its' if len(own) == 1 else 'their'} own, {number.time(spent)}: "
        "DataLoader(..., drop_last=True).",
        f"its shape at {place(file, line)} was compiled apart, {number.time(spent)}",
        file, line, spent,
    )  # fmt: skip


def waits(m: Metrics) -> Finding | None:
    """A value is read in every steady step (at least 3), so the host cannot run ahead."""
    if len(m.steady) < 3:
        return None
    inside: dict[tuple[str, int], set[int]] = {}
    for w, step in _waits_in_steps(m):
        if w.what in _COPIES:
            inside.setdefault((w.file, w.line), set()).add(step)
    every = [site for site, steps in inside.items() if len(steps) == len(m.steady)]
    host = m.step_split.dispatch + m.step_split.python + m.step_split.transfer
    if not every or m.step_split.total <= 0 or host < 0.02 * m.step_split.total:
        return None
    file, line = every[0]
    wait = next(w for w in m.trace.waits if (w.file, w.line) == (file, line) and w.what in _COPIES)
    call = _COPIES[wait.what]
    gain = min(host, m.step_split.device)
    return Finding(
        "wait", "Read the value every 10 steps, not every step.",
        f"{call} at {place(file, line)} makes the host wait for the device. Without it up to {number.time(gain)} of host work a step "
        "hides behind the device.",
        f"{call}, {place(file, line)}, makes the host wait",
        file, line, gain * len(m.steady),
    )  # fmt: skip


def _waits_in_steps(m: Metrics) -> list:
    """(wait, position of the steady step it began in), for waits inside steady steps."""
    starts = [s.start_ns for s in m.steady]
    out = []
    for w in m.trace.waits:
        at = bisect_right(starts, w.time_ns) - 1
        if at >= 0 and w.time_ns < m.steady[at].end_ns:
            out.append((w, at))
    return out


def host_ops(m: Metrics) -> Finding | None:
    """An op that only the host can run, in every steady step (at least 3): nonzero, unique, eig ..."""
    if len(m.steady) < 3:
        return None
    spent: Counter = Counter()
    inside: dict[tuple[str, str, int], set[int]] = {}
    for w, step in _waits_in_steps(m):
        if w.what.startswith("aten."):
            spent[w.what, w.file, w.line] += w.wait_ns + w.copy_ns
            inside.setdefault((w.what, w.file, w.line), set()).add(step)
    every = [of for of, steps in inside.items() if len(steps) == len(m.steady)]
    if not every or any(o.fallback for o in m.averaged):
        return None
    what, file, line = max(every, key=spent.__getitem__)
    name, gain = op_name(what), spent[what, file, line]
    why, way = "the size of its result depends on the values", "a mask of fixed size (torch.where) keeps it on the device"
    if "eig" in name:
        why, way = "XLA has no algorithm for it on a TPU", "take it out of the loop, or use eigh for a symmetric matrix"
    return Finding(
        "host op", f"Keep {name} out of the step.",
        f"{name} at {place(file, line)} runs on the host, as {why}: both wait for each other, {number.time(gain / len(m.steady))} a step. {way[0].upper()}{way[1:]}.",
        f"{name}, {place(file, line)}, runs on the host",
        file, line, float(gain),
    )  # fmt: skip


def transfers(m: Metrics) -> Finding | None:
    """Several copies to the device in each steady step (at least 3 steps) that take a fifth of the time or more. One or
    two copies a step are its batch."""
    if len(m.steady) < 3:
        return None
    copies = [w for w, _ in _waits_in_steps(m) if w.what == "to tpu"]
    spent = sum(w.wait_ns + w.copy_ns for w in copies) / len(m.steady)
    n = len(copies) // len(m.steady)
    if n < 3 or spent < 0.2 * m.step_split.total:
        return None
    (file, line), _ = Counter((w.file, w.line) for w in copies).most_common(1)[0]
    share = number.percent(spent / m.step_split.total, 2)
    return Finding(
        "transfers", "Copy to the device once, not in each step.",
        f"{n} copies a step, most at {place(file, line)}, take {number.time(spent)}, {share} of it. Move what stays the same "
        "before the loop, and a batch as one tensor.",
        f"{n} copies a step, most at {place(file, line)}, take {share}",
        file, line, spent * len(m.steady),
    )  # fmt: skip


_AVAL = re.compile(r"(\w+)\[([\d,]*)\]$")
_ITEM = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1, "u8": 1}


def _matmuls(m: Metrics) -> list:
    """(op, device ns) of the averaged steps' matmuls; none but on a TPU, where the two rules below are certain."""
    if m.trace.meta.get("platform") != "tpu":
        return []
    return [(m.trace.ops[i], float(m.ops_time[i])) for i in m.step_ops if m.trace.ops[i].kind == "matmul"]


def float32(m: Metrics) -> Finding | None:
    """On a TPU: matmuls of float32 inputs take at least half of the device time. The matrix unit multiplies bfloat16."""
    found = [(op, ns) for op, ns in _matmuls(m) if op.inputs and all(a.startswith("f32[") for a in op.inputs)]
    spent = sum(ns for _, ns in found) / m.n
    if not found or m.step_split.device <= 0 or spent < 0.5 * m.step_split.device:
        return None
    op, _ = max(found, key=lambda pair: pair[1])
    n = number.plural(len(found) // m.n, "float32 matmul")
    return Finding(
        "float32", "Multiply in bfloat16: with torch.autocast(\"tpu\", torch.bfloat16).",
        f"{n} a step, the longest at {place(op.file, op.line)}, take {number.percent(spent / m.step_split.device, 2)} of the device "
        "time. bfloat16 moves half of the bytes, and the matrix unit multiplies it in one pass.",
        f"{n} a step, the longest at {place(op.file, op.line)}",
        op.file, op.line, spent / 2 * m.n,
    )  # fmt: skip


def float64(m: Metrics) -> Finding | None:
    """Ops on float64 tensors take a tenth of the device time or more. No TPU has a unit for them: XLA:TPU makes each of
    many float32 instructions."""
    ops, times = m.trace.ops, m.ops_time
    found = [i for i in m.step_ops.tolist() if any(_wide(a) for a in (*ops[i].inputs, *ops[i].outputs))]
    spent = sum(float(times[i]) for i in found) / m.n
    if not found or m.step_split.device <= 0 or spent < 0.1 * m.step_split.device:
        return None
    op, n = ops[found[0]], number.plural(max(1, len(found) // m.n), "op")
    return Finding(
        "float64", "Count in float32 instead of float64.",
        f"{n} on float64 tensors{' a step' if m.steady else ''}, the first at {place(op.file, op.line)}, "
        f"{'take' if len(found) // m.n > 1 else 'takes'} {number.percent(spent / m.step_split.device, 2)} of the device time. "
        "Numpy's numbers are float64, which a TPU emulates with many float32 instructions: .float() where they come in.",
        f"{n}, the first at {place(op.file, op.line)}, and a TPU emulates it",
        op.file, op.line, spent / 2 * m.n,
    )  # fmt: skip


def _wide(aval: str) -> bool:
    """A float64 array, not a scalar: hyperparameters are such."""
    return aval.startswith(("f64[", "c128[")) and not aval.endswith("[]")


def tile(m: Metrics) -> Finding | None:
    """On a TPU: a matmul whose operands take at least twice their bytes, as a tile is 128 wide (and 8 rows of 4 bytes
    high), and that takes a tenth of the device time or more."""
    worst = None
    for op, ns in _matmuls(m):
        for aval in (*op.inputs, *op.outputs):
            match = _AVAL.match(aval)
            sizes = [int(n) for n in match[2].split(",")] if match and match[2] else []
            if len(sizes) < 2 or match[1] not in _ITEM:  # type: ignore[index]
                continue
            rows = 8 * 4 // _ITEM[match[1]]  # type: ignore[index]
            padded = (-(-sizes[-2] // rows) * rows, -(-sizes[-1] // 128) * 128)
            times = padded[0] * padded[1] / max(1, sizes[-2] * sizes[-1])
            if times >= 2 and (worst is None or ns > worst[1]):
                at = -1 if padded[1] * sizes[-2] >= padded[0] * sizes[-1] else -2
                worst = op, ns, aval, sizes[at], padded[at], times
    if worst is None or worst[1] / m.n < 0.1 * m.step_split.device or m.step_split.device <= 0:
        return None
    op, ns, aval, size, full, times = worst
    return Finding(
        "tile", f"Make the dimension of {size} a multiple of {128 if full % 128 == 0 else 8}.",
        f"{aval} of {op_name(op.name)} at {place(op.file, op.line)}: {size} is stored as {full}, so it takes "
        f"{number.sig(times)}\u00d7 its bytes, and the matrix unit multiplies zeros.",
        f"{aval}, {place(op.file, op.line)}, takes {number.sig(times)}\u00d7 its bytes",
        op.file, op.line, ns * (1 - 1 / times),
    )  # fmt: skip


def launch_bound(m: Metrics) -> Finding | None:
    """Strict or debug mode, over 50 launches a step, and the device busy less than half of the time."""
    launches = len(m.launches_in(m.span))
    split = m.step_split
    work = split.total - split.compile
    if m.trace.meta.get("mode") not in ("strict", "debug") or launches < 50 or work <= 0 or split.device > 0.5 * work:
        return None
    first = m.launches_in(m.span)[0]
    mean = sum(r.device_ns for r in m.launches_in(m.span)) / launches
    gain = split.dispatch * (1 - 1 / launches) * m.n
    return Finding(
        "launch-bound", "Fuse the small ops with torch.tpu.set_eager_mode(DEFER_AND_FUSE).",
        f"{number.plural(launches, 'launch', 'launches')}{' a step' if m.steady else ''} of {number.time(mean)} each on the device; "
        f"dispatch takes {number.percent(split.dispatch / work, 2)} of the time. Fused, a step is one launch, or use torch.compile.",
        f"dispatch takes {number.percent(split.dispatch / work, 2)}",
        first.file, first.line, gain,
    )  # fmt: skip


def fallbacks(m: Metrics) -> Finding | None:
    """Ops that ran on the CPU for want of a lowering."""
    own = [o for o in m.trace.ops if o.fallback]
    if not own:
        return None
    name, n = Counter(op_name(o.name) for o in own).most_common(1)[0]
    first = next(o for o in own if op_name(o.name) == name)
    others = len({op_name(o.name) for o in own}) - 1
    more = f", and {number.plural(others, 'other op')}" if others else ""
    return Finding(
        "fallback", f"Replace {name}, which runs on the CPU.",
        f"It has no TPU lowering and ran {number.plural(n, 'time')} on the CPU at {place(first.file, first.line)}{more}. Each copies to the host and back.",
        f"{number.plural(n, 'time')} at {place(first.file, first.line)}",
        first.file, first.line, float(sum(o.host_ns or o.record_ns for o in own)),
    )  # fmt: skip


RULES = (compiles, last_batch, waits, host_ops, transfers, launch_bound, float32, float64, tile, fallbacks)
