"""One group on three rungs: the ATen calls, the StableHLO they were lowered to, the optimised HLO that ran."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_lab import hlo
from tpu_lab.fusions import Group
from tpu_lab.place import place
from tpu_lab.trace import LaunchRecord, OpRecord

_LOC = re.compile(r'^#(loc\d*) = loc\("([^"]*)"')
_USES = re.compile(r"^\s*(\S.*?) loc\(#(loc\d*)\)$")
_SCOPE = re.compile(r"(?:^|/)(\d+):")
_NOISE = re.compile(r", (?:metadata|backend_config|frontend_attributes|sharding)=.*$")


@dataclass(frozen=True)
class Ladder:
    """Lines of each rung; what passes `most` lines is left out and counted."""

    aten: tuple[str, ...]
    stablehlo: tuple[str, ...]
    hlo: tuple[str, ...]


def stablehlo_lines(text: str) -> dict[int, list[str]]:
    """Lines of a StableHLO text with locations, by the position of the op whose scope its location carries."""
    scopes = {}
    for line in text.splitlines():
        if line.startswith("#loc") and (match := _LOC.match(line)):
            scopes[match[1]] = [int(i) for i in _SCOPE.findall(match[2])]
    out: dict[int, list[str]] = {}
    for line in text.splitlines():
        if match := _USES.match(line):
            for scope in scopes.get(match[2], ()):
                out.setdefault(scope, []).append(match[1])
    return out


def ladder(
    group: Group,
    launch: LaunchRecord,
    records: Mapping[int, OpRecord],
    module: hlo.Module,
    lowered: Mapping[int, Sequence[str]],
    most: int = 12,
) -> Ladder:
    """The three rungs of a group. `lowered` is what `stablehlo_lines` gave for its program; may be empty."""
    aten = []
    for r in (records[i] for i in group.ops if i in records):
        where = place(r.file, r.line)
        call = f"{r.name}({', '.join((*r.inputs, *r.static))})"
        aten.append(f"%{r.index} = {call} -> {', '.join(r.outputs)}{'  # ' + where if where else ''}")
    holds = set(group.ops)
    middle = [line for at, index in enumerate(launch.ops) if index in holds for line in lowered.get(at, ())]
    instruction = module.entry.by_name[group.name]
    own = [module.lines[instruction.name], *(module.lines[i.name] for i in module.inside(instruction))]
    low = [_NOISE.sub("", line) for line in own if " parameter(" not in line]
    return Ladder(_cut(aten, most), _cut(middle, most), _cut(low, most))


def _cut(lines: Sequence[str], most: int) -> tuple[str, ...]:
    left = len(lines) - most
    return tuple(lines) if left <= 1 else (*lines[:most], f"\u2026 {left} more lines")
