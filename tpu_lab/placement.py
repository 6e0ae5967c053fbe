"""Whose bytes are where: the TPU compiler's buffers by owner, padding, HBM traffic, and the bound that follows.

From a program's HLO and buffer assignment (tpu_lab/assignment.py) and the records of its ops. Owners are weights,
optimizer, gradients, activations and inputs: an argument is what its readers make it (an optimizer's and others':
a weight; an optimizer's alone: optimizer state), a temporary what the op is that makes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tpu_lab import assignment, garbage, hlo
from tpu_lab.assignment import HBM, VMEM, Allocation, Value
from tpu_lab.parts import COLLECTIVE, FREE
from tpu_lab.place import op_name
from tpu_lab.targets import Target
from tpu_lab.trace import OpRecord

OWNERS = ("weights", "optimizer", "gradients", "activations", "inputs", "other")
_MOVES = frozenset("bitcast copy copy-start copy-done async-start async-done get-tuple-element reshape transpose convert".split())
_TAKES = frozenset({"slice", "dynamic-slice", "gather"})
_NUMBER = re.compile(r" parameter\((\d+)\)")
_LEAF = re.compile(r"^(?:leaves|arrays)\[(\d+)\]")
_STATE = frozenset({"weight", "bias", "running_mean", "running_var"})
_DATA = frozenset({"", "self", "input", "indices", "target", "mat1", "batch1", "batch2", "tensor1"})
_ADDED_TO = "self of aten.add_."  # how autograd adds to a gradient that is there already
_TARGET = re.compile(r"^([A-Za-z_]\w*(?:, ?[A-Za-z_]\w*)*) = ")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array that the compiler placed."""

    name: str  # of the instruction, in the HLO
    space: str  # "HBM" | "VMEM"
    kind: str  # "argument" | "result" | "temporary" | "constant"
    owner: str  # one of OWNERS
    what: str  # in the reader's words: "scores", "qkv weight"
    op: int  # OpRecord.index of the op that makes or first reads it; -1 unknown
    module: str
    file: str
    line: int
    shape: str  # "f32[8,8,64,64]"
    layout: str  # "{3,2,1,0:T(8,128)}"
    logical: int  # bytes of its elements
    held: int  # bytes with the padding of its tiles
    fullest: bool  # in memory when the space is fullest


@dataclass(frozen=True)
class Share:
    """Part of a memory space at its fullest moment."""

    owner: str  # one of OWNERS, "padding", or "reserved" (neither used nor free at that moment)
    bytes: int


