"""Why did it compile again? A new program is compared with the nearest earlier one, in plain words.

`Earlier` finds the candidates by the names of their ops and by their call site, so that a miss among thousands of
programs is explained in well under a compile's time. Only text is compared: no program is held alive by its View.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from dataclasses import dataclass

CAUSES = ("first", "shape", "dtype", "constant", "ops", "live set", "donation", "option", "mode", "view")
MOST, WORK = 128, 3000  # programs, and ops and inputs in them, that are looked at to explain one miss
SEEN = 200_000  # ops remembered for the sentence about another mode
HERE = 16  # newest programs of a call site that a graph with other ops is compared with


@dataclass(frozen=True)
class View:
    """What of a program people can compare.

    ops: (name, input avals, static arguments) of each op in order. leaves: (the name of the argument that first takes
    it, aval) of each input. layouts: (argument, how it lies in memory) of each op's inputs, "" for contiguous.
    live: (number, op) of each result that is held. donated: positions in `leaves`. retraced: why Dynamo traced again.
    within: which call of its line an op by itself is, by where.within().
    """

    kind: str  # "strict" | "fused" | "compiled"
    site: tuple[str, int]  # file and line that made it run
    ops: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    leaves: tuple[tuple[str, str], ...]
    live: tuple[tuple[int, str], ...] = ()
    donated: tuple[int, ...] = ()
    options: tuple = ()
    layouts: tuple[tuple[str, str], ...] = ()
    retraced: str = ""
    within: str | None = ""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.ops)


class Earlier:
    """The views of the programs there are: the newest last."""

    def __init__(self, views=()):
        self.by_names: dict[tuple, list[View]] = {}
        self.by_site: dict[tuple, list[View]] = {}
        self.kinds: dict[tuple, str] = {}  # one op of `View.ops` -> the kind of program that had it first
        for view in views:
            self.add(view)

    def add(self, view: View) -> None:
        self.by_names.setdefault((view.kind, view.names), []).append(view)
        if view.kind != "strict":
            self.by_site.setdefault((view.kind, view.site), []).append(view)
        if len(self.kinds) < SEEN:
            for op in view.ops:
                self.kinds.setdefault(op, view.kind)

    def alike(self, view: View) -> list[View]:
        """Programs of this kind with the same ops in the same order; the newest, as many as `WORK` allows."""
        count = min(MOST, max(4, WORK // (len(view.ops) + len(view.leaves) + 1)))
        return self.by_names.get((view.kind, view.names), [])[-count:]

    def here(self, view: View) -> list[View]:
        """Fused or compiled programs that this line ran."""
        return self.by_site.get((view.kind, view.site), [])[-HERE:]

    def elsewhere(self, view: View) -> str:
        """The other kind of program that had all these ops before; "" if there is an op that none had."""
        kinds = Counter(self.kinds.get(op, "") for op in view.ops)
        return "" if "" in kinds or view.kind in kinds or not kinds else kinds.most_common(1)[0][0]


def explain(new: View, earlier: Earlier) -> tuple[str, str]:
    """(cause, sentence) of a miss: cause is one of CAUSES."""
    if new.retraced:
        return _retraced(new.retraced)
    same = earlier.alike(new)
    if same:
        nearest = min(reversed(same), key=lambda v: _distance(new, v))
        return _differs(new, nearest, same)
    here = earlier.here(new)
    if here:
        return "ops", _ops(new, max(reversed(here), key=lambda v: _common(new.names, v.names)))
    other = earlier.elsewhere(new)
    if other:
        return "mode", _other_mode(new, other)
    return "first", "first time this graph ran" if new.kind != "strict" else f"first {new.ops[0][0]} of this kind"


def _common(a, b) -> int:
    """How many names two lists of ops have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _distance(a: View, b: View) -> float:
    """How far inputs, constants and choices are from each other; another call site counts a little.

    Where the graphs' inputs differ, those of the ops follow from them and are not looked at.
    """
    count = abs(len(a.leaves) - len(b.leaves)) + 0.0
    if a.leaves != b.leaves:
        count += _gaps((x[1], y[1]) for x, y in zip(a.leaves, b.leaves, strict=False))
    elif a.ops != b.ops:
        count += _gaps((s, t) for x, y in zip(a.ops, b.ops, strict=True) for s, t in zip(x[1], y[1], strict=False))
    if a.ops != b.ops:
        count += 2 * sum([x[2] != y[2] for x, y in zip(a.ops, b.ops, strict=True)])
    rest = (a.live != b.live) + (a.donated != b.donated) + (a.options != b.options) + (a.layouts != b.layouts)
    return 4 * count + rest + (a.site != b.site)


