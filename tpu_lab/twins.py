"""`tpu-lab twins`: for each marimo notebook and tutorial a Jupyter notebook that teaches the same.

Cell by cell: prose becomes text cells, marimo's pieces become those of viz/still.py (a control is the number that it
starts with, in the one cell `params`), and a last cell, from jupyter/.your_turn.md beside the notebooks, profiles with
`%%tpu_profile`. Standard library only; running them is in twins_run.py.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
FOLDERS = ("notebooks", "tutorials")
HOME = "jupyter"  # the folder of twins, inside that of the notebooks
MARIMO, STILL = "import marimo as mo", "from tpu_lab.viz import still as mo  # marimo's pieces; a control is its value"
ELSEWHERE = (
    "*This is the Jupyter twin of the marimo notebook `{file}`: read it from top to bottom, and run the cells in order. "
    "In Colab, or wherever TPU Lab is not installed yet, first run a cell with `%pip install tpu-lab` (from a copy of "
    "the source tree: `%pip install path/to/the/tree`) and restart the kernel.*"
)
SETTINGS = (
    "**Settings.** What a control sets in marimo is a number here: change one, then run this cell and those below it "
    "(in JupyterLab: *Run Selected Cell and All Below*)."
)
BLANKS = "*A blank is a `...`: fill it in, run its cell and then the cell below it, which ticks or gives a hint.*"


def all_notebooks(root: Path = SOURCE) -> list[Path]:
    """The notebooks and tutorials of a source tree."""
    return [path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))]


def twin_of(path: Path) -> Path:
    """Where the twin of a notebook stands."""
    return path.parent / HOME / f"{path.stem}.ipynb"


def book(path: Path) -> dict:
    """The twin as a notebook (nbformat 4.5) without outputs. Raises ValueError where a cell needs a later one."""
    source = path.read_text(encoding="utf-8")
    _in_order(source, path.name)
    kinds = cells(source)
    tutorial = any("sheet = " in text for _, text, _ in kinds)
    first = next((i for i, (kind, _, _) in enumerate(kinds) if kind == "markdown"), 0)
    title = kinds.pop(first)[1]
    note = ELSEWHERE.format(file=f"{path.parent.name}/{path.name}") + (f"\n\n{BLANKS}" if tutorial else "")
    made = [_cell("markdown", f"{title}\n\n{note}")]
    for kind, text, hidden in kinds:
        if kind == "setup":
            text = text.replace(MARIMO, STILL) + "\n\n%load_ext tpu_lab"
        if re.search(r"^params = ", text, re.M):
            made.append(_cell("markdown", SETTINGS))
            text = text.replace("# What the controls start with. A test, or you, can put other values here.\n", "")
        if kind == "markdown":
            made.append(_cell("markdown", _links(text, path.parent)))
        else:
            prose, text = _apart(text)
            made += [_cell("markdown", _links(prose, path.parent))] if prose else []
            made += [_cell("code", _links(text, path.parent), hidden)] if text else []
    made += [_cell(kind, text) for kind, text in your_turn(path)]
    for number, cell in enumerate(made, 1):
        cell["id"] = f"c{number:02d}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
            "nbformat": 4, "nbformat_minor": 5}  # fmt: skip


def your_turn(path: Path) -> list[tuple[str, str]]:
    """The closing cells, ("markdown" or "code", text), from the section of .your_turn.md that has the notebook's name."""
    file = path.parent / HOME / ".your_turn.md"
    if not file.exists():
        return []
    found = re.search(rf"^# {re.escape(path.stem)}\n(.*?)(?=^# \w+$|\Z)", file.read_text(encoding="utf-8"), re.M | re.S)
    if found is None:
        return []
    parts = re.split(r"^```python\n(.*?)\n```$", found[1], flags=re.M | re.S)
    return [("code" if i % 2 else "markdown", part.strip("\n")) for i, part in enumerate(parts) if part.strip()]


def written(notebook: dict) -> str:
    """The text of its file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def sources(notebook: dict) -> list[tuple[str, str]]:
    """(kind, text) of each cell: what two notebooks must share to be the same lesson."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def stale(paths: list[Path]) -> list[Path]:
    """The notebooks whose twins are missing, or do not have the cells that they would have now."""
    return [path for path in paths if not _is_fresh(path)]


def _is_fresh(path: Path) -> bool:
    try:
        return sources(json.loads(twin_of(path).read_text(encoding="utf-8"))) == sources(book(path))
    except (OSError, ValueError, KeyError):
        return False


# ---- a marimo file, cell by cell ------------------------------------------------------------------------------------


def cells(source: str) -> list[tuple[str, str, bool]]:
    """(kind, text, whether its code is hidden) in the file's order; kind is setup, code or markdown."""
    lines = source.splitlines()
    found: list[tuple[str, str, bool]] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr).startswith("app.setup"):
            found.append(("setup", _body(node.body, lines), False))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and (marks := _marks(node)):
            hidden = "hide_code=True" in marks[0]
            if marks[0].startswith("app.cell"):
                body = node.body[:-1] if isinstance(node.body[-1], ast.Return) else node.body
                text = _body(body, lines) if body else ""
            else:  # @app.function and @app.class_definition: the definition itself, under its own decorators
                own = [d for d in node.decorator_list if not ast.unparse(d).startswith("app.")]
                first = min([node.lineno, *(d.lineno for d in own)])
                text = "\n".join(lines[first - 1 : node.end_lineno])
            prose = _prose(text)
            if prose:
                found.append(("markdown", prose, False))
            elif text and not _only_in_an_app(text):
                found.append(("code", text, hidden))
    return found


