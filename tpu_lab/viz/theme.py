"""What a kind of work looks like, on a page and in a terminal; the page's one environment for templates."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from tpu_lab.viz import number

# kind of a record -> (paint on a page, word)
PAINT = {
    "matmul": ("matmul", "matmul"),
    "elementwise": ("other", "elementwise"),
    "reduce": ("other", "reduction"),
    "random": ("other", "random numbers"),
    "movement": ("move", "data movement"),
    "host": ("move", "on the host"),
    "view": ("free", "view, free"),
}
GLYPH = {"hit": "\u2713", "miss": "\u2717", "disk": "D", "none": ""}
WORD = {"hit": "hit", "miss": "miss, compiled", "disk": "disk hit, read back", "none": "did not run"}

_ANSI = {  # 256 colours, the nearest to the page's
    "b": "1",
    "dim": "2",
    "matmul": "38;5;25",
    "other": "38;5;74",
    "move": "38;5;178",
    "hit": "38;5;36",
    "disk": "38;5;36",
    "miss": "38;5;166",
    "host": "38;5;245",
}
_ASCII = str.maketrans(
    {"\u2588": "#", "\u2593": "=", "\u2713": "v", "\u2717": "x", "\u2192": ">", "\u2013": "-", "\u2212": "-", "\u00d7": "x",
     "\u00b1": "~", "\u00b5": "u", "\u00b7": "|", "\u2019": "'", "\u2026": "...", "\u00a0": " ", "\u2500": "-", "\u2265": ">=", "\u25cb": "o"}
)  # fmt: skip


def paint(kind: str) -> str:
    """The CSS class of a kind of op."""
    return PAINT.get(kind, PAINT["elementwise"])[0]


def word(kind: str) -> str:
    return PAINT.get(kind, PAINT["elementwise"])[1]


def colours_wanted(stream=None) -> bool:
    """Only on a terminal, and not when NO_COLOR is set (https://no-color.org says: to anything but "")."""
    stream = sys.stdout if stream is None else stream
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def render(lines, colour: bool = False, ascii: bool = False, width: int = 100) -> str:
    """Lines of text from lines of (text, style) pieces; what passes `width` columns is cut with `…`.

    Text of the user can hold control characters: they are taken out, so that no name moves the cursor.
    """
    out = []
    for line in lines:
        left, pieces = width, []
        for piece in line:
            text, style = piece if isinstance(piece, tuple) else (piece, "")
            text = clean(text).replace(number.NBSP, " ")
            if ascii:
                text = text.translate(_ASCII).encode("ascii", "replace").decode()
            if len(text) > left:
                text = text[: max(0, left - 1)] + ("\u2026" if not ascii else "~") if left else ""
            left -= len(text)
            if not left:  # nothing after the cut
                pieces.append((text, style))
                break
            pieces.append((text, style))
        if pieces:
            pieces[-1] = (pieces[-1][0].rstrip(), pieces[-1][1])
        out.append("".join(f"\x1b[{_ANSI[s]}m{t}\x1b[0m" if colour and s in _ANSI and t else t for t, s in pieces))
    return "\n".join(out)


def clean(text: str) -> str:
    """Without control characters (C0, C1) and direction overrides."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", " ", str(text))


def soft(name: str) -> Markup:
    """A name that, where it is too long for its column, goes on in the next line after a dot or an underscore."""
    return Markup(re.sub(r"(?<=\w)([._])(?=\w)", r"\1<wbr/>", str(escape(clean(name)))))


@functools.lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Autoescape is on for all templates: what a user wrote can only ever be text."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    env.filters.update(
        time=number.time,
        sig=number.sig,
        count=number.count,
        percent=number.percent,
        size=number.size,
        cell=number.cell,
        soft=soft,
    )
    env.globals.update(GLYPH=GLYPH, WORD=WORD, paint=paint, word=word, plural=number.plural)
    return env


@functools.lru_cache(maxsize=1)
def stylesheet() -> str:
    """The one stylesheet without comments and spare white space."""
    css = (Path(__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    css = re.sub(r"\s+", " ", css)
    return re.sub(r"\s*([{};,])\s*", r"\1", css).strip()
