"""Which letter a group wears: CAPITALS forward, small letters backward, numbers for the optimizer, in running order.

Groups alike in equal repeated modules (h.0, h.1, ...) share a letter, so six blocks need 13 letters, not 78.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tpu_lab.place import block, numbered, stem
from tpu_lab.trace import OpRecord

if TYPE_CHECKING:
    from tpu_lab.fusions import Group

ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ"  # without I and O, which read as 1 and 0; small l looks like 1, too
SCALARS = 256  # bytes: results up to this size are bookkeeping
SMALL = "abcdefghjkmnpqrstuvwxyz"


def spell(number: int, phase: str) -> str:
    """0 -> "A", 23 -> "Z", 24 -> "AA"; small for backward; 1, 2, ... for the optimizer."""
    if phase == "optimizer":
        return str(number + 1)
    alphabet = SMALL if phase == "backward" else ALPHABET
    out = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, len(alphabet))
        out = alphabet[digit] + out
    return out


def block_of(records: Sequence[OpRecord]) -> str:
    """The repeated module that most ops of a group's latest phase sit in, the later one when two have as many."""
    names = [block(r.module) for r in records if r.module and r.phase == records[-1].phase]
    names = [n for n in names if numbered(n)]
    return max(names, key=lambda n: (names.count(n), names.index(n))) if names else ""


def assign(made: Iterable[Group], records: Mapping[int, OpRecord]) -> list[Group]:
    """The same groups with their letters; what holds no op of the user's has none."""
    known: dict[tuple, str] = {}
    used: dict[str, int] = {}
    seen: dict[tuple, int] = {}
    out = []
    for g in made:
        if not g.ops:
            out.append(g)
            continue
        ops = [records[i] for i in g.ops]
        alike = (g.phase, g.kind, frozenset((r.name, stem(r.module), r.file, r.line, r.phase) for r in ops))
        # q, k and v of one line are three groups. The parameters of an optimizer step are one many times, and so are
        # the scalars that a random number's key is mixed from.
        turn = 0
        if g.phase != "optimizer" and g.bytes_out > SCALARS:
            turn = seen[alike, g.block] = seen.get((alike, g.block), -1) + 1
        if (alike, turn) not in known:
            known[alike, turn] = spell(used.get(g.phase, 0), g.phase)
            used[g.phase] = used.get(g.phase, 0) + 1
        out.append(replace(g, letter=known[alike, turn]))
    return out
