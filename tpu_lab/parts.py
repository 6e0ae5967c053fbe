"""What one compiled instruction reads, writes and would have moved if each op in it ran alone: from its HLO.

Bytes are logical (no padding). An operand that is only sliced or gathered inside counts by what is taken from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_lab import hlo

ALIAS = frozenset({"bitcast", "optimization-barrier", "copy-done", "all-reduce-done", "all-gather-done", "async-done"})
INLINE = frozenset({"fusion", "call"})
FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "after-all", "partition-id"}) | ALIAS
MATMUL = frozenset({"dot", "convolution", "ragged-dot"})
REDUCE = frozenset({"reduce", "reduce-window", "select-and-scatter"})
RANDOM = frozenset({"rng", "rng-bit-generator", "rng-get-and-update-state"})
MOVES = frozenset(
    "copy copy-start transpose broadcast slice dynamic-slice dynamic-update-slice concatenate pad gather scatter "
    "reverse reshape iota sort bitcast-convert infeed outfeed slice-start".split()
)
COLLECTIVE = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-")
_TAKES = frozenset({"slice", "dynamic-slice", "gather"})
_LIBRARY = re.compile(r"matmul|dot|gemm|conv", re.I)


@dataclass(frozen=True, slots=True)
class Node:
    """An instruction inside a group, with nested fusions taken apart."""

    instruction: hlo.Instruction
    reads: tuple  # of node numbers, or names of entry-level values


@dataclass(frozen=True)
class Body:
    """A group taken apart. `outputs` are node numbers (or names of entry values that pass through)."""

    nodes: tuple[Node, ...]
    outputs: tuple
    scopes: tuple[int | None, ...]  # by node: the op position that it works for
    bytes_in: int
    bytes_out: int
    unfused: int  # bytes read and written if each op's part ran alone

    @property
    def kind(self) -> str:
        """matmul | collective | random | reduce | movement | elementwise, by what its instructions are."""
        codes = {n.instruction.opcode for n in self.nodes} - {"constant"}
        if codes & MATMUL or any(_library(n.instruction) for n in self.nodes):
            return "matmul"
        if any(code.startswith(COLLECTIVE) for code in codes):
            return "collective"
        if codes & RANDOM:
            return "random"
        if codes & REDUCE:
            return "reduce"
        return "movement" if codes <= MOVES else "elementwise"


def _library(instruction: hlo.Instruction) -> bool:
    if instruction.opcode != "custom-call":
        return False
    return bool(_LIBRARY.search(instruction.attribute("custom_call_target")))


def body(module: hlo.Module, instruction: hlo.Instruction) -> Body:
    """Take an entry-level instruction apart and count its bytes."""
    nodes: list[Node] = []
    entry = module.entry.by_name
    outputs = tuple(dict.fromkeys(_leaves(_add(module, instruction, instruction.operands, nodes))))
    scopes = _scopes(nodes)
    sizes = [0 if n.instruction.opcode == "constant" else _size(n.instruction) for n in nodes]

    def size(value) -> int:
        if isinstance(value, int):
            return sizes[value]
        return 0 if entry[value].opcode == "constant" else _size(entry[value])

    def read(value, readers: list[int]) -> int:
        """Bytes of `value` that these nodes take."""
        taken = [sizes[r] for r in readers if _takes(nodes[r], value)]
        return min(size(value), sum(taken)) if len(taken) == len(readers) else size(value)

    readers: dict = {}
    for i, node in enumerate(nodes):
        for value in dict.fromkeys(node.reads):
            readers.setdefault(value, []).append(i)
    bytes_in = sum(read(value, who) for value, who in readers.items() if isinstance(value, str))
    bytes_out = sum(size(value) for value in outputs if isinstance(value, int))
    unfused = 0
    for value, who in readers.items():
        if isinstance(value, int) and nodes[value].instruction.opcode == "constant":
            continue
        own = scopes[value] if isinstance(value, int) else None
        by_part: dict = {}
        for r in who:
            by_part.setdefault(scopes[r], []).append(r)
        parts = [w for scope, w in by_part.items() if isinstance(value, str) or scope != own]
        unfused += sum(read(value, w) for w in parts)
        if parts and isinstance(value, int) and value not in outputs:
            unfused += size(value)
    return Body(tuple(nodes), outputs, scopes, bytes_in, bytes_out, unfused + bytes_out)


def _size(instruction: hlo.Instruction) -> int:
    if instruction.opcode.endswith("-start"):  # (destination, source, context): the result is the first
        return hlo.nbytes(next(iter(hlo.arrays(instruction.shape)), ""))
    return hlo.nbytes(instruction.shape)


def _takes(node: Node, value) -> bool:
    return node.instruction.opcode in _TAKES and node.reads[:1] == (value,) and value not in node.reads[1:]


def _add(module: hlo.Module, instruction: hlo.Instruction, values, nodes: list[Node]):
    """Append an instruction's nodes; returns its value: a node number, an entry name, or a tuple of such."""
    called = module.computations.get(instruction.calls[0]) if instruction.calls else None
    if instruction.opcode in INLINE and called is not None:
        known: dict = {}
        for inner in called.instructions:
            if inner.opcode == "parameter":
                known[inner.name] = values[_number(module.lines[inner.name])]
            elif inner.opcode in ALIAS:
                known[inner.name] = known[inner.operands[0]]
            elif inner.opcode == "tuple":
                known[inner.name] = tuple(known[o] for o in inner.operands)
            elif inner.opcode == "get-tuple-element" and isinstance(known[inner.operands[0]], tuple):
                known[inner.name] = known[inner.operands[0]][int(inner.attribute("index") or 0)]
            else:
                known[inner.name] = _add(module, inner, [known[o] for o in inner.operands], nodes)
        return known[called.root.name] if called.root else ()
    nodes.append(Node(instruction, tuple(_leaves(tuple(values)))))
    return len(nodes) - 1


def _leaves(value) -> list:
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, tuple) else [value]


def _number(line: str) -> int:
    match = re.search(r"\bparameter\((\d+)\)", line)
    return int(match[1]) if match else 0


def _scopes(nodes: list[Node]) -> tuple[int | None, ...]:
    """The op each node works for; one without metadata works for its reader, else for what it reads."""
    out: list[int | None] = [max(n.instruction.scopes, default=None) for n in nodes]
    for i in range(len(nodes) - 1, -1, -1):
        for value in nodes[i].reads:
            if isinstance(value, int) and out[value] is None:
                out[value] = out[i]
    for i, node in enumerate(nodes):
        if out[i] is None:
            out[i] = next((out[v] for v in node.reads if isinstance(v, int) and out[v] is not None), None)
    return tuple(out)
