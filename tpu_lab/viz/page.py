"""Pieces of a notebook's page: key figures, controls in a row, a curve, pictures, a table, two things side by side.

Each function gives a `Piece`, which shows itself in marimo, Jupyter, VS Code and Colab. Whatever shows itself may be
put inside another: a view, a profile, a control, text made by a notebook. A plain string is text and is escaped;
`markupsafe.Markup` is taken as it is. Ink is the page's own colour and grounds are transparent, so that a piece is
right in light and dark.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from tpu_lab.viz import number

HAIR, ROW = "1px solid rgb(128 128 128/.28)", "1px solid rgb(128 128 128/.14)"
MONO = "ui-monospace,SF Mono,Menlo,Consolas,monospace"
# A line's colour and its dashes: two series are told apart without colour, too.
LINES = (("#0072B2", ""), ("#D55E00", "6 3"), ("#009E73", "2 3"), ("#CC79A7", "8 3 2 3"))


class Piece:
    """A part of a page. html: its markup, with one root element. plain: what a terminal says instead."""

    def __init__(self, html: str, plain: str = "") -> None:
        self.html, self.plain = Markup(html), plain

    def _mime_(self) -> tuple[str, str]:
        return "text/html", str(self.html)

    def _repr_html_(self) -> str:
        return str(self.html)

    def __repr__(self) -> str:
        return self.plain


def as_html(thing: Any) -> Markup:
    """The markup of whatever shows itself as HTML; other things as escaped text."""
    if isinstance(thing, Markup):
        return thing
    if hasattr(thing, "_repr_html_"):  # before _mime_: marimo calls its markdown, made into HTML, text/markdown
        return Markup(thing._repr_html_())
    if hasattr(thing, "_mime_"):
        kind, text = thing._mime_()
        return Markup(text) if kind == "text/html" else escape(text)
    return escape(thing)


def heading(text: str) -> Piece:
    """A finding: the sentence above a picture."""
    style = "font-size:17px;line-height:24px;font-weight:600;text-wrap:balance"
    return Piece(f'<div role="heading" aria-level="3" style="{style}">{escape(text)}</div>', text)


def facts(*pairs: tuple[Any, Any]) -> Piece:
    """Key figures, (figure, caption), in a row between hairlines."""
    cells = "".join(
        f'<div style="flex:1 1 110px"><div style="font-size:19px;line-height:26px;font-weight:600">{escape(figure)}'
        f'</div><div style="font-size:12px;line-height:16px;opacity:.78">{escape(caption)}</div></div>'
        for figure, caption in pairs
    )
    return Piece(
        f'<div style="display:flex;flex-wrap:wrap;gap:16px 24px;padding:14px 0;border-top:{HAIR};border-bottom:{HAIR};'
        f'font-variant-numeric:tabular-nums;max-width:1040px">{cells}</div>',
        "\n".join(f"{figure}  {caption}" for figure, caption in pairs),
    )


def code(text: str) -> Piece:
    """Text as it stands, in a quiet box."""
    return Piece(
        '<pre style="margin:0;padding:12px 16px;border-radius:3px;background:rgb(128 128 128/.10);color:inherit;'
        f"max-width:780px;font:12px/20px {MONO};font-variant-ligatures:none;white-space:pre-wrap;"
        f'overflow-wrap:anywhere">{escape(text)}</pre>',
        text,
    )


def panel(*labelled: tuple[str, Any]) -> Piece:
    """Controls, (name, control), in a row that wraps, each under its name."""
    cells = "".join(
        f'<div style="min-width:150px"><div style="font-size:12px;line-height:20px;opacity:.78">{escape(label)}</div>'
        f"{as_html(control)}</div>"
        for label, control in labelled
    )
    names = ", ".join(label for label, _ in labelled)
    return Piece(f'<div style="display:flex;flex-wrap:wrap;gap:12px 32px">{cells}</div>', f"controls: {names}")


def beside(left: Any, right: Any, widths: tuple[int, int] = (360, 700)) -> Piece:
    """Two things side by side where there is room, else one under the other. widths: pixels each needs at least.

    Of equal widths both grow alike; else the right one takes what room there is.
    """
    small, large = widths
    grow, limit = (1, "") if small == large else (round(large / small) + 1, f";max-width:{max(520, small)}px")
    return Piece(
        '<div style="display:flex;flex-wrap:wrap;gap:24px 40px;align-items:flex-start">'
        f'<div style="flex:1 1 {small}px;min-width:0{limit}">{as_html(left)}</div>'
        f'<div style="flex:{grow} 1 {large}px;min-width:0">{as_html(right)}</div></div>',
        f"{left!r}\n{right!r}",
    )


def stack(*things: Any, gap: int = 20) -> Piece:
    """Things one under the other, `gap` pixels apart; None is left out."""
    shown = [thing for thing in things if thing is not None]
    return Piece(
        f'<div style="display:flex;flex-direction:column;gap:{gap}px">'
        + "".join(f'<div style="min-width:0">{as_html(thing)}</div>' for thing in shown)
        + "</div>",
        "\n".join(repr(thing) for thing in shown),
    )


def table(rows: Sequence[Mapping[str, Any]], caption: str) -> Piece:
    """Rows with the same keys as a table: numbers to the right, words to the left. caption: said to a screen reader."""
    names = list(rows[0]) if rows else []
    right = {name for name in names if all(isinstance(row[name], int | float) or _numeric(row[name]) for row in rows)}

    def cell(tag: str, name: str, value: Any, extra: str = "") -> str:
        side = "right;white-space:nowrap" if name in right else "left"
        shown = number.sig(value) if isinstance(value, float) else value
        scope = ' scope="col"' if tag == "th" else ""
        return f'<{tag}{scope} style="padding:4px 24px 4px 0;border:0;background:none;text-align:{side};{extra}">{as_html(shown)}</{tag}>'

    plain = 'style="background:none"'  # Jupyter, VS Code and Colab stripe rows and colour the head
    head = "".join(cell("th", n, n, f"font-weight:400;font-size:12px;opacity:.78;border-bottom:{HAIR}") for n in names)
    body = "".join(
        f"<tr {plain}>" + "".join(cell("td", name, row[name], f"border-bottom:{ROW}") for name in names) + "</tr>"
        for row in rows
    )
    hidden = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"
    return Piece(
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;border:0;margin:0;width:auto;background:none;'
        'color:inherit;font-size:12.5px;line-height:20px;font-variant-numeric:tabular-nums">'
        f'<caption style="{hidden}">{escape(caption)}</caption><thead {plain}><tr {plain}>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div>",
        "\n".join("  ".join(str(row[name]) for name in names) for row in rows),
    )


def _numeric(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip("+\u2212-\u2265~ ")[:1].isdigit()


def pictures(captioned: Sequence[tuple[Any, str]], width: int = 84, smooth: bool = False) -> Piece:
    """Images in a row that wraps, each over its caption: (array, caption), `width` pixels wide on the page.

    array: anything numpy takes, [h,w], [1,h,w], [3,h,w] or [h,w,3]; uint8, or numbers from 0 (black) to 1 (white).
    smooth: False shows each pixel as a square.
    """
    look = "auto" if smooth else "pixelated"
    cells = "".join(
        f'<figure style="margin:0;width:{width}px"><img alt="{escape(caption)}" src="{png(image)}" '
        f'style="display:block;width:{width}px;height:auto;margin:0;border-radius:2px;image-rendering:{look}">'
        f'<figcaption style="font-size:12px;line-height:16px;padding-top:4px;opacity:.78">{escape(caption)}</figcaption>'
        "</figure>"
        for image, caption in captioned
    )
    words = ", ".join(caption for _, caption in captioned)
    return Piece(f'<div style="display:flex;flex-wrap:wrap;gap:12px">{cells}</div>', f"pictures: {words}")


def png(image: Any) -> str:
    """A picture as a `data:` URI, lossless: see `pictures` for what may be given."""
    pixels = np.asarray(image)
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3):
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] != 3):
        raise ValueError(f"a picture is [h,w], [1,h,w], [3,h,w] or [h,w,3], not {list(np.shape(image))}")
    if pixels.dtype != np.uint8:
        pixels = np.rint(np.clip(pixels.astype(np.float64), 0, 1) * 255).astype(np.uint8)
    height, width = pixels.shape[:2]
    # PNG (Second edition, sections 9 and 11): each line starts with its filter, 0; colour type 0 is grey, 2 is RGB.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode("ascii")


def curve(
    values: Sequence[float] | Mapping[str, Sequence[float]],
    finding: str,
    x: str = "step",
    y: str = "",
    levels: Sequence[tuple[float, str]] = (),
    at: Sequence[float] | None = None,
    ticks: Sequence[float] | None = None,
) -> Piece:
    """Values over steps as a line, or several with their names, under the sentence that says what they show.

    x, y: what the axes count. levels: (value, words), dashed lines to compare with. at: where on the x axis each value
    stands; counted from 1 when left out. ticks: the numbers written on the x axis; round ones when left out. A value that
    is not finite is left out.
    """
    series = dict(values) if isinstance(values, Mapping) else {"": values}
    if not any(len(line) for line in series.values()):
        raise ValueError("a curve needs at least one value")
    points = {
        name: [(float(px), float(py)) for px, py in zip(at or range(1, len(line) + 1), line) if math.isfinite(py)]
        for name, line in series.items()
    }
    xs = [px for line in points.values() for px, _ in line] or [0.0]
    ys = [py for line in points.values() for _, py in line] + [float(level) for level, _ in levels]
    x_ticks, y_ticks = list(ticks or _ticks(min(xs), max(xs))), _ticks(min(ys or [0.0]), max(ys or [1.0]))
    words = [str(words) for _, words in levels] + [name for name in points if name]
    width, height, left, top = 520, 300, 46, 30 if y else 10
    right = width - (14 + 6.4 * max(map(len, words)) if words else 14)
    bottom = height - 40
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)
    start, end = min(xs), max(xs)

    def px(value: float) -> float:
        return left + (right - left) * ((value - start) / (end - start) if end > start else 0.5)

    def py(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    faint = 'stroke="currentColor" stroke-opacity=".45"'
    out = [f'<path d="M{left} {top}V{bottom}H{right:.1f}" fill="none" {faint}/>']
    for tick in y_ticks:
        out.append(f'<text x="{left - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{_short(tick, y_ticks)}</text>')
    for tick in (tick for tick in x_ticks if start <= tick <= end):
        out.append(f'<text x="{px(tick):.1f}" y="{bottom + 17}" text-anchor="middle">{_short(tick, x_ticks)}</text>')
    out.append(f'<text x="{(left + right) / 2:.1f}" y="{bottom + 35}" text-anchor="middle">{escape(x)}</text>')
    if y:
        out.append(f'<text x="{left - 38}" y="14">{escape(y)}</text>')
    labels = [(py(level), str(words)) for level, words in levels]
    for level, _ in levels:
        d = f"M{left} {py(level):.1f}H{right:.1f}"
        out.append(f'<path d="{d}" fill="none" {faint} stroke-dasharray="4 3"/>')
    for (name, line), (colour, dash) in zip(points.items(), LINES * (len(points) // len(LINES) + 1)):
        if not line:
            continue
        d = "M" + "L".join(f"{px(a):.1f} {py(b):.1f}" for a, b in line)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        out.append(
            f'<path d="{d}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"{dashes}/>'
            f'<circle cx="{px(line[-1][0]):.1f}" cy="{py(line[-1][1]):.1f}" r="3.2" fill="{colour}"/>'
        )
        if name:
            labels.append((py(line[-1][1]), name))
    for place, name in _apart(labels, top, bottom):
        out.append(f'<text x="{right + 8:.1f}" y="{place + 4:.1f}">{escape(name)}</text>')
    svg = (
        f'<svg role="img" aria-label="{escape(finding)}" viewBox="0 0 {width} {height}" fill="currentColor" '
        'style="display:block;width:100%;max-width:520px;height:auto;font:12px system-ui,sans-serif;'
        f'font-variant-numeric:tabular-nums"><title>{escape(finding)}</title>{"".join(out)}</svg>'
    )
    return Piece(f'<div>{heading(finding).html}<div style="height:12px"></div>{svg}</div>', finding)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from at or below `low` to at or above `high`."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * 0.999)
    return [step * i for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def _short(tick: float, ticks: Sequence[float]) -> str:
    """A tick's number with as many decimals as the step between two needs."""
    decimals = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9)) if len(ticks) > 1 else 0
    return f"{tick:,.{decimals}f}".replace("-", "\u2212")


def _apart(labels: list[tuple[float, str]], top: float, bottom: float, least: float = 15) -> list[tuple[float, str]]:
    """The labels' heights, moved so that no two are closer than `least` and none leaves the plot."""
    placed: list[tuple[float, str]] = []
    for place, name in sorted(labels):
        placed.append((max(place, placed[-1][0] + least) if placed else max(place, top), name))
    limit = bottom
    for i in reversed(range(len(placed))):
        placed[i] = (min(placed[i][0], limit), placed[i][1])
        limit = placed[i][0] - least
    return placed
