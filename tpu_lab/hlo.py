"""Optimised HLO, read from its text: computations, instructions, shapes with layouts, and which op each came from.

Works for what XLA:CPU and XLA:TPU print (`Compiled.as_text()`, and the files of `--xla_dump_hlo_as_text`). Standard
library only, needs no jax. The grammar is that of https://openxla.org/xla/hlo_dumps and
https://openxla.org/xla/tiled_layout; what we do not know stays raw in `Instruction.attributes`.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from tpu_lab import garbage

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_START = re.compile(r"^(ROOT )?%?([\w.\-]+) = ")
_BRACKET = re.compile(r'[(){}\[\]"]')
_NAME = re.compile(r"%([^\s,()]+)")
_OPCODE = re.compile(r" ([\w\-]+)\(")
_OP_NAME = re.compile(r'metadata=\{[^{}]*?op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|select|scatter|true_computation|false_computation|called_computations"
    r"|branch_computations)=(?:%?([\w.\-]+)|\{([^}]*)\})"
)
_NESTED = re.compile(r'[(\["{]')
_SCOPE = re.compile(r"(?:^|[/(])(\d+):")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_BITS = re.compile(r"[a-z]+(\d+)")
# Called per element or per pair of elements: what they do is said by the instruction that calls them, and XLA shares
# one such region among many callers.
_REGION_OF = frozenset({"reduce", "reduce-window", "all-reduce", "reduce-scatter", "scatter", "select-and-scatter", "sort", "map"})  # fmt: skip


@lru_cache(1 << 14)
def _scopes(op_name: str) -> frozenset[int]:
    return frozenset(int(i) for i in _SCOPE.findall(op_name))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str  # "fusion", "dot", "copy-start", ...
    shape: str  # with its layout: "bf16[4096,2048]{1,0:T(8,128)(2,1)S(1)}", or a tuple of such
    operands: tuple[str, ...]  # names of instructions of the same computation
    calls: tuple[str, ...]  # names of the computations that it calls
    op_name: str  # where it came from: "jit(run)/1:aten.add.Tensor/add"; "" if not said
    attributes: str  # the rest of the line, raw: "kind=kLoop, calls=%fused_computation, ..."
    root: bool
    computation: str

    def attribute(self, name: str) -> str:
        """The value of a plain attribute: `kind` -> "kLoop", `custom_call_target` -> "TopK"; "" if it has none."""
        match = re.search(rf'\b{name}=(?:"([^"]*)"|(\{{[^}}]*\}}|[^,\s]+))', self.attributes)
        return (match[1] or match[2] or "") if match else ""

    @property
    def scopes(self) -> frozenset[int]:
        """The op positions that its own `op_name` states."""
        return _scopes(self.op_name)


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]  # in the order of the text: operands before users

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction | None:
        return next((i for i in self.instructions if i.root), self.instructions[-1] if self.instructions else None)

    @cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """For each instruction those that read it."""
        out: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                out.setdefault(operand, []).append(instruction)
        return {name: tuple(readers) for name, readers in out.items()}


@dataclass(frozen=True)
class Module:
    name: str
    computations: dict[str, Computation]
    entry: Computation
    lines: dict[str, str] = field(default_factory=dict, repr=False)  # instruction name -> its line of text

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Everything in the computations that an instruction calls, and in those that they call."""
        for name in instruction.calls:
            called = self.computations.get(name)
            if called is not None:
                for inner in called.instructions:
                    yield inner
                    yield from self.inside(inner)


def parse(text: str) -> Module:
    """Read a module's text, once for as long as somebody holds the module. ValueError when it has no ENTRY computation."""
    key = hashlib.blake2b(text.encode()).digest()
    module = _read.get(key)
    if module is None:
        module = _read[key] = _parsed(text)
    return module


_read: weakref.WeakValueDictionary[bytes, Module] = weakref.WeakValueDictionary()


