"""Source lines between gutters: which group each line's ops went to, by letter and band.

A compiler has two gutters, forward and backward, of two lanes each. On a line at most two marks show: when more
groups meet there, the second says how many, with their names in its hover.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpu_lab.costs import BALANCE
from tpu_lab.fusions import Group
from tpu_lab.place import numbered, place, short_file
from tpu_lab.trace import OpRecord
from tpu_lab.viz import number, theme

WAYS = ("forward", "backward")
MOST = 90  # lines of one file


@dataclass(frozen=True)
class Band:
    """A group over `lines` lines from where it stands."""

    letter: str
    paint: str
    lines: int
    tip: str
    more: bool = False  # it stands for several groups


@dataclass(frozen=True)
class Line:
    number: int
    code: str  # as written, common indentation taken away
    keyword: str  # a leading `def`, `class`, `return`: printed bold
    place: str
    lanes: tuple[tuple[Band | None, Band | None], ...]  # by gutter: compiler, then way
    costs: tuple[tuple[float, float], ...]  # by compiler: ns (forward and optimizer, backward)
    gap: bool = False  # lines were left out before it


@dataclass(frozen=True)
class Listing:
    """One file's lines."""

    file: str
    groups: int
    lines: tuple[Line, ...]
    left: int = 0  # lines that did not fit


@dataclass
class _Marks:
    """What stands on one line in one gutter: letter -> (group, ns of that line's ops)."""

    found: dict[str, list] = field(default_factory=dict)

    def add(self, g: Group, ns: float) -> None:
        entry = self.found.setdefault(g.letter, [g, 0.0])
        entry[1] += ns

    def ranked(self) -> list[Group]:
        """Matmuls first, then by time."""
        return [g for g, _ in sorted(self.found.values(), key=lambda e: (e[0].kind != "matmul", -e[1]))]


def listings(sides: Sequence[Sequence[Group]], records: Mapping[int, OpRecord], first: str = "") -> list[Listing]:
    """The source between the gutters of each side's compiler, the file with most groups first.

    Of repeated modules the gutters show the first alone (`first`: "h.0"); the costs are those of all.
    """
    marks: dict[tuple[str, int], list[_Marks]] = {}
    costs: dict[tuple[str, int], list[list[float]]] = {}
    held: dict[str, set] = {}
    for side, groups in enumerate(sides):
        for g in groups:
            for (file, line, back), ns in _spread(g, records).items():
                spot = (file, line)
                ways = marks.setdefault(spot, [_Marks() for _ in range(2 * len(sides))])
                cost = costs.setdefault(spot, [[0.0, 0.0] for _ in sides])
                cost[side][back] += ns
                held.setdefault(file, set()).add((side, g.letter))
                if g.block == first or not first or not _alike(g.block, first):
                    ways[2 * side + back].add(g, ns)
    out = []
    for file, letters in sorted(held.items(), key=lambda item: (-len(item[1]), item[0])):
        numbers = sorted(line for f, line in marks if f == file)
        source = _shown(file, numbers, records)
        kept = source[:MOST]
        lines: list[Line] = []
        before = 0
        indent = min((len(c) - len(c.lstrip()) for _, c in kept if c.strip()), default=0)
        for at, code in kept:
            words = code[indent:].rstrip("\n")
            lines.append(Line(
                at, words, _keyword(words), place(file, at), (), tuple((a, b) for a, b in costs.get((file, at), [[0.0, 0.0] for _ in sides])),
                0 < before < at - 1,
            ))  # fmt: skip
            before = at
        gutters = [_lanes(file, lines, marks, column) for column in range(2 * len(sides))]
        lines = [replace(line, lanes=tuple(g[i] for g in gutters)) for i, line in enumerate(lines)]
        out.append(Listing(short_file(file), len(letters), tuple(lines), len(source) - len(kept)))
    return out


def _alike(block: str, first: str) -> bool:
    return numbered(block) and block.rpartition(".")[0] == first.rpartition(".")[0]


def _spread(g: Group, records: Mapping[int, OpRecord]) -> dict[tuple[str, int, bool], float]:
    """A group's time over (file, line, whether on the way back) of its ops, by max(FLOPs, BALANCE x bytes) of each.

    A backward group computes forward ops again on the way back, too. One that ends in the optimizer step can begin in
    the backward pass: these ops stand there.
    """
    ops = [records[i] for i in g.ops if i in records and records[i].file]
    weight = [0.0 if r.kind == "view" else max(r.flops, BALANCE * r.bytes, 1.0) for r in ops]
    total = sum(weight) or 1.0
    out: dict[tuple[str, int, bool], float] = {}
    for r, w in zip(ops, weight):
        if w or len(ops) == 1:
            back = g.phase == "backward" or (g.phase == "optimizer" and r.phase != "optimizer")
            at = (r.file, r.line, back)
            out[at] = out.get(at, 0.0) + (g.ns or 0.0) * w / total
    return out


