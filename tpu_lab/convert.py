"""`tpu-lab convert notebook.ipynb out.py`: a Jupyter notebook with `%tpu_profile` as a marimo notebook.

marimo has no magics: its own converter comments a whole magic cell out. Here the magics become what they stand for,
`with tpu_lab.profile() as p:` and the views as the cell's last expression; marimo's converter does the rest.
Standard library only, and marimo in a process of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

from tpu_lab import options

_LINE = re.compile(r"^(?P<indent>[ \t]*)(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?%tpu_profile(?P<rest>[ \t].*|)$")
_LOAD = re.compile(r"^\s*%(?:load_ext|reload_ext)\s+tpu_lab\s*$")


def add(commands) -> None:
    """The grammar of `tpu-lab convert`."""
    it = commands.add_parser("convert", help="make a marimo notebook of a Jupyter one", description=convert.__doc__)
    it.add_argument("notebook", type=Path, help="the .ipynb file")
    it.add_argument("out", type=Path, help="the .py file to write")
    it.add_argument("-f", "--force", action="store_true", help="overwrite it")
    it.set_defaults(run=convert)


def convert(arguments: argparse.Namespace) -> int:
    """Rewrite %tpu_profile and %%tpu_profile to `with tpu_lab.profile() as p:`, then convert with marimo."""
    try:
        notebook = json.loads(arguments.notebook.read_text(encoding="utf-8"))
        cells = notebook["cells"]
        if not isinstance(cells, list) or not all(isinstance(c, dict) and "source" in c for c in cells):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a Jupyter notebook (nbformat 4)"
        print(f"tpu-lab convert: cannot read {arguments.notebook}: {why}", file=sys.stderr)
        return 2
    if arguments.out.exists() and not arguments.force:
        print(f"tpu-lab convert: {arguments.out} exists: choose another name, or overwrite it with -f", file=sys.stderr)
        return 2
    for cell in cells:
        if cell.get("cell_type") == "raw":  # marimo would take its text for Python
            cell.update(cell_type="markdown", source=_fenced("".join(cell["source"])))
    sources = ["".join(c["source"]) if c.get("cell_type") == "code" else None for c in cells]
    changed, imports, notes = rewrite(sources)
    for cell, source in zip(cells, changed):
        if source is not None:
            cell.update(source=source, outputs=[], execution_count=None)
    notebook["cells"] = [c for c, source in zip(cells, changed) if source != ""]
    if imports:
        first = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": imports}
        notebook["cells"].insert(0, first | ({"id": "tpu-lab"} if notebook.get("nbformat_minor", 0) >= 5 else {}))
    with tempfile.TemporaryDirectory() as folder:
        middle = Path(folder) / arguments.notebook.name
        middle.write_text(json.dumps(notebook), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "marimo",
            "-q",
            "-y",
            "convert",
            str(middle),
            "-o",
            str(arguments.out.resolve()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        print(f"tpu-lab convert: marimo could not convert it:\n{(done.stderr or done.stdout).strip()}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"tpu-lab convert: {note}", file=sys.stderr)
    print(f"wrote {arguments.out}: marimo edit {arguments.out}")
    return 0


@dataclass
class Names:
    """Names for the profiles: `p`, `p2`, ... that the notebook does not use; marimo wants each defined once."""

    taken: set[str]
    given: list[str] = field(default_factory=list)

    def new(self) -> str:
        n = 1
        while (name := f"p{n if n > 1 else ''}") in self.taken:
            n += 1
        self.taken.add(name)
        return name


def rewrite(sources: list[str | None]) -> tuple[list[str | None], str, list[str]]:
    """(cells without the magics, the imports that they need, notes on what was left as it is).

    sources: the text of each code cell, None for other cells. A cell that held only `%load_ext tpu_lab` becomes "".
    """
    code = [s for s in sources if s is not None]
    names = Names(set(re.findall(r"[A-Za-z_]\w*", "\n".join(code))))
    out: list[str | None] = []
    notes: list[str] = []
    for number, source in enumerate(sources, 1):
        if source is None or "tpu_profile" not in source and not any(map(_LOAD.match, source.splitlines())):
            out.append(source)
            continue
        try:
            out.append(_cell(source, names))
        except (SyntaxError, options.Mistake) as error:
            notes.append(f"cell {number} is left as it is: {error}")
            out.append(source)
    text = "\n".join(s for s in out if s)
    needed = (("import tpu_lab", r"\btpu_lab\."), ("import marimo as mo", r"\bmo\.(vstack|output)\b"))
    missing = [line for line, use in needed if re.search(use, text) and not re.search(rf"^\s*{line}\b", text, re.M)]
    return out, "\n".join(missing), notes


def _cell(source: str, names: Names) -> str:
    lines = source.splitlines()
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    if lines and lines[first].startswith("%%tpu_profile"):
        head = lines[first].removeprefix("%%tpu_profile")
        return _block(head, "\n".join(lines[first + 1 :]), names, "", last=True)
    out: list[str] = []
    end = max((i for i, line in enumerate(lines) if line.strip()), default=0)
    for i, line in enumerate(lines):
        if _LOAD.match(line):
            continue
        match = _LINE.match(line)
        if match is None:
            out.append(line)
            continue
        text = _block(match["rest"], None, names, match["name"] or "", last=i == end and not match["indent"])
        out += [match["indent"] + part for part in text.splitlines()]
    return "\n".join(out).strip("\n")


def _block(head: str, code: str | None, names: Names, assigned: str, last: bool) -> str:
    """One magic as plain Python. code: the cell's text, or None for a line magic, whose code follows its options."""
    parser = options.magic_parser()
    words, rest = options.split(head, options.takes_value(parser))
    args = parser.parse_args(shlex.split(words))
    if code is not None and rest.strip():
        raise options.Mistake(f"%%tpu_profile takes options only on its first line, not {rest.strip()!r}")
    code = rest if code is None else code
    name = args.variable or assigned or names.new()
    silent = args.quiet or bool(assigned) or args.output and not last or code.rstrip().endswith(";")
    code = _plain(code.strip("\n").rstrip().rstrip(";"))
    tree = ast.parse(code)
    if not tree.body:
        raise options.Mistake("there is no code to profile")
    mode = f'mode="{args.mode}"' if args.mode else ""
    out = _steps(args, tree, code, name, mode)
    for file, method in ((args.html, "html"), (args.trace, "perfetto"), (args.csv, "csv"), (args.json, "json")):
        if file:
            out.append(f"{name}.to_{method}({file!r})")
    if args.text:
        out.append(f"{name}.to_text({args.text!r})")
    if not silent:
        shown = _shown(args, name)
        out.append(shown if last else f"mo.output.append({shown})")
    return "\n".join(out)


