"""The pieces of marimo that the notebooks use, standing still: for their Jupyter twins.

A control is the value that it starts with, a fold is a fold, a progress bar is what it counts, and long work that
waits for a button in marimo runs when its cell is run. `from tpu_lab.viz import still as mo` is all that a twin
changes in a notebook's code.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Iterable, Mapping

from markupsafe import Markup, escape

from tpu_lab.viz import page


class Text:
    """Markdown. Jupyter shows it as it shows a text cell; inside another piece it is HTML, in a terminal its source."""

    def __init__(self, source: str) -> None:
        self.source = inspect.cleandoc(source)

    def _repr_markdown_(self) -> str:
        return self.source

    def _mime_(self) -> tuple[str, str]:
        from markdown import markdown  # comes with marimo

        return "text/html", markdown(self.source, extensions=["fenced_code", "tables", "sane_lists"])

    def __repr__(self) -> str:
        return self.source


class Control:
    """What a control is where nothing moves it: its value. As a button it was not pressed."""

    def __init__(self, value: Any, shown: Any = None) -> None:
        self.value, self.shown = value, value if shown is None else shown

    def __getitem__(self, name: str) -> Any:
        return self.shown[name]

    def _repr_html_(self) -> str:
        return f'<span style="font-weight:600">{escape(self.shown)}</span>'

    def __repr__(self) -> str:
        return str(self.shown)


class Folds(page.Piece):
    """Named things, each behind its name. As text: each under its name."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        parts = "".join(
            f'<details style="border-bottom:{page.HAIR}"><summary style="cursor:pointer;padding:8px 0">{escape(name)}'
            f'</summary><div style="padding:8px 0 16px">{page.as_html(thing)}</div></details>'
            for name, thing in named.items()
        )
        said = "\n\n".join(f"{name}\n{'-' * len(name)}\n{thing!r}" for name, thing in named.items())
        super().__init__(f'<div data-folds="" style="border-top:{page.HAIR}">{parts}</div>', said)


def md(source: str) -> Text:
    """Text in Markdown."""
    return Text(source)


def accordion(named: Mapping[str, Any], **how: Any) -> Folds:
    """Things that are folded until one opens them."""
    return Folds(named)


def vstack(things: Iterable[Any], gap: float = 1, **how: Any) -> page.Piece:
    """Things one under the other; gap in lines."""
    return page.stack(*things, gap=round(16 * gap))


def hstack(things: Iterable[Any], **how: Any) -> page.Piece:
    """Things in a row that wraps."""
    cells = "".join(f"<div>{page.as_html(thing)}</div>" for thing in things if thing is not None)
    said = "   ".join(repr(thing) for thing in things if thing is not None)
    return page.Piece(f'<div style="display:flex;flex-wrap:wrap;gap:12px 32px">{cells}</div>', said)


def callout(thing: Any, **how: Any) -> page.Piece:
    """Something set apart from the rest by a line at its side."""
    return page.Piece(
        f'<div style="border-left:3px solid rgb(128 128 128/.5);padding:4px 16px">{page.as_html(thing)}</div>',
        repr(thing),
    )


def app_meta() -> SimpleNamespace:
    """How it runs: as a script, from top to bottom."""
    return SimpleNamespace(mode="script")


def stop(condition: bool, output: Any = None) -> None:
    """marimo ends a cell here; a twin goes on, as what waits for a button runs at once in it."""


def _slider(
    start: Any = None, stop: Any = None, step: Any = None, *, steps: Any = None, value: Any = None, **how: Any
) -> Control:
    return Control(value if value is not None else list(steps)[0] if steps is not None else start)


def _choice(options: Any = (), value: Any = None, **how: Any) -> Control:
    name = value if value is not None else next(iter(options), None)
    return Control(options[name] if isinstance(options, Mapping) else name, name)


def _switch(value: Any = False, **how: Any) -> Control:
    return Control(value)


def _written(value: str = "", **how: Any) -> Control:
    return Control(value)


def _number(start: Any = None, stop: Any = None, step: Any = None, value: Any = None, **how: Any) -> Control:
    return Control(value if value is not None else start)


def _button(**how: Any) -> page.Piece:
    """A button that nobody can press shows nothing."""
    made = page.Piece("<span></span>")
    made.value = False  # type: ignore[attr-defined]
    return made


def _dictionary(named: Mapping[str, Any], **how: Any) -> Control:
    return Control({name: one.value for name, one in named.items()}, dict(named))


def _tabs(named: Mapping[str, Any], **how: Any) -> Folds:
    return Folds(named)


ui = SimpleNamespace(
    slider=_slider, dropdown=_choice, radio=_choice, switch=_switch, checkbox=_switch, number=_number, text=_written,
    text_area=_written, code_editor=_written, run_button=_button, button=_button, dictionary=_dictionary, tabs=_tabs,
)  # fmt: skip


def _counted(things: Iterable[Any], **how: Any) -> Iterable[Any]:
    return things


class _Quiet:
    """A spinner that does not turn."""

    def __init__(self, *args: Any, **how: Any) -> None:
        pass

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def update(self, *args: Any, **how: Any) -> None:
        pass


status = SimpleNamespace(progress_bar=_counted, spinner=_Quiet)


def Html(text: str) -> page.Piece:  # noqa: N802  (marimo's name)
    """Markup as it is."""
    return page.Piece(Markup(text))