def _shown(file: str, numbers: list[int], records) -> list[tuple[int, str]]:
    """(line number, text) of the functions that hold these lines, with their class's head; the lines alone without source."""
    source = linecache.getlines(file)
    try:
        tree = ast.parse("".join(source)) if source else None
    except (SyntaxError, ValueError):
        tree = None
    if tree is None or numbers[-1] > len(source):
        code = {r.line: r.code for r in records.values() if r.file == file}
        return [(n, code.get(n, "")) for n in numbers]
    keep: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = [n for n in numbers if node.lineno < n <= (node.end_lineno or n)]
            if inside and not isinstance(node, ast.ClassDef):
                own = [n for n in inside if not _deeper(node, n)]
                if own:
                    keep |= {node.lineno, *_joined([node.lineno, *own], source)}
            elif inside:
                keep.add(node.lineno)
    keep |= set(numbers) | set(_joined([n for n in numbers if n not in keep], source))
    return [(n, source[n - 1]) for n in sorted(keep)]


def _deeper(node, line: int) -> bool:
    """Whether a function inside this one holds the line."""
    return any(
        isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))
        and inner is not node
        and inner.lineno <= line <= (inner.end_lineno or line)
        for inner in ast.walk(node)
    )


def _joined(numbers: list[int], source: list[str], near: int = 7) -> list[int]:
    """The lines, and what lies between two that are near each other; a long docstring between them is left out."""
    out: list[int] = []
    for n in sorted(numbers):
        if out and n - out[-1] <= near:
            out += range(out[-1] + 1, n)
        out.append(n)
    return out


def _keyword(code: str) -> str:
    head = code.lstrip().split(" ", 1)[0]
    return head if head in ("class", "def", "return", "for", "if", "with", "while", "else:") else ""


def _lanes(file: str, lines: Sequence[Line], marks, column: int) -> list[tuple[Band | None, Band | None]]:
    """The bands of one gutter, by line; a band stands on its first line and covers those after it."""
    pairs: list[list] = []
    for line in lines:
        here = marks.get((file, line.number))
        ranked = here[column].ranked() if here else []
        above = pairs[-1] if pairs and not line.gap else [None, None]
        pairs.append(_pair(ranked, above))
    out: list[list] = [[None, None] for _ in lines]
    for lane in range(2):
        i = 0
        while i < len(lines):
            mark, n = pairs[i][lane], 1
            if isinstance(mark, Group):
                while i + n < len(lines) and not lines[i + n].gap and _same(pairs[i + n][lane], mark):
                    n += 1
                out[i][lane] = Band(mark.letter, theme.paint(mark.kind), n, tip(mark))
            elif mark:
                tips = "\n".join(tip(g) for g in mark)
                out[i][lane] = Band(f"+{len(mark)}" if len(mark) < 100 else "+", "", 1, tips, True)
            i += n
    return [(a, b) for a, b in out]


def _same(a, b) -> bool:
    return isinstance(a, Group) and isinstance(b, Group) and a.letter == b.letter


def _pair(ranked: list[Group], above: list) -> list:
    """What the two lanes of a line show: a matmul takes lane 1, what is not takes lane 2 when both meet."""
    if not ranked:
        return [None, None]
    if len(ranked) > 2:
        return [ranked[0], ranked[1:]]
    if len(ranked) == 2:
        first, second = ranked
        if first.kind == second.kind and (_same(above[0], second) or _same(above[1], first)):
            first, second = second, first
        return [first, second]
    return [None, ranked[0]] if _same(above[1], ranked[0]) else [ranked[0], None]


def tip(g: Group) -> str:
    """`E: div, masked_fill, softmax, 0.36 ms, saved 5.00 MiB · h.0`."""
    time = f", {number.time(g.ns)}" if g.ns else ""
    saved = f", saved {number.size(g.saved)}" if g.saved > 0 else ""
    where = f" \u00b7 {g.block}" if g.block else ""
    return f"{g.letter}: {g.words}{time}{saved}{where}"
