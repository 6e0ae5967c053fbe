"""Calls go down: which module may import which, held by reading the imports of every file."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tpu_lab"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))

# The top imports what it likes. Every other module of the package's root is the middle: analysis of records, no device.
TOP = {
    "__init__",
    "__main__",
    "profile",
    "session",
    "bench",
    "check",
    "cli",
    "magic",
    "ui",
    "aot",
    "aot_compiler",
    "aot_child",
    "kept",
    "modes",
    "measured",
    "snapshot",
    "twin",
    "export",
    "doctor",
    "doctor_probes",
    "doctor_workshop",
    "script",
    "convert",
    "jupyter",
    "twins",
    "twins_run",
    "recorded",
    "wheelhouse",
    "coverage",
    "coverage_command",
    "coverage_facts",
    "pasted",
    "numerics",
    "guards",
    "lessons",
}
# How numbers, and what an exception says, are written: pure text, used wherever a sentence is made.
ALL_MAY = {"tpu_lab.viz.number", "tpu_lab.errors"}
MIDDLE = {p.stem for p in PACKAGE.glob("*.py")} - TOP - {"trace"}
MAY_IMPORT = {
    "trace": set(),
    "models": {"models"},
    "backend": {"backend", "trace"},
    "viz": {"viz", "trace"} | MIDDLE,
    **{name: {"trace"} | MIDDLE for name in MIDDLE},
}
# Packages of others that only some parts may import: views and analysis run where no device is, the core shows itself
# without knowing marimo or IPython.
ONLY_IN = {
    "torch": {"backend", "models", "chips"} | TOP,
    "jax": {"backend", "chips"} | TOP,
    "marimo": {"ui"},
    "IPython": {"magic", "__init__"},
}


def imports(source: str) -> set[str]:
    """The dotted names that a module's text imports anywhere, also inside functions; not those for type hints alone."""
    found, nodes = set(), [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        hints = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        nodes += node.orelse if hints else ast.iter_child_nodes(node)
    return found


def part_of(dotted: str) -> str:
    """`tpu_lab.backend.graph` -> `backend`; the package itself -> `__init__`."""
    names = dotted.split(".")
    known = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()}
    return names[1] if len(names) > 1 and names[1] in known else "__init__"


def wrong_imports(part: str, source: str) -> list[str]:
    """The imports in a module of `part` that point up or sideways."""
    wrong = []
    for name in sorted(imports(source)):
        top = name.split(".")[0]
        if top == "tpu_lab" and part in MAY_IMPORT and part_of(name) not in MAY_IMPORT[part] and name not in ALL_MAY:
            wrong.append(name)
        if top in ONLY_IN and part not in ONLY_IN[top]:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    wrong = wrong_imports(part, path.read_text(encoding="utf-8"))
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_is_longer_than_400_lines(path):
    length = len(path.read_text(encoding="utf-8").splitlines())
    assert length <= 400


def test_the_middle_has_no_circle():
    arrows = {
        name: {part_of(n) for n in imports((PACKAGE / f"{name}.py").read_text(encoding="utf-8")) if n[:8] == "tpu_lab."}
        for name in MIDDLE
    }
    while arrows:  # take away what imports nothing that is left, until nothing is left
        ends = {name for name, targets in arrows.items() if not targets & arrows.keys()}
        assert ends, f"these import each other in a circle: {sorted(arrows)}"
        arrows = {name: targets for name, targets in arrows.items() if name not in ends}


def test_the_check_itself_finds_a_wrong_arrow():
    assert wrong_imports("viz", "def f():\n    from tpu_lab.backend import graph") == ["tpu_lab.backend.graph"]
    assert wrong_imports("backend", "import tpu_lab") == ["tpu_lab"]
    assert wrong_imports("trace", "from tpu_lab import chips") == ["tpu_lab.chips"]
    assert wrong_imports("chips", "import marimo as mo\nfrom tpu_lab.cli import main") == ["marimo", "tpu_lab.cli.main"]
    assert wrong_imports("viz", "import torch") == ["torch"]
    assert wrong_imports("viz", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch") == []
    assert wrong_imports("profile", "import torch\nfrom tpu_lab.viz import ops\nfrom tpu_lab import trace") == []


def test_trace_needs_only_the_standard_library():
    import sys

    tops = {name.split(".")[0] for name in imports((PACKAGE / "trace.py").read_text(encoding="utf-8"))}
    assert tops <= set(sys.stdlib_module_names)
