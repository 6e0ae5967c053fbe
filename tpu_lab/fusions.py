"""The groups that the compiler made of the ops: what each holds, what it moved and saved, and why it ended.

A group is an instruction of a program's entry computation that computes (a fusion, a matmul, a sort, a copy ...).
Programs come as optimised HLO text, so groups of XLA:CPU, which ran, and of XLA:TPU, compiled ahead of time for the
same ops, are made by the same code and never mixed: each Group names its compiler.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tpu_lab import ends, hlo, letters, parts
from tpu_lab.costs import BALANCE
from tpu_lab.place import numbered, op_name
from tpu_lab.trace import LaunchRecord, OpRecord

if TYPE_CHECKING:
    from tpu_lab.metrics import Metrics

_LINEAR = frozenset({"addmm", "mm", "linear", "convolution", "_convolution", "convolution_backward"})


@dataclass(frozen=True, slots=True)
class Group:
    """One group. Bytes are logical; `ns` is what `timing` says it is."""

    compiler: str  # "XLA:CPU", "XLA:TPU v6e"
    launch: int  # LaunchRecord.index
    letter: str  # alike groups of a repeated module share it; "" for what the compiler added of its own
    block: str  # the repeated module it sits in: "h.0"; "" outside
    name: str  # the compiler's own: "copy_bitcast_fusion.11"
    opcode: str
    kind: str  # matmul | elementwise | reduce | movement | random | collective
    phase: str  # of its latest op: "forward" | "backward" | "optimizer"; "" without ops
    ops: tuple[int, ...]  # OpRecord.index of each op that has a part in it
    words: str  # what is inside: "div, where, softmax"
    lines: tuple[tuple[str, int], ...]  # (file, line) where its ops are written
    bytes_in: int
    bytes_out: int
    unfused: int  # bytes read and written if each op's part in it ran alone
    flops: int  # its part of the ops' model FLOPs
    ns: float | None = None
    timing: str = ""  # "share" of the launch by FLOPs and bytes | "measured" | "bound" by the roofline | ""
    end: str = ""  # why it ended: a key of tpu_lab.ends.ENDS
    why: str = ""  # the same as a sentence

    @property
    def saved(self) -> int:
        """Bytes that were not written and read again because the ops ran as one."""
        return self.unfused - self.bytes_in - self.bytes_out


@dataclass(frozen=True)
class Program:
    """One program's groups on their way: taken apart, not lettered yet."""

    module: hlo.Module
    bodies: dict[str, parts.Body]
    launch: LaunchRecord
    groups: tuple[Group, ...]


def groups(text: str, ops: Sequence[OpRecord | None], launch: LaunchRecord, compiler: str) -> tuple[Group, ...]:
    """The groups of one program in the order in which it runs them.

    text: its optimised HLO. ops: the records of the launch's ops by position (the scopes in the text), None where
    dropped.
    """
    return finished([taken_apart(hlo.parse(text), ops, launch, compiler)], {r.index: r for r in ops if r is not None})


def finished(programs: Sequence[Program], records: Mapping[int, OpRecord]) -> tuple[Group, ...]:
    """Letters go on from one program to the next; then each group can say which ones read it."""
    lettered = iter(letters.assign((g for p in programs for g in p.groups), records))
    out: list[Group] = []
    for p in programs:
        out += ends.explained(p.module, [next(lettered) for _ in p.groups], p.bodies, p.launch)
    return tuple(out)


def users(made: Sequence[Group]) -> list[Group]:
    """Those that hold an op of the user's, which is how every view counts groups: what the compiler adds of its own
    (copies between memories, constants, scalars of its loops) is none."""
    return [g for g in made if g.ops]


def taken_apart(module: hlo.Module, ops: Sequence[OpRecord | None], launch: LaunchRecord, compiler: str) -> Program:
    """What each computing instruction of the entry holds, reads and writes."""
    made = [i for i in module.entry.instructions if i.opcode not in parts.FREE]
    bodies = {i.name: parts.body(module, i) for i in made}
    single = len(ops) == 1  # a program of one op has no scopes: all of it is that op's
    holds = {i.name: {0} if single else {s for s in _scopes(bodies[i.name], i) if s < len(ops)} for i in made}
    work = _flops(made, bodies, holds, ops)
    out = []
    for i in made:
        body = bodies[i.name]
        records = [r for s in sorted(holds[i.name]) if (r := ops[s]) is not None]
        phase = next((p for p in ("optimizer", "backward", "forward") if any(r.phase == p for r in records)), "")
        kind = body.kind
        if kind == "elementwise" and records and {r.kind for r in records} <= {"movement", "view"}:
            kind = "movement"  # the index arithmetic of an embedding moves data for all that
        out.append(Group(
            compiler, launch.index, "", letters.block_of(records), i.name, i.opcode, kind, phase, tuple(r.index for r in records),
            words(records) or _own_words(i), tuple(dict.fromkeys((r.file, r.line) for r in records if r.file)),
            body.bytes_in, body.bytes_out, body.unfused, round(work[i.name]),
        ))  # fmt: skip
    return Program(module, bodies, launch, tuple(out))


def _scopes(body: parts.Body, instruction: hlo.Instruction) -> frozenset[int]:
    found = set().union(*(n.instruction.scopes for n in body.nodes)) or set(instruction.scopes)
    if any(n.instruction.calls for n in body.nodes):  # loops keep their ops inside
        found |= {s for s in body.scopes if s is not None}
    return frozenset(found)