def _steps(args, tree: ast.Module, code: str, name: str, mode: str) -> list[str]:
    """The lines that run the code: a with block; for -n and -w a call of profile(), when the code is one plain call."""
    block = [f"with tpu_lab.profile({mode}) as {name}:", _indent(code)]
    if args.steps == 1 and not args.warmup:
        return block
    steps = [f"steps={args.steps}"] + ([f"warmup={args.warmup}"] if args.warmup else []) + ([mode] if mode else [])
    only = tree.body[0]
    call = only.value if isinstance(only, (ast.Expr, ast.Assign)) else None
    own = {"steps", "warmup", "mode", "flops", "peak_flops", "name", "limit", "fn", None}
    if len(tree.body) == 1 and isinstance(call, ast.Call) and not own & {k.arg for k in call.keywords}:
        given = [ast.unparse(call.func), *map(ast.unparse, call.args), *map(ast.unparse, call.keywords), *steps]
        out = [f"{name} = tpu_lab.profile({', '.join(given)})"]
        if isinstance(only, ast.Assign):
            out.append(" = ".join([*map(ast.unparse, only.targets), f"{name}.value"]))
        return out
    loop = [block[0], f"    for _ in range({args.steps}):", _indent(_indent(code)), f"        {name}.step()"]
    return [f"for _ in range({args.warmup}):  # warm-up", _indent(code), *loop] if args.warmup else loop


def _shown(args, name: str) -> str:
    """The expression that shows what the magic showed."""
    more = "".join([f", limit={args.limit}" if args.limit else "", f', sort="{args.sort}"' if args.sort else ""])
    views = [f'{name}.view("{v}"{more})' if more else f"{name}.{v}" for v in options.names(args.view)]
    if not args.view and not more:
        views = [name]
    views += [f'{name}.on("{args.chip}")'] if args.chip else []
    return views[0] if len(views) == 1 else f"mo.vstack([{', '.join(views)}])"


def _fenced(text: str) -> str:
    """Text as Markdown shows it: as it is."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}" if text.strip() else ""


def _plain(code: str) -> str:
    """Other magics and shell lines are commented out, as marimo's own converter does."""
    return "\n".join(f"{line[: len(line) - len(line.lstrip())]}pass  # {line.lstrip()}" if re.match(r"\s*[%!?]", line) else line
                     for line in code.splitlines())  # fmt: skip


def _indent(code: str) -> str:
    """Four spaces more, but not inside strings that go over several lines: they would change."""
    inside: set[int] = set()
    starts: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "STRING":
            inside |= set(range(token.start[0] + 1, token.end[0] + 1))
        elif kind in ("FSTRING_START", "TSTRING_START"):
            starts.append(token.start[0])
        elif kind in ("FSTRING_END", "TSTRING_END"):
            inside |= set(range(starts.pop() + 1, token.end[0] + 1))
    return "\n".join(
        line if i in inside or not line.strip() else "    " + line for i, line in enumerate(code.splitlines(), 1)
    )