@garbage.paused()
def _parsed(text: str) -> Module:
    name, entry, current = "", "", ""
    bodies: dict[str, list[Instruction]] = {}
    lines: dict[str, str] = {}
    for raw in text.splitlines():
        line = raw.strip()
        if not current:
            if line.startswith("HloModule "):
                name = line[len("HloModule ") :].split(",")[0].strip()
            elif match := _HEAD.match(line):
                current = match[2]
                entry = current if match[1] else entry
                bodies[current] = []
        elif line.startswith("}"):
            current = ""
        elif instruction := _instruction(line, current):
            bodies[current].append(instruction)
            lines[instruction.name] = line
    if not entry:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    computations = {key: Computation(key, tuple(body)) for key, body in bodies.items()}
    return Module(name, computations, computations[entry], lines)


def _instruction(line: str, computation: str) -> Instruction | None:
    start = _START.match(line)
    if not start:
        return None
    rest = line[start.end() :]
    cut = _closed(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, cut)
    if cut < 0 or not opcode:
        return None
    end = _closed(rest, opcode.end() - 1)
    inner, attributes = rest[opcode.end() : end - 1], rest[end:].lstrip(", ")
    operands = () if opcode[1] in ("parameter", "constant", "iota") else _operands(inner)
    a, calls = attributes, ()
    if "calls=" in a or "to_apply=" in a or "body=" in a or "scatter=" in a or "computation" in a:  # in each of _CALLS
        names = [n.strip().lstrip("%") for one, many in _CALLS.findall(a) for n in (one or many).split(",")]
        calls = tuple(dict.fromkeys(n for n in names if n))
    op_name = _OP_NAME.search(a, a.find("metadata={")) if "metadata={" in a else None
    return Instruction(
        start[2], opcode[1], re.sub(r"/\*.*?\*/", "", rest[:cut]) if "/*" in rest[:cut] else rest[:cut], operands, calls,
        op_name[1] if op_name else "", attributes, bool(start[1]), computation,
    )  # fmt: skip