def _gaps(pairs) -> float:
    """The sum over the first pairs that differ: enough to tell near from far."""
    return sum(itertools.islice((_gap(s, t) for s, t in pairs if s != t), 24))


@functools.lru_cache(maxsize=8192)
def _gap(a: str, b: str) -> float:
    """0 for equal avals, up to 1 for sizes that differ (in more dimensions, by more), more for another dtype or rank."""
    (x, s), (y, t) = _sizes(a), _sizes(b)
    if x != y:
        return 1.2 if s == t else 2.0
    if len(s) != len(t):
        return 1.5
    apart = [abs(m - n) / max(m, n, 1) for m, n in zip(s, t, strict=True) if m != n]
    return (len(apart) + sum(apart) / max(1, len(apart)) / 2) / (len(s) + 1) if apart else 0.0


@functools.lru_cache(maxsize=8192)
def _sizes(aval: str) -> tuple[str, tuple[int, ...]]:
    """"f32[8,4]" -> ("f32", (8, 4))"""
    dtype, _, sizes = aval.partition("[")
    return dtype, tuple(map(int, sizes[:-1].split(","))) if len(sizes) > 1 else ()


def _differs(new: View, old: View, same: list[View]) -> tuple[str, str]:
    if new.options != old.options:
        return "option", _options(dict(new.options), dict(old.options))
    mine = [v for v in same if _same_call(new, v)] if _same_call(new, old) else None  # None: no guess of what lies behind
    for i, ((name, now), (_, before)) in enumerate(zip(new.leaves, old.leaves, strict=False)):
        if now != before:
            past = None if mine is None else {v.leaves[i][1] for v in mine if i < len(v.leaves)}
            return _aval(name, now, before, past, _one_batch(new, old))
    for i, ((name, inputs, static), (_, inputs_before, static_before)) in enumerate(zip(new.ops, old.ops, strict=True)):
        for k, (a, b) in enumerate(zip(inputs, inputs_before, strict=False)):
            if a != b:
                past = None if mine is None else {v.ops[i][1][k] for v in mine if k < len(v.ops[i][1])}
                return _aval(f"input of {name}", a, b, past)
        if static != static_before:
            return _constant(name, static, static_before, None if mine is None else [v.ops[i][2] for v in mine])
    if len(new.leaves) != len(old.leaves):
        more = len(new.leaves) - len(old.leaves)
        n = f"{abs(more)} {'more' if more > 0 else 'fewer'} input{'s' if abs(more) > 1 else ''}"
        return "ops", f"{n}: tensors that were {'one are now apart' if more > 0 else 'apart are now one'}"
    for (name, now), (_, before) in zip(new.layouts, old.layouts, strict=False):
        if now != before:
            return "view", f"{name} is another view: {now or 'contiguous'}, was {before or 'contiguous'}"
    if new.live != old.live:
        return "live set", _live(new.live, old.live)
    if new.donated != old.donated:
        return "donation", _donated(new, old)
    return "ops", "the same ops, but other tensors among them are the same memory"


def _same_call(new: View, old: View) -> bool:
    """Did one call make both? Layers that one line calls are several; so are the ops of a backward pass or an optimizer."""
    return new.site == old.site and new.within == old.within and new.within is not None


