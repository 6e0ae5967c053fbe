"""`tpu-lab recorded`: what each tutorial shows with the answers in it, as text, for who cannot run it.

A tutorial's twin is run with the answers of solutions/ in its blanks; headings, ticks, scores and views go into
tutorials/recorded/<name>.md. Standard library and twins_run.py only.
"""

from __future__ import annotations

import argparse
import ast
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from tpu_lab import twins, twins_run

FOLDER = "recorded"
MOST = 60  # lines of one output
HEAD = """\
# {title}, recorded

**This page holds the answers.** It is what `{file}` shows when every check ticks, for those whose machine is too slow to
run it. Launches, misses and bytes are the same everywhere; times are those of the machine that made the page with
`tpu-lab recorded`: {machine}.
"""


def add(commands) -> None:
    """The grammar of `tpu-lab recorded`."""
    it = commands.add_parser("recorded", help="renew the recorded results of the tutorials", description=record.__doc__)
    it.add_argument("tutorial", nargs="*", type=Path, help="the .py files (default: all tutorials)")
    it.set_defaults(run=record)


def record(arguments: argparse.Namespace) -> int:
    """Run each tutorial with the answers of solutions/, and write what it shows into recorded/ beside it."""
    paths = arguments.tutorial or sorted((twins.SOURCE / "tutorials").glob("[0-9]*.py"))
    if not paths or any(not (path.parent / "solutions" / path.name).exists() for path in paths):
        print("tpu-lab recorded: give tutorials that have solutions/ beside them.", file=sys.stderr)
        return 2
    for path in map(Path.resolve, paths):
        try:
            done = twins_run.run(answered(path), path.parent.parent)
        except ValueError as error:
            print(f"tpu-lab recorded: {path.name}: {error}", file=sys.stderr)
            return 1
        out = path.parent / FOLDER / f"{path.stem}.md"
        out.parent.mkdir(exist_ok=True)
        out.write_text(page(done, path), encoding="utf-8")
        print(f"wrote tutorials/{FOLDER}/{out.name}", flush=True)
    return 0


def answered(path: Path) -> dict:
    """The tutorial's twin with its answers instead of its blanks."""
    solution = path.parent / "solutions" / path.name
    names = answers(solution)
    book = twins.book(path)
    cells = [cell for cell in book["cells"] if "tpu_profile" not in "".join(cell["source"][:1])]
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    read = ["import runpy\n", f"ANSWERS = runpy.run_path({str(solution)!r})['ANSWERS']\n"]
    first["source"] = [*read, *first["source"]]
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and not cell["metadata"] and "..." in text:
            made = re.findall(r"^(?:def )?(\w+)(?: = |\()", text, re.M)
            blank = sorted(names & set(made))
            cell["source"] = [f"{name} = ANSWERS[{name!r}]\n" for name in blank] if blank else cell["source"]
    return {**book, "cells": cells}


def answers(solution: Path) -> set[str]:
    """The names in a solution's dictionary ANSWERS."""
    for node in ast.parse(solution.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ANSWERS":
            if isinstance(node.value, ast.Dict):
                return {ast.literal_eval(key) for key in node.value.keys if key is not None}
            return {word.arg for word in getattr(node.value, "keywords", []) if word.arg}
    return set()


def page(done: dict, path: Path) -> str:
    """Headings and outputs of a notebook that ran, as Markdown."""
    title = "".join(done["cells"][0]["source"]).splitlines()[0].removeprefix("# ")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "jax"))
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {versions}"
    out = [HEAD.format(title=title, file=path.name, machine=machine)]
    for cell in done["cells"][1:]:
        if cell["cell_type"] == "markdown":
            out += [
                line + "\n"
                for line in "".join(cell["source"]).splitlines()
                if line.startswith("## ") and line != "## Your turn"
            ]
        for output in twins_run.kept(cell.get("outputs", []), None):
            data = output.get("data", {})
            if "text/markdown" in data:
                out.append("".join(data["text/markdown"]).strip() + "\n")
            else:
                lines = "".join(data.get("text/plain", output.get("text", ""))).rstrip().splitlines()
                lines = lines if len(lines) <= MOST else [*lines[:MOST], f"... and {len(lines) - MOST} lines more"]
                out.append("\n".join(["```text", *map(str.rstrip, lines), "```", ""]))
    return "\n".join(out)