def _flops(made, bodies, holds, ops) -> dict[str, float]:
    """An op's FLOPs go to the groups that hold its matmuls, in equal parts; without one to the last that holds it."""
    owners: dict[int, list[str]] = {}
    for i in made:
        for node, scope in zip(bodies[i.name].nodes, bodies[i.name].scopes):
            if node.instruction.opcode in parts.MATMUL and scope is not None:
                owners.setdefault(scope, []).append(i.name)
    out = {i.name: 0.0 for i in made}
    last = {scope: i.name for i in made for scope in holds[i.name]}
    for scope, name in last.items():
        record = ops[scope]
        if record is not None and record.flops:
            who = owners.get(scope) or [name]
            for owner in who:
                out[owner] += record.flops / len(who)
    return out


def words(records: Sequence[OpRecord]) -> str:
    """What is inside, in program order: `qkv` for a layer's matmul, else the ops: `div, where, softmax`."""
    shown = [r for r in records if r.kind != "view"] or list(records)
    names: Counter[str] = Counter()
    for record in shown:
        name = op_name(record.name)
        leaf = record.module.rpartition(".")[2]
        if name in _LINEAR and leaf and not leaf.isdigit():
            name = leaf
        else:
            name = name.removeprefix("_foreach_").strip("_").removeprefix("native_").removesuffix("_backward")
        names[name] += 1
    pieces = [name if n == 1 else f"{name} \u00d7{n}" for name, n in names.items()]
    text = ", ".join(pieces[:4]) + (f" and {len(pieces) - 4} more" if len(pieces) > 4 else "")
    return f"{text} backward" if text and shown[-1].phase == "backward" else text


def _own_words(instruction: hlo.Instruction) -> str:
    if instruction.opcode in ("copy", "copy-start"):
        return "a copy that the compiler adds"
    return f"{instruction.opcode}, made by the compiler"


def of(m: Metrics) -> tuple[Group, ...]:
    """The groups of every launch of the drawn step whose program's text is known; their times are shares."""
    known = _kept.get(m)
    if known is None:
        records = {r.index: r for r in m.trace.ops}
        compiler = str(m.trace.meta.get("compiler") or "XLA")
        programs: list[Program] = []
        for launch in m.launches_in(m.span):
            module = module_of(m, launch)
            if module is not None:
                apart = taken_apart(module, [records.get(index) for index in launch.ops], launch, compiler)
                programs.append(replace(apart, groups=_timed(apart.groups, launch.device_ns)))
        known = _kept[m] = finished(programs, records)
    return known


def module_of(m: Metrics, launch: LaunchRecord) -> hlo.Module | None:
    """The program that a launch ran, read once; None when its text is not kept."""
    program = m.trace.programs.get(launch.key)
    if program is None:
        return None
    read = _read.setdefault(m, {})
    if launch.key not in read:
        read[launch.key] = hlo.parse(program.hlo())  # type: ignore[attr-defined]
    return read[launch.key]


_kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_read: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def letter_of(m: Metrics) -> dict[int, str]:
    """Op number -> the letter of the first group of the drawn step that has a part of it."""
    out: dict[int, str] = {}
    for group in of(m):
        for op in group.ops if group.letter else ():
            out.setdefault(op, group.letter)
    return out


def _timed(made: tuple[Group, ...], device_ns: float) -> tuple[Group, ...]:
    """Shares of the launch's device time by max(FLOPs, BALANCE x bytes), as costs.py gives them to ops."""
    weight = [max(g.flops, BALANCE * (g.bytes_in + g.bytes_out)) for g in made]
    total = sum(weight)
    if not device_ns or not total:
        return made
    return tuple(replace(g, ns=device_ns * w / total, timing="share") for g, w in zip(made, weight))


def measured(made: Sequence[Group], times: dict[tuple[int, str], float]) -> tuple[Group, ...]:
    """The same groups with measured times, ns by (launch, compiler's name); those that nobody measured have none."""
    return tuple(
        replace(g, ns=times.get((g.launch, g.name)), timing="measured" if (g.launch, g.name) in times else "")
        for g in made
    )


def placed(m: Metrics) -> tuple[int, int]:
    """(compiled instructions with metadata that map to a line of the user's, all that carry metadata), over the
    programs of the drawn step. Parameters carry the name of an argument, not an origin: they do not count."""
    records = {r.index: r for r in m.trace.ops}
    found = total = 0
    for launch in m.launches_in(m.span):
        module = module_of(m, launch)
        if module is None:
            continue
        origins = hlo.origins(module)
        for computation in module.computations.values():
            for i in computation.instructions:
                if i.op_name and i.opcode != "parameter":
                    total += 1
                    scopes = {0} if len(launch.ops) == 1 else origins.get(i.name, ())
                    lines = [records.get(launch.ops[s]) for s in scopes if s < len(launch.ops)]
                    found += any(r is not None and r.file and r.line for r in lines)
    return found, total


def modules_alike(made: Sequence[Group]) -> tuple[str, int]:
    """The repeated module with the most groups and how many there are alike: ("h.0", 6); ("", 0) without one."""
    blocks: dict[str, dict[str, int]] = {}
    for g in made:
        if numbered(g.block):
            seen = blocks.setdefault(g.block.rpartition(".")[0], {})
            seen[g.block] = seen.get(g.block, 0) + 1
    repeated = {stem: seen for stem, seen in blocks.items() if len(seen) > 1}
    if not repeated:
        return "", 0
    seen = max(repeated.values(), key=lambda s: sum(s.values()))
    return min(seen, key=lambda name: int(name.rpartition(".")[2])), len(seen)