def _one_batch(new: View, old: View) -> bool:
    """Did the inputs that changed change in their first size alone, all by the same factor, as a batch does?"""
    pairs = [(_sizes(a), _sizes(b)) for (_, a), (_, b) in zip(new.leaves, old.leaves, strict=False) if a != b]
    if any(x != y or len(s) != len(t) or not s or s[1:] != t[1:] for (x, s), (y, t) in pairs):
        return False
    return all(s[0] * pairs[0][1][1][0] == t[0] * pairs[0][0][1][0] for (_, s), (_, t) in pairs)


def _options(now: dict, before: dict) -> str:
    parts = [
        f"option {name}: {now.get(name, 'not set')}, was {before.get(name, 'not set')}"
        for name in sorted(now.keys() | before.keys())
        if now.get(name, "not set") != before.get(name, "not set")
    ]
    return "; ".join(parts)


def _live(now, before) -> str:
    """Which results are held by a Python name and were not, or the other way round."""
    more, fewer = set(now) - set(before), set(before) - set(now)
    parts = []
    for found, words in ((more, "still held"), (fewer, "no longer held")):
        names = [name for _, name in sorted(found)]
        if names:
            some = ", ".join(dict.fromkeys(names[:3])) + (" and others" if len(names) > 3 else "")
            parts.append(f"{len(names)} result{'s are' if len(names) > 1 else ' is'} {words} ({some})")
    return f"{' and '.join(parts)}: a result that a Python name holds is an output of the program"


def _donated(new: View, old: View) -> str:
    for n in (*sorted(set(old.donated) - set(new.donated)), *sorted(set(new.donated) - set(old.donated))):
        if n < len(new.leaves):
            if n in old.donated:
                return f"{new.leaves[n][0]} is still held, so its memory cannot take a result; before it could"
            return f"{new.leaves[n][0]} is no longer held, so its memory can take a result; before it could not"
    return "the memory of other inputs can take results"


def _other_mode(new: View, other: str) -> str:
    was = {"strict": "op by op", "fused": "in a fused program", "compiled": "in a torch.compile program"}[other]
    if len(new.ops) == 1:
        return f"{new.ops[0][0]} ran {was} before: {_MAKES_OF_IT[new.kind].replace('them', 'it')}"
    return f"the same {len(new.ops)} ops ran {was} before: {_MAKES_OF_IT[new.kind]}"


_MAKES_OF_IT = {
    "strict": "strict mode compiles each op alone",
    "fused": "fused mode makes one program of them",
    "compiled": "torch.compile makes a program of its own",
}


def _aval(name: str, now: str, before: str, past: set[str] | None, batch: bool = True) -> tuple[str, str]:
    """past: avals that this input had, by which the likely cause is guessed; None (two unrelated lines): no guess.
    batch: a smaller first size may be that of a smaller batch."""
    (dtype, a), (dtype_before, b) = _sizes(now), _sizes(before)
    if dtype != dtype_before:
        return "dtype", f"{name}: {now}, was {before} (dtype changed)"
    if len(a) != len(b):
        return "shape", f"{name}: {now}, was {before} (another number of dimensions)"
    return "shape", f"{name}: {now}, was {before}{_guess(a, b, None if past is None else {_sizes(v)[1] for v in past}, batch)}"


def _guess(a: tuple[int, ...], b: tuple[int, ...], past: set[tuple[int, ...]] | None, batch: bool = True) -> str:
    """The likely cause of sizes a where b were, and what helps; past: sizes that there were before. A last batch comes
    after batches of one size."""
    changed = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if past is None or not changed:
        return ""
    if changed == [0] and a[0] < b[0] and batch and past == {b}:
        return " (last batch is smaller): use drop_last=True or pad"
    by_one = all(a[i] == b[i] + 1 for i in changed)
    if by_one and (changed[0] > 0 or tuple(n - 2 * (i in changed) for i, n in enumerate(a)) in past):
        return " (a sequence grows by one): pad to its final length"
    return ""