def _marks(node) -> list[str]:
    return [text for d in node.decorator_list if (text := ast.unparse(d)).startswith("app.")]


def _body(body: list[ast.stmt], lines: list[str]) -> str:
    """The lines of a block with the comments above it, four columns to the left; text at the margin stays there."""
    first = min(body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", [])), body[0].lineno)
    while lines[first - 2].strip().startswith("#"):
        first -= 1
    return "\n".join(line.removeprefix("    ") for line in lines[first - 1 : body[-1].end_lineno]).strip("\n")


def _prose(text: str) -> str:
    """The Markdown of a cell that is `mo.md("...")` and nothing else, else ""."""
    tree = ast.parse(text).body
    return _markdown(tree[0].value) if len(tree) == 1 and isinstance(tree[0], ast.Expr) else ""


def _markdown(node: ast.AST) -> str:
    """The text of a call `mo.md("...")` without a value in it, else ""."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "mo.md" and isinstance(node.args[0], ast.Constant):
        return inspect.cleandoc(str(node.args[0].value))
    return ""


def _only_in_an_app(text: str) -> bool:
    """Whether a cell is `... if mo.app_meta().mode == "run" else None`: code that is shown where cells are hidden."""
    last = ast.parse(text).body[-1]
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.IfExp)
        and "app_meta().mode ==" in ast.unparse(last.value.test)
    )


def _apart(text: str) -> tuple[str, str]:
    """(prose, the code without it) of a cell that ends in a stack whose first piece is a plain `mo.md("...")`."""
    tree = ast.parse(text.replace("%load_ext", "#")).body
    last = tree[-1].value if tree and isinstance(tree[-1], ast.Expr) else None
    if not (isinstance(last, ast.Call) and ast.unparse(last.func) in ("page.stack", "mo.vstack") and last.args):
        return "", text
    pieces = last.args[0].elts if isinstance(last.args[0], ast.List) else last.args
    named = {ast.unparse(s.targets[0]): s for s in tree if isinstance(s, ast.Assign) and _markdown(s.value)}
    first, statement = pieces[0], None
    if isinstance(first, ast.Name) and first.id in named and text.count(first.id) == 2:
        statement = named[first.id]
    prose = _markdown(statement.value if statement else first)
    if not prose:
        return "", text
    end = (pieces[1].lineno, pieces[1].col_offset) if len(pieces) > 1 else (first.end_lineno, first.end_col_offset)
    text = _cut(text, (first.lineno, first.col_offset), end)
    if statement is not None:
        text = _cut(text, (statement.lineno, statement.col_offset), (statement.end_lineno, statement.end_col_offset))
    return prose, text.strip("\n")


def _cut(text: str, start: tuple[int, int], end: tuple[int | None, int | None]) -> str:
    """The text without what stands from start to end: (line from 1, byte in it)."""
    raw = [line.encode() for line in text.split("\n")]
    head = raw[: start[0] - 1] + [raw[start[0] - 1][: start[1]]]
    last, column = end[0] or start[0], end[1] or 0
    tail = [raw[last - 1][column:]] + raw[last:]
    return b"\n".join(head[:-1] + [head[-1] + tail[0]] + tail[1:]).decode()


def _links(text: str, folder: Path) -> str:
    """`03_three_modes.py` is `03_three_modes.ipynb` in a twin, where there is such a notebook."""
    return re.sub(r"`(\w+)\.py`", lambda m: f"`{m[1]}.ipynb`" if (folder / f"{m[1]}.py").exists() else m[0], text)


def _in_order(source: str, name: str) -> None:
    """marimo runs cells in the order of what they need, Jupyter as they stand: both must be the same."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "_"]
    made = [{n.id for n in ast.walk(c.body[-1]) if isinstance(n, ast.Name)} if isinstance(c.body[-1], ast.Return) else set()
            for c in nodes]  # fmt: skip
    for i, node in enumerate(nodes):
        if wrong := {a.arg for a in node.args.args} - set().union(*made[:i]):
            what = ", ".join(sorted(wrong))
            raise ValueError(f"{name}, line {node.lineno}: it uses {what}, which a later cell makes: move that up")


def _cell(kind: str, text: str, hidden: bool = False) -> dict:
    lines = text.strip("\n").splitlines(keepends=True)
    if kind == "markdown":
        return {"cell_type": "markdown", "id": "", "metadata": {}, "source": lines}
    fold = {"jupyter": {"source_hidden": True}, "cellView": "form", "tags": ["hide-input"]} if hidden else {}
    return {"cell_type": "code", "execution_count": None, "id": "", "metadata": fold, "outputs": [], "source": lines}
