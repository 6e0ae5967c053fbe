"""A view: rows first, then text, then a page, all three from the same rows.

A file beside this one draws one view. It gives a `View` whose `rows` is a DataFrame and whose `lines` and `body` were
made from these rows; how it shows itself (terminal, Jupyter, VS Code, Colab, marimo) is here, once for all.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any, Callable, Mapping

from markupsafe import Markup

from tpu_lab import errors
from tpu_lab.viz import theme
from tpu_lab.viz.marks import style

INLINE_ROWS = 200  # at most, in a notebook's cell
INLINE_BYTES = 300_000


class View:
    """Rows that show themselves. `view.rows` is the DataFrame; its methods also work on the view: `p.ops.groupby(...)`.

    name: "ops". title: the finding, one sentence. finding: what a closed fold says of it. Nothing changes after
    it was made, so showing it twice gives the same bytes.
    """

    def __init__(
        self,
        name: str,
        title: str,
        finding: str,
        rows: Callable,
        lines: Callable,
        body: Callable,
        picked: Mapping | None = None,  # what its page marks
    ) -> None:
        self.name, self.title, self.finding, self._picked = name, title, finding, picked
        self._rows, self._lines, self._body = rows, lines, body

    @cached_property
    def rows(self):
        """The rows as a pandas DataFrame."""
        try:
            return self._rows()
        except AttributeError as error:  # would look like a missing attribute of ours, and ask __getattr__ for rows again
            raise RuntimeError(f"the rows of the {self.name} view cannot be made: {errors.text(error)}") from error

    @cached_property
    def body(self) -> Markup:
        """The markup inside the root element, without the stylesheet."""
        return Markup(self._body())

    @cached_property
    def html(self) -> str:
        """One root element that needs nothing around it: no script, no URL, right in light and dark."""
        return self.marked(self._picked)

    def marked(self, picked: Mapping | None) -> str:
        """The same page with an op, a line or a fusion marked: `view.marked({"op": 17, "line": "model.py:54"})`."""
        marks, rules = style(picked)
        template = theme.environment().get_template("root.html")
        return template.render(
            css=Markup(theme.stylesheet() + rules), title=self.title, body=self.body, marks=Markup(marks)
        )

    @cached_property
    def lines(self) -> list:
        """The text as lines of (text, style) pieces."""
        return self._lines()

    def text(self, colour: bool = False, ascii: bool = False) -> str:
        """The view for a terminal, at most 100 columns wide."""
        return theme.render(self.lines, colour, ascii)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return show_in_terminal(self)

    def _repr_html_(self) -> str:
        return self.html

    def _mime_(self) -> tuple[str, str]:
        return "text/html", self.html

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": repr(self)}

    def __getitem__(self, key: Any) -> Any:
        return self.rows[key]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)

    def __dir__(self):
        return [*super().__dir__(), *(c for c in self.rows.columns if str(c).isidentifier())]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # hosts ask for many `_repr_*_`; pickle and copy for dunders
            raise AttributeError(name)
        try:
            return getattr(self.rows, name)
        except AttributeError:
            raise AttributeError(
                f"the {self.name} view has no {name!r}: its columns are {', '.join(self.rows)}"
            ) from None


def show_in_terminal(view: View) -> str:
    """Coloured on a terminal, in ASCII where the terminal's encoding has nothing better."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
    return view.text(theme.colours_wanted(), ascii=not encoding.startswith("utf"))


def page(view: View) -> str:
    """A whole file: offline, without script, following the system's light or dark."""
    template = theme.environment().get_template("page.html")
    return template.render(title=view.title, root=Markup(view.html))


def template(name: str, **values) -> str:
    """A template of ours, filled in, without blank lines."""
    text = theme.environment().get_template(name).render(**values)
    return "\n".join(line for line in (raw.strip() for raw in text.splitlines()) if line)
