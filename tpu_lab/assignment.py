"""XLA's buffer assignment, read from its text: which value lies in which allocation, in which memory, and when it lives.

The file is `*.after_optimizations-buffer-assignment.txt` of `--xla_dump_to`. Colours are memory spaces: 0 is HBM, 1
VMEM; the others (scalars, semaphores) are a few KiB. A program's temporaries share one allocation a space, laid out by
offset, so what lies there at one moment is a question of lifetimes: the entry computation is scheduled, hence a value
lives from its instruction to the last one that reads it, or an alias of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_lab import hlo

HBM, VMEM = 0, 1
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*):$")
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_ALIASES = frozenset(
    "bitcast get-tuple-element tuple copy-done async-done async-update optimization-barrier all-gather-done "
    "all-reduce-done collective-permute-done".split()
)


@dataclass(frozen=True, slots=True)
class Value:
    """One result of one instruction, as it lies in its allocation. Sizes in bytes as held, padding included."""

    name: str  # of the instruction
    index: tuple[int, ...]  # which of its results, () if it is one array
    size: int
    offset: int
    shape: str  # with layout: "f32[8,64]{1,0:T(8,128)}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of memory that XLA reserves for a whole run of the program."""

    number: int
    size: int  # bytes
    space: int  # HBM, VMEM, or another
    kind: str  # "argument" | "result" | "temporary" | "constant" | "scratch" (inside one instruction)
    parameter: int | None  # of the entry computation
    values: list[Value]


def parse(text: str) -> tuple[Allocation, ...]:
    """The allocations. ValueError when the text is none of a buffer assignment."""
    out: list[Allocation] = []
    values: list[Value] = []
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            values = []
            about = match[3]
            colour = re.search(r", color (\d+)", about)
            parameter = re.search(r", parameter (\d+)", about)
            kind = "argument" if parameter else "temporary" if "preallocated-temp" in about else "constant"
            if not parameter and "maybe-live-out" in about:
                kind = "result"
            elif "thread-local" in about:
                kind = "scratch"
            number = int(parameter[1]) if parameter else None
            out.append(Allocation(int(match[1]), int(match[2]), int(colour[1]) if colour else 0, kind, number, values))
        elif match := _VALUE.match(line):
            index = tuple(int(i) for i in match[2].split(",") if i) if match[2] else ()
            values.append(Value(match[1], index, int(match[3]), int(match[4]), match[5]))
    if not out:
        raise ValueError("this is not the text of a buffer assignment: it lists no allocation")
    return tuple(out)


def total(allocations, space: int) -> int:
    """Bytes that the program needs in a memory space. What is reserved inside one instruction is part of no total."""
    return sum(a.size for a in allocations if a.space == space and a.kind != "scratch")


def lifetimes(module: hlo.Module) -> dict[str, tuple[int, dict[int, int], int]]:
    """For each entry instruction: (its position, last position at which each of its results is read, the last of all)."""
    entry = module.entry
    at = {i.name: n for n, i in enumerate(entry.instructions)}
    last: dict[str, int] = {}
    parts: dict[str, dict[int, int]] = {}
    for position in range(len(entry.instructions) - 1, -1, -1):
        instruction = entry.instructions[position]
        ends = len(at) if instruction.root else position
        by_result: dict[int, int] = {}
        for user in entry.users[instruction.name]:
            until = last[user.name] if user.opcode in _ALIASES else at[user.name]
            ends = max(ends, until)
            if user.opcode == "get-tuple-element" and (index := user.attribute("index")).isdigit():
                by_result[int(index)] = max(by_result.get(int(index), position), until)
        last[instruction.name] = ends
        parts[instruction.name] = by_result
    return {name: (at[name], parts[name], last[name]) for name in at}


def fullest(allocation: Allocation, lives) -> tuple[int, tuple[Value, ...]]:
    """(position, values) of the moment at which most of a shared allocation is in use."""
    spans = [(*_span(v, lives), v) for v in allocation.values if v.name in lives]
    if not spans:
        return 0, ()
    change: dict[int, int] = {}
    for start, end, value in spans:
        change[start] = change.get(start, 0) + value.size
        change[end + 1] = change.get(end + 1, 0) - value.size
    position, held, most = 0, 0, -1
    for moment in sorted(change):
        held += change[moment]
        if held > most:
            most, position = held, moment
    alive = sorted((v for start, end, v in spans if start <= position <= end), key=lambda v: (v.offset, -v.size))
    kept: list[Value] = []
    top = -1
    for value in alive:  # in-place results share their operand's place
        if value.offset >= top:
            kept.append(value)
            top = value.offset + value.size
    return position, tuple(kept)


def _span(value: Value, lives) -> tuple[int, int]:
    start, by_result, last = lives[value.name]
    return start, by_result.get(value.index[0], last) if value.index and by_result else last
