"""Why did it compile again? A new program is compared with the nearest earlier one, in plain words."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class View:
    """What of a program people can compare.

    ops: (name, input avals, static arguments) of each op in order.
    leaves: (the name of the argument that first takes it, aval) of each input.
    """

    kind: str  # "strict" | "fused" | "compiled"
    site: tuple[str, int]  # file and line that made it run
    ops: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    leaves: tuple[tuple[str, str], ...]
    live: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    options: tuple = ()
    mode: str = ""


def explain(new: View, earlier: list[View], site) -> tuple[str, str]:
    """(cause, sentence) of a miss: cause is one of first, shape, dtype, constant, ops, live set, donation, option, mode."""
    same = [v for v in earlier if v.kind == new.kind and _names(v) == _names(new)]
    if not same:
        here = [v for v in earlier if v.kind == new.kind and v.site == new.site and v.kind != "strict"]
        if not here:
            return "first", "first time this graph ran" if new.kind != "strict" else f"first {new.ops[0][0]} of this kind"
        return "ops", _ops(new, here[-1])
    return _differs(new, min(reversed(same), key=lambda v: _distance(new, v)))


def _names(view):
    return tuple(name for name, _, _ in view.ops)


def _distance(a: View, b: View) -> int:
    """How many inputs, op inputs, constants and choices differ; another call site counts a little."""
    count = sum(x != y for x, y in zip(a.leaves, b.leaves, strict=False)) + abs(len(a.leaves) - len(b.leaves))
    count += sum(x[1] != y[1] for x, y in zip(a.ops, b.ops, strict=True))
    count += 2 * sum(x[2] != y[2] for x, y in zip(a.ops, b.ops, strict=True))
    return 4 * count + (a.live != b.live) + (a.donated != b.donated) + (a.options != b.options) + (a.site != b.site)


def _differs(new: View, old: View) -> tuple[str, str]:
    if new.options != old.options:
        return "option", f"options {_options(new)}, were {_options(old)}"
    for (name, now), (_, before) in zip(new.leaves, old.leaves, strict=False):
        if now != before:
            return _aval(name, now, before, hint=new.kind != "strict" or new.site == old.site)
    for (name, now, _), (_, before, _) in zip(new.ops, old.ops, strict=True):
        for a, b in zip(now, before, strict=False):
            if a != b:
                return _aval(f"input of {name}", a, b, hint=new.kind != "strict" or new.site == old.site)
    for (name, _, now), (_, _, before) in zip(new.ops, old.ops, strict=True):
        if now != before:
            a = ", ".join(sorted(set(now) - set(before))) or "no argument"
            b = ", ".join(sorted(set(before) - set(now))) or "not given"
            return "constant", f"{name}: {a}, was {b} (an integer or option is part of the program)"
    if len(new.leaves) != len(old.leaves):
        more = len(new.leaves) - len(old.leaves)
        return "ops", f"{abs(more)} {'more' if more > 0 else 'fewer'} inputs: tensors that were one are now apart"
    if new.live != old.live:
        more = len(set(new.live) - set(old.live))
        fewer = len(set(old.live) - set(new.live))
        return "live set", f"other results are still held: {more} more, {fewer} fewer are kept alive by Python names"
    if new.donated != old.donated:
        return "donation", "other inputs could be overwritten in place: their old values are now held, or no longer"
    return "ops", "the same ops are wired to each other in another way"


def _options(view: View) -> str:
    return ", ".join(f"{name} = {value}" for name, value in view.options) or "none"


def _aval(name: str, now: str, before: str, hint: bool) -> tuple[str, str]:
    """hint: guess the likely cause; not between two unrelated lines."""
    if now.split("[")[0] != before.split("[")[0]:
        return "dtype", f"{name}: {now}, was {before} (dtype changed)"
    a, b = (list(map(int, re.findall(r"\d+", s.split("[")[1].split("]")[0]))) for s in (now, before))
    if a == b:
        return "shape", f"{name}: {now}, was {before} (another view of the memory)"
    if len(a) != len(b):
        return "shape", f"{name}: {now}, was {before} (another number of dimensions)"
    changed = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    guess = ""
    if not hint:
        pass
    elif changed == [0] and a[0] < b[0]:
        guess = " (last batch is smaller): use drop_last=True or pad"
    elif len(changed) == 1 and changed[0] > 0 and a[changed[0]] == b[changed[0]] + 1:
        guess = " (a sequence grows by one): pad to its final length"
    return "shape", f"{name}: {now}, was {before}{guess}"


_MAKES = re.compile(r"aten\.(zeros|zeros_like|full_like|empty_like|clone|new_zeros)\b")  # what state begins with


def _ops(new: View, old: View) -> str:
    now, before = _names(new), _names(old)
    more = len(new.leaves) - len(old.leaves)
    for i, (a, b) in enumerate(zip(now, before, strict=False)):
        if a != b:
            if more > 0 and _MAKES.match(b) and not _MAKES.match(a):
                return f"{more} more inputs: what {b} made the first time (an optimizer's state) now exists, once"
            return f"{len(now)} ops, were {len(before)}: op {i} is {a}, was {b}"
    if len(now) > len(before):
        return f"{len(now)} ops, were {len(before)}: {len(now) - len(before)} more at the end, from {now[len(before)]} on"
    return f"{len(now)} ops, were {len(before)}: it ended {len(before) - len(now)} ops earlier, before {before[len(now)]}"