# Arguments that are the result's sizes: `size=[8, 4]`, `end=50`. They cannot be tensors.
_SIZE = re.compile(r"(size|output_size|end|steps|repeats|pad)=(\d+|\[\d+(?:, \d+)*\])$|(n)=(\d+)$")


def _constant(name: str, now: tuple[str, ...], before: tuple[str, ...], past: list[tuple[str, ...]] | None) -> tuple[str, str]:
    """Another static argument: a shape where it is the size of the result."""
    more, fewer = sorted(set(now) - set(before)), sorted(set(before) - set(now))
    if len(more) == len(fewer) == 1 and (a := _size_of(more[0])) and (b := _size_of(fewer[0])) and a[0] == b[0]:
        if len(a[1]) != len(b[1]):
            return "shape", f"{a[0]} of {name}: {list(a[1])}, was {list(b[1])} (another number of dimensions)"
        seen = None if past is None else {s[1] for texts in past for t in texts if (s := _size_of(t)) and s[0] == a[0]}
        texts = [t.partition("=")[2] for t in (more[0], fewer[0])]
        return "shape", f"{a[0]} of {name}: {texts[0]}, was {texts[1]}{_guess(a[1], b[1], seen)}"
    words = f"{', '.join(more) or 'no argument'}, was {', '.join(fewer) or 'not given'}"
    return "constant", f"{name}: {words} (an integer or option is part of the program)"


def _size_of(text: str) -> tuple[str, tuple[int, ...]] | None:
    """"size=[8, 4]" -> ("size", (8, 4)); None for what is no size."""
    match = _SIZE.match(text)
    if match is None:
        return None
    return match[1] or match[3], tuple(map(int, re.findall(r"\d+", match[2] or match[4])))


_MAKES = re.compile(r"aten\.(zeros|zeros_like|full_like|empty_like|clone|new_zeros)\b")  # what state begins with


def _ops(new: View, old: View) -> str:
    now, before = new.names, old.names
    more, i = len(new.leaves) - len(old.leaves), _common(now, before)
    counts = f"{len(now)} op{'s' * (len(now) != 1)}, were {len(before)}"
    if i < min(len(now), len(before)):
        if more > 0 and _MAKES.match(before[i]) and not _MAKES.match(now[i]):
            return f"{more} more input{'s' * (more > 1)}: what {before[i]} made the first time now exists, once (as an optimizer's state does)"
        return f"{counts}: op {i} is {now[i]}, was {before[i]}"
    if len(now) > len(before):
        return f"{counts}: {len(now) - len(before)} more at the end, from {now[len(before)]} on"
    return f"{counts}: it ended {len(before) - len(now)} ops earlier, before {before[len(now)]}"


_CHECKS = (
    (r"^\d+/\d+: ", ""),
    (r"___check_type_id\((.+?), \d+\), type=<class '(?:builtins\.)?(.+?)'>", r"\1 was of type \2"),
    (r"GLOBAL_STATE changed: ", "changed globally: "),
    (r"^(.+?) == (\S+)$", r"\1 was \2"),
)


def _retraced(reason: str) -> tuple[str, str]:
    """Dynamo's own reason for tracing a function again, on one line, and its cause."""
    text = reason.splitlines()[0].split("  #")[0].strip()
    for pattern, words in _CHECKS:
        text = re.sub(pattern, words, text)
    if "size mismatch" in text or "rank mismatch" in text or ".size()" in text:
        cause = "shape"
    elif "dtype mismatch" in text:
        cause = "dtype"
    elif "stride mismatch" in text or "storage_offset" in text:
        cause = "view"
    elif "changed globally" in text:
        cause = "option"
    else:
        cause = "constant"
    hint = ""
    sizes = re.search(r"size mismatch at index 0\. expected (\d+), actual (\d+)", text)
    if sizes and int(sizes[2]) < int(sizes[1]):
        hint = " (last batch is smaller): use drop_last=True or pad"
    return cause, f"Dynamo traced it again: {text}{hint}"
