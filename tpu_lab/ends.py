"""Why a group ended where it did: one sentence from a closed list, read off the compiled graph.

We do not see inside XLA's heuristics. So only what the graph shows is given as a reason (who reads the value, and
how); what it does not show is said to be the compiler's choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tpu_lab import hlo, parts
from tpu_lab.place import place
from tpu_lab.trace import REASONS, LaunchRecord

if TYPE_CHECKING:
    from tpu_lab.fusions import Group

# key -> the sentence; {by} is the group or groups that read the value
ENDS = {
    "copy": "the compiler keeps a value in a second place",
    "collective": "it waits for the other devices",
    "result": "a result of the program{flush}",
    "result and read": "a result of the program, and {read}",
    "own kernel": "a matmul is its own kernel here",
    "own library": "a custom kernel of the compiler\u2019s: it joins no loop",
    "several": "{read}",
    "reader is a matmul": "{by} it, and is a matmul",
    "reader is a library": "{by} it, and is a custom kernel",
    "random": "random bits are drawn in one go: {by} them",
    "reduction": "a reduction: {by} its result only when it is complete",
    "reader stands alone": "{by} it, and is a {opcode}: never fused here",
    "read many times": "{by} each value many times: joined, it would be computed each time",
    "moves data": "{by} it in the order that this one writes",
    "not shown": "{by} it; the graph shows no reason: the compiler\u2019s choice",
    "unread": "nothing reads its value",
}


def explained(
    module: hlo.Module, made: Sequence[Group], bodies: Mapping[str, parts.Body], launch: LaunchRecord
) -> list[Group]:
    """The groups of one program, each with `end` and `why`."""
    by_name = {g.name: g for g in made}  # in running order
    copies = {g.name for g in made if _added(g)}
    custom = {i.name for i in module.entry.instructions if i.attribute("kind") == "kCustom"}
    out = []
    for g in made:
        readers, result = _readers(module, g.name, copies)
        end, why = _end(g, readers, result, by_name, bodies, launch, custom)
        out.append(replace(g, end=end, why=why))
    return out


def _end(g: Group, readers, result: bool, by_name, bodies, launch, custom: set[str]) -> tuple[str, str]:
    reading = [by_name[name] for name in readers if name in by_name]
    words = {"by": f"{_names(reading)} reads", "read": _read(g, reading), "flush": _flush(launch), "opcode": ""}
    key = _key(g, readers, reading, result, bodies, custom)
    if reading:
        words["opcode"] = {"while": "loop"}.get(reading[0].opcode, reading[0].opcode.replace("-", " "))
    return key, ENDS[key].format(**words)


def _key(g: Group, readers: dict[str, set[str]], reading: list[Group], result: bool, bodies, custom) -> str:
    if _added(g):
        return "copy"
    if g.kind == "collective":
        return "collective"
    if result:
        return "result and read" if reading else "result"
    if g.kind == "matmul" and "TPU" not in g.compiler:
        return "own kernel"
    if not reading:
        return "unread"
    if g.name in custom:
        return "own library"
    if g.kind == "random":
        return "random"
    if len(reading) > 1:
        return "several"
    reader = reading[0]
    if reader.kind == "matmul":
        return "reader is a matmul"
    if reader.name in custom:
        return "reader is a library"
    if reader.opcode not in parts.INLINE:
        return "reader stands alone"
    if g.kind == "reduce":
        return "reduction"
    if _repeats(bodies[reader.name], readers[reader.name]):
        return "read many times"
    return "moves data" if g.kind == "movement" else "not shown"


def _added(g: Group) -> bool:
    """A copy of the compiler's own: its readers read what was copied."""
    return not g.ops and g.kind == "movement"


def _readers(module: hlo.Module, name: str, copies: set[str]) -> tuple[dict[str, set[str]], bool]:
    """(for each instruction that reads a value: the names by which it does, whether the program gives it back)."""
    users, root = module.entry.users, module.entry.root
    out: dict[str, set[str]] = {}
    result, left, seen = root is not None and root.name == name, [name], {name}
    while left:
        value = left.pop(0)
        for user in users.get(value, ()):
            if user.opcode == "tuple" and user.root:
                result = True
            elif user.opcode in parts.FREE or user.name in copies:
                result = result or user.root
                if user.name not in seen:
                    seen.add(user.name)
                    left.append(user.name)
            else:
                out.setdefault(user.name, set()).add(value)
    return out, result


def _repeats(body: parts.Body, values: set[str]) -> bool:
    """Whether a reader spreads one of these values over more elements than it has."""
    return any(n.instruction.opcode == "broadcast" and values & set(n.reads) for n in body.nodes)


def _read(g: Group, reading: Sequence[Group]) -> str:
    """`read by E and F`; what a forward group keeps for later is said to be so: `read by E, and by a on the way back`."""
    later = [r for r in reading if g.phase == "forward" and r.phase == "backward"]
    now = [r for r in reading if r not in later]
    pieces = [f"by {_names(now)}"] if now else []
    if later:
        pieces.append(f"by {_names(later)} on the way back")
    return "read " + ", and ".join(pieces)


def _names(reading: Sequence[Group]) -> str:
    """`E`, `E and F`, `E, F and 3 more`."""
    names = list(dict.fromkeys(g.letter or g.name for g in reading))
    if not names:
        return "nothing"
    shown = names if len(names) < 4 else [*names[:2], f"{len(names) - 2} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _flush(launch: LaunchRecord) -> str:
    """The reason why the program ended here, with the line that forced it."""
    reason = REASONS.get(launch.reason, launch.reason)
    where = place(launch.file, launch.line)
    return f", which ends here: {reason}{', ' + where if where else ''}" if reason else ""