def _closed(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`; the text's end when none does."""
    end = text.find(")", start)
    if end > 0 and text[start] == "(" and not _NESTED.search(text, start + 1, end):  # most lists of operands
        return end + 1
    depth, quoted = 0, False
    for match in _BRACKET.finditer(text, start):
        c = match[0]
        if c == '"':
            quoted ^= text[match.start() - 1] != "\\"
        elif not quoted:
            depth += 1 if c in "({[" else -1
            if not depth:
                return match.end()
    return len(text)


def _operands(inner: str) -> tuple[str, ...]:
    """Names from `%a, %b` or, as some dumps print them, `f32[2,3]{1,0} %a, (f32[], s32[]) %b`."""
    if "%" in inner:
        return tuple(_NAME.findall(inner))
    pieces, depth, piece = [], 0, ""
    for c in re.sub(r"/\*.*?\*/", "", inner):
        depth += (c in "({[") - (c in ")}]")
        if c == "," and not depth:
            pieces.append(piece)
            piece = ""
        else:
            piece += c
    return tuple(p.split()[-1].lstrip("%") for p in [*pieces, piece] if p.strip())


def scopes(module: Module) -> dict[str, frozenset[int]]:
    """For each instruction of the entry: the positions in `LaunchRecord.ops` of the ops it came from.

    What is inside its called computations counts. One without metadata of its own (`copy-start`, `copy`, `tuple`)
    belongs to the op that made what it reads, else to the op that reads it; parameters belong to none.
    """
    out = {i.name: _own(module, i) for i in module.entry.instructions}
    gives = {i.name: i.scopes or out[i.name] for i in module.entry.instructions}  # whose value the instruction gives
    return _spread(module.entry, out, gives, operands_first=True)


def origins(module: Module) -> dict[str, frozenset[int]]:
    """For each instruction of every computation: the positions of the ops it works for.

    Its own scope if it has one; else, inside its computation, that of what reads it (a scalar argument taken out of
    an array works for its reader), then of what it reads; else that of the instruction that calls its computation.
    """
    out: dict[str, frozenset[int]] = {}
    callers: dict[str, frozenset[int]] = {module.entry.name: frozenset()}
    left = [module.entry]
    while left:
        computation = left.pop()
        own = {i.name: i.scopes for i in computation.instructions}
        found = _spread(computation, own, dict(own), operands_first=False)
        for i in computation.instructions:
            out[i.name] = found[i.name] or callers[computation.name]
            for name in i.calls:
                if name in module.computations and name not in callers:
                    callers[name] = out[i.name]
                    left.append(module.computations[name])
    return out


def _spread(computation: Computation, out: dict, gives: dict, operands_first: bool) -> dict[str, frozenset[int]]:
    """Fill what has no scope from its neighbours, one direction after the other."""

    def down() -> None:
        for i in computation.instructions:
            if not out[i.name] and i.opcode != "parameter":
                out[i.name] = gives[i.name] = frozenset().union(*(gives.get(o, frozenset()) for o in i.operands))

    def up() -> None:
        for i in reversed(computation.instructions):
            if not out[i.name] and i.opcode != "parameter":
                out[i.name] = gives[i.name] = frozenset().union(*(gives[u.name] for u in computation.users[i.name]))

    for fill in (down, up) if operands_first else (up, down):
        fill()
    return out


def _own(module: Module, instruction: Instruction) -> frozenset[int]:
    found = set(instruction.scopes)
    for name in instruction.calls:
        if instruction.opcode not in _REGION_OF and name in module.computations:
            for inner in module.computations[name].instructions:
                found |= _own(module, inner)
    return frozenset(found)


def arrays(shape: str) -> list[str]:
    """The array shapes in a shape: one, or those of a tuple, nested ones flattened."""
    return [match[0] for match in _ARRAY.finditer(shape)]


def bits(dtype: str) -> int:
    """Bits of one element: f32 -> 32, f8e4m3fn -> 8, pred -> 8; 0 for tokens and opaque values."""
    if dtype == "pred":
        return 8
    match = _BITS.match(dtype)
    return int(match[1]) if match else 0


def dims(array: str) -> tuple[int, ...]:
    """`f32[8,64]{1,0}` -> (8, 64); a bounded dynamic size (`<=10`) counts as its bound."""
    match = _ARRAY.match(array)
    return tuple(int(d.strip().lstrip("<=")) for d in match[2].split(",") if d.strip()) if match else ()


@lru_cache(1 << 14)
def nbytes(shape: str) -> int:
    """Logical bytes of an array's or tuple's elements, without padding."""
    return sum(-(-_product(dims(a)) * bits(a.split("[")[0]) // 8) for a in arrays(shape))


def padded_bytes(shape: str) -> int:
    """Bytes as held on the device: the tiles `T(8,128)` of a layout round its minor dimensions up.

    Dimensions are put in the layout's order first, then each tile splits the last ones into whole tiles
    (https://openxla.org/xla/tiled_layout). Without tiles it is `nbytes`.
    """
    return sum(_padded(a) for a in arrays(shape))


@lru_cache(1 << 14)
def _padded(array: str) -> int:
    match = _ARRAY.match(array)
    order, _, tiling = (match[3] or "").partition(":") if match else ("", "", "")
    sizes = dims(array)
    if order.strip():
        sizes = tuple(sizes[int(i)] for i in reversed(order.split(",")))
    tiled = re.match(r"T((?:\([\d,*]+\))+)", tiling)
    for tile in re.findall(r"\(([\d,*]+)\)", tiled[1]) if tiled else ():
        sizes = _tile(sizes, tile.split(","))
    element = re.search(r"E\((\d+)\)", tiling)  # packed: bits of an element said by the layout
    return -(-_product(sizes) * (int(element[1]) if element else bits(array.split("[")[0])) // 8)


def _tile(sizes: tuple[int, ...], tile: list[str]) -> tuple[int, ...]:
    sizes = (1,) * (len(tile) - len(sizes)) + sizes
    outer, inner, held = list(sizes[: len(sizes) - len(tile)]), [], 1
    for size, side in zip(sizes[len(outer) :], tile):
        if side == "*":  # joined with the next dimension before it is tiled
            held *= size
            continue
        outer.append(-(-size * held // int(side)))
        inner.append(int(side))
        held = 1
    return (*outer, *inner)


def space(shape: str) -> int:
    """Where an array lives: 0 = HBM, 1 = VMEM (`S(1)` in its layout); for a tuple, where its first array lives."""
    first = next(iter(arrays(shape)), "")
    match = re.search(r"S\((\d+)\)", first)
    return int(match[1]) if match else 0


def _product(sizes: tuple[int, ...]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out
