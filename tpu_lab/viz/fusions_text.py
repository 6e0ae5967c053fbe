"""The fusions view for a terminal: the lettered source, then the groups; at most 100 columns."""

from __future__ import annotations

import textwrap

from tpu_lab.viz import frame, number

WIDE = 98
_STYLE = {"matmul": "matmul", "move": "move", "other": "other"}


def text(v) -> list:
    """Lines of (text, style) pieces from the view's Model."""
    out: list = [[(v.title, "b")], *frame.meta_lines(v.meta), []]
    if v.hint:
        return [*out, *([part] for part in textwrap.wrap(v.hint, WIDE))]
    for listing in v.listings:
        out += _listing(v, listing)
    for table in v.tables:
        out += _table(table)
    return [*out, *([(part, "dim")] for part in textwrap.wrap(v.foot, WIDE))]


def _listing(v, listing) -> list:
    left = f"{'':>6} {'fwd':<6}{'bwd':<6}"
    names = f"   {' ' * 58}{'fwd':<6}{'bwd':<6}" if len(v.compilers) > 1 else ""
    out: list = []
    if len(v.compilers) > 1:
        out.append([(f"{'':>7}{v.compilers[0]:<12}{'':<61}{v.compilers[1]}"[:100], "dim")])
    out.append([(f"{left}{listing.file}{names[3 + len(listing.file) :]}", "dim")])
    wide = 58 if len(v.compilers) > 1 else 78
    held: dict[tuple[int, int], tuple] = {}
    for at, line in enumerate(listing.lines):
        if line.gap:
            out.append([("     \u00b7", "dim")])
        cells: list = []
        for side, (first, second) in enumerate(line.lanes):
            for lane, band in enumerate((first, second)):
                if band:
                    held[side, lane] = (band, at + band.lines)
            cells.append(_cell([held.get((side, lane)) for lane in range(2)], line.lanes[side], at))
        code = line.code if len(line.code) <= wide else line.code[: wide - 1] + "\u2026"
        pieces = [(f"{line.number:>6} ", "dim"), *cells[0], *cells[1], code]
        if len(cells) > 2:
            pieces += [" " * (wide - len(code) + 1), *cells[2], *cells[3]]
        out.append(pieces)
    if listing.left:
        out.append([(f"       {number.plural(listing.left, 'more line')}", "dim")])
    return [*out, []]


def _cell(held, own, at: int) -> list:
    """Six columns: each lane's letter on its first line, `|` where its band goes on."""
    pieces: list = []
    width = 0
    for entry, band in zip(held, own):
        if band:
            word, style = band.letter, _STYLE.get(band.paint, "dim")
        elif entry and at < entry[1]:
            word, style = "|", _STYLE.get(entry[0].paint, "dim")
        else:
            continue
        pieces.append((f"{word} "[:4], style))
        width += len(pieces[-1][0])
    return [*pieces, (" " * max(0, 6 - width), "")]


def _table(table) -> list:
    out: list = [[(f"{table.label}, {table.note}", "b")]]
    out.append([(f"{'':>5}{'group, and why it ended':<68}{'ops':>6}{'saved':>9}{table.head:>9}", "dim")])
    for row in table.shown:
        times = f" \u00d7{row.times}" if row.times > 1 else ""
        name = f"{row.words}{times}"
        name = name if len(name) <= 67 else name[:66] + "\u2026"
        out.append([
            (f"{row.letter:>4} ", _STYLE.get(row.paint, "dim")),
            f"{name:<68}{number.count(row.ops):>6}{row.saved:>9}{row.time:>9}",
        ])  # fmt: skip
        out.append([(f"     {row.why}", "dim")])
    if table.more:
        out.append([(f"     {table.more}: p.fusions.rows", "dim")])
    return [*out, []]