class Placed:
    """One program as XLA:TPU placed it. ops: its records by position (None where dropped); flops: its model FLOPs.

    leaves: a name for each argument, "weight of aten.linear.default", as the compile cache has them.
    """

    @garbage.paused()
    def __init__(
        self, text: str, buffers: str, target: Target, ops: Sequence[OpRecord | None], flops: int = 0, leaves: Sequence[str] = ()
    ) -> None:  # fmt: skip
        self.target, self.ops, self.flops, self._leaves = target, list(ops), flops, list(leaves)
        self.module = hlo.parse(text)
        self.allocations = assignment.parse(buffers)
        self.scopes = hlo.scopes(self.module)
        self._lives = assignment.lifetimes(self.module)
        self._aliased = {int(n) for n in re.findall(r": \((\d+), \{\}, ", text[: text.find("\n")])}

    @property
    def hbm(self) -> int:
        """Bytes of HBM that it needs."""
        return assignment.total(self.allocations, HBM)

    @property
    def vmem(self) -> int:
        """Bytes of VMEM that it needs at most."""
        return assignment.total(self.allocations, VMEM)

    @cached_property
    def collectives(self) -> list[hlo.Instruction]:
        """Operations that talk to other devices (a `-start` counts, its `-done` does not)."""
        return [
            i for i in self.module.entry.instructions
            if i.opcode.startswith(COLLECTIVE) and not i.opcode.endswith("-done")
        ]  # fmt: skip

    @cached_property
    def moved(self) -> dict[str, tuple[int, int]]:
        """Instruction of the entry -> bytes (read from HBM, written to it) by the layouts, at least: loops count once."""
        out, entry = {}, self.module.entry
        for i in entry.instructions:
            if i.opcode in FREE or i.opcode.endswith("-done"):
                continue
            if i.opcode in ("copy-start", "async-start"):  # only what moves: its result holds the source, too
                size = min((hlo.padded_bytes(a) for a in hlo.arrays(i.shape)[:2]), default=0)
                read = size * any(hlo.space(entry.by_name[o].shape) == HBM for o in i.operands)
                out[i.name] = read, size * any(hlo.space(a) == HBM for a in _arrays(i))
                continue
            read, taken = 0, self._taken(i)
            for k, operand in enumerate(i.operands):
                shape = entry.by_name[operand].shape
                if hlo.space(shape) == HBM and entry.by_name[operand].opcode != "tuple":
                    read += min(taken.get(k, hlo.padded_bytes(shape)), hlo.padded_bytes(shape))
            update = self._update(i)
            whole = sum(hlo.padded_bytes(a) for a in _arrays(i) if hlo.space(a) == HBM)
            out[i.name] = read, whole if update is None else update
        return out

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes (read from HBM, written to it) in one run, at least."""
        return sum(r for r, _ in self.moved.values()), sum(w for _, w in self.moved.values())

    @property
    def bound_ns(self) -> tuple[float, float]:
        """(HBM, compute): no run is faster than the larger, at the chip's published peaks."""
        return 1e9 * sum(self.traffic) / self.target.bandwidth, 1e9 * self.flops / self.target.flops

    @cached_property
    def buffers(self) -> list[Buffer]:
        """All placed arrays of HBM and VMEM, largest first."""
        out = []
        for a in self.allocations:
            if a.space not in (HBM, VMEM) or a.kind == "scratch":
                continue
            values: Sequence[Value] = a.values
            if a.kind == "argument":  # its results lie in the same place
                values = [v for v in values if self._opcode(v) == "parameter"] or values[:1]
            alive = set(self._fullest(a))
            out += [self._buffer(a, v, a.kind != "temporary" or v in alive) for v in values if v.shape[:1] != "("]
        return sorted(out, key=lambda b: (-b.held, b.name))

    def shares(self, space: int) -> list[Share]:
        """What a memory space holds at its fullest, by owner, then padding and what is reserved; the sum is its total."""
        name = "HBM" if space == HBM else "VMEM"
        sums = dict.fromkeys((*OWNERS, "padding"), 0)
        for b in self.buffers:
            if b.space == name and b.fullest:
                sums[b.owner] += b.logical
                sums["padding"] += b.held - b.logical
        rest = (self.hbm if space == HBM else self.vmem) - sum(sums.values())
        sums["reserved"] = max(0, rest)
        return [Share(owner, n) for owner, n in sums.items() if n]

    # --- who made it, who reads it ---------------------------------------------------------------------------------

    def _fullest(self, a: Allocation) -> Sequence[Value]:
        return assignment.fullest(a, self._lives)[1] if a.kind == "temporary" else a.values

    def _opcode(self, v: Value) -> str:
        found = self.module.entry.by_name.get(v.name)
        return found.opcode if found else ""

    def _buffer(self, a: Allocation, v: Value, fullest: bool) -> Buffer:
        owner, position, what = self._whose(a, v)
        record = self.ops[position] if 0 <= position < len(self.ops) else None
        shape, _, layout = v.shape.partition("{")
        layout = "{" + re.sub(r"S\(\d+\)", "", layout) if layout else ""
        return Buffer(
            v.name, "HBM" if a.space == HBM else "VMEM", a.kind, owner, what or _words(record),
            record.index if record else -1, record.module if record else "", record.file if record else "",
            record.line if record else 0, shape, "" if layout in ("{}", "{:}") else layout,
            hlo.nbytes(v.shape), max(hlo.padded_bytes(v.shape), hlo.nbytes(v.shape)), fullest,
        )  # fmt: skip

    def _whose(self, a: Allocation, v: Value) -> tuple[str, int, str]:
        """(owner, op position, words or "")."""
        entry = self.module.entry
        instruction = entry.by_name.get(v.name)
        if instruction is None:  # inside a loop or a called computation
            position = next((max(s) for i in self._holders.get(v.name, ()) if (s := self.scopes.get(i))), -1)
            return self._by_phase(position, v, ()), position, ""
        source = self._source(instruction)
        if source.opcode == "parameter":
            return self._argument(source)
        if source.opcode == "constant" or a.kind == "constant":
            return "other", -1, "constant"
        position = self._maker(source, v.index if source is instruction else ())
        readers = {p for u in entry.users[instruction.name] for p in self.scopes.get(u.name, ())}
        return self._by_phase(position, v, readers, a.kind == "result"), position, ""

    def _source(self, instruction: hlo.Instruction) -> hlo.Instruction:
        """What an instruction without an op of its own moves about: a weight's prefetch is the weight."""
        entry = self.module.entry
        while instruction.opcode in _MOVES and instruction.operands and not instruction.scopes:
            instruction = entry.by_name[instruction.operands[0]]
        return instruction

    def _maker(self, instruction: hlo.Instruction, index: tuple[int, ...]) -> int:
        """The op position that a result comes from."""
        called = self.module.computations.get(instruction.calls[0]) if instruction.calls else None
        if index and called is not None and called.root is not None and called.root.opcode == "tuple":
            inner = called.by_name.get(called.root.operands[index[0]]) if index[0] < len(called.root.operands) else None
            while inner is not None and not inner.scopes and inner.operands:
                inner = called.by_name.get(inner.operands[0])
            if inner is not None and inner.scopes:
                return max(inner.scopes)
        own = instruction.scopes or self.scopes.get(instruction.name) or {-1}
        return max(own)

    def _by_phase(self, position: int, v: Value, readers, result: bool = False) -> str:
        record = self.ops[position] if 0 <= position < len(self.ops) else None
        if record is None:
            return "other"
        if record.phase == "optimizer":
            # its result took over a donated argument's place or, one for each weight, a gradient that took it has this
            return "gradients" if result and self._aliased and _elements(v.shape) in self._weight_sizes else "optimizer"
        if record.phase == "backward" and _elements(v.shape) in self._weight_sizes:
            phases = {self.ops[p].phase for p in readers if p < len(self.ops) and self.ops[p] is not None}
            if result or "optimizer" in phases:
                return "gradients"
        return "activations"

    @cached_property
    def _holders(self) -> dict[str, list[str]]:
        """Instruction inside a called computation -> the entry instructions that run it."""
        out: dict[str, list[str]] = {}
        for i in self.module.entry.instructions:
            if i.opcode in ("while", "conditional", "call"):
                for inner in self.module.inside(i):
                    out.setdefault(inner.name, []).append(i.name)
        return out

    @cached_property
    def _trains(self) -> bool:
        """Is the optimizer's step part of the program? Then it shows which arguments are weights."""
        return any(record is not None and record.phase == "optimizer" for record in self.ops)

    @cached_property
    def _weight_sizes(self) -> frozenset[int]:
        """Element counts of the weights: a gradient has one of them."""
        return frozenset(
            _elements(i.shape) for i in self.module.entry.instructions
            if i.opcode == "parameter" and self._argument(i)[0] == "weights"
        )  # fmt: skip

    def _argument(self, parameter: hlo.Instruction) -> tuple[str, int, str]:
        """(owner, op position of its first reader, words) of an argument of the program."""
        found = self._arguments.get(parameter.name)
        if found is None:
            found = self._arguments[parameter.name] = self._argument_anew(parameter)
        return found

    @cached_property
    def _arguments(self) -> dict[str, tuple[str, int, str]]:
        return {}

    def _argument_anew(self, parameter: hlo.Instruction) -> tuple[str, int, str]:
        reads = sorted(p for p in self._reads(self.module.entry, parameter.name) if p < len(self.ops))
        phases = {r.phase for p in reads if (r := self.ops[p]) is not None}
        leaf = _LEAF.match(parameter.op_name)
        name = self._leaves[int(leaf[1])] if leaf and int(leaf[1]) < len(self._leaves) else ""
        role = name.split(" of ")[0] if " of " in name else ""
        number = self._number(parameter.name)
        first = reads[0] if reads else -1
        if leaf is None and _elements(parameter.shape) < 1 << 16:
            return "other", first, "scalars"
        if phases == {"backward"} and name.startswith(_ADDED_TO):
            return "gradients", first, "gradient"
        if "optimizer" in phases:
            owner = "weights" if len(phases) > 1 else "optimizer"
        elif number in self._aliased or role in _STATE:
            owner = "weights"
        elif not phases or self._trains or is_data(name):
            owner = "inputs"
        else:
            owner = "weights"
        if owner == "optimizer":
            return owner, first, "optimizer state"
        plain = re.sub(r"\[\d+\]$", "", role)
        return owner, first, plain if plain in _STATE else "weight" if owner == "weights" else "input"

    def _number(self, name: str) -> int:
        match = _NUMBER.search(self.module.lines.get(name, ""))
        return int(match[1]) if match else -1

    def _reads(self, computation: hlo.Computation, name: str) -> set[int]:
        """Positions of the ops that read a value, looked for inside fusions and behind copies."""
        found: set[int] = set()
        for user in computation.users.get(name, ()):
            called = self.module.computations.get(user.calls[0]) if user.calls else None
            if called is not None and user.opcode in ("fusion", "async-start", "call"):
                wanted = {k for k, o in enumerate(user.operands) if o == name}
                inside: set[int] = set()
                for inner in called.instructions:
                    if inner.opcode == "parameter" and self._number(inner.name) in wanted:
                        inside |= self._reads(called, inner.name)
                found |= inside or self._reads(computation, user.name)  # a fused bitcast has no op: look behind it
            elif user.scopes:
                found |= user.scopes
            elif user.opcode in _MOVES or user.opcode == "custom-call":
                found |= self._reads(computation, user.name)
        return found

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _taken(self, i: hlo.Instruction) -> dict[int, int]:
        """Operand number -> bytes, for operands that are only sliced or gathered."""
        if i.opcode in _TAKES:
            return {0: hlo.nbytes(i.shape)}
        called = self.module.computations.get(i.calls[0]) if i.opcode == "fusion" and i.calls else None
        out = {}
        for inner in called.instructions if called else ():
            if inner.opcode == "parameter":
                users = called.users[inner.name] if called else ()
                if users and all(u.opcode in _TAKES or _is_update_of(u, inner.name) for u in users):
                    out[self._number(inner.name)] = sum(hlo.nbytes(u.shape) for u in users if u.opcode in _TAKES)
        return out

    def _update(self, i: hlo.Instruction) -> int | None:
        """Bytes written by an in-place update of part of an array, else None."""
        computation, root = self.module.entry, i
        if i.opcode == "fusion" and i.calls and (called := self.module.computations.get(i.calls[0])):
            computation, root = called, called.root or i
        if root.opcode == "dynamic-update-slice" and len(root.operands) > 1:
            update = computation.by_name.get(root.operands[1])
            return hlo.nbytes(update.shape) if update is not None and hlo.space(i.shape) == HBM else 0
        return None


def is_data(name: str) -> bool:
    """Is an argument, "input of aten.convolution.default", read as data and not as a weight?"""
    role = name.split(" of ")[0] if " of " in name else ""
    return role in _DATA and not name.startswith("self of aten.addm")


def _is_update_of(user: hlo.Instruction, name: str) -> bool:
    return user.opcode == "dynamic-update-slice" and user.operands[0] == name and name not in user.operands[1:]


def _arrays(i: hlo.Instruction) -> list[str]:
    """The arrays that an instruction writes: of an asynchronous copy only the destination."""
    arrays = hlo.arrays(i.shape)
    if i.opcode == "copy-start":
        return arrays[:1]
    return arrays[1:2] if i.opcode == "async-start" else arrays


def _elements(shape: str) -> int:
    return math.prod(hlo.dims(shape))


def _words(record: OpRecord | None) -> str:
    """What a reader calls a value: the name it is assigned to on its line, else its op."""
    if record is None:
        return "made by the compiler"
    if record.phase == "forward" and (match := _TARGET.match(record.code)):
        return match[1]
    back = ", backward" if record.phase == "backward" else ""
    return op_name(record.name).removesuffix("_backward") + back
