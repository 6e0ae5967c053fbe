"""Calls go down: which module may import which, held by reading the imports of every file."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tpu_lab"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))

# part of the package -> the parts it may import. Parts not named here are the top: they import what they like.
MAY_IMPORT = {
    "trace": set(),
    "models": {"models"},
    "backend": {"backend", "trace"},
    "chips": {"trace"},
    "hlo": {"trace"},
    "chip_files": set(),
    "metrics": {"trace", "chips", "hlo"},
    "advice": {"trace", "chips", "hlo", "metrics"},
    "viz": {"viz", "trace", "chips", "hlo", "metrics", "advice"},
    "doctor_probes": {"chip_files"},
}
# Outside packages that only some modules may import.
ONLY_IN = {
    "marimo": {"ui"},
    "IPython": {"magic", "__init__"},
    "torch": {"backend", "models", "profile", "bench", "aot", "modes", "chips", "doctor", "ui", "magic", "__init__"},
}


def imports(source: str) -> set[str]:
    """The dotted names that a module's text imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
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
        if top == "tpu_lab" and part in MAY_IMPORT and part_of(name) not in MAY_IMPORT[part]:
            wrong.append(name)
        if top in ONLY_IN and part not in ONLY_IN[top]:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert not wrong_imports(part, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_is_longer_than_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_three_pillars_never_import_each_other():
    pillars = {"backend", "viz", "models"}
    for pillar in pillars:
        assert not MAY_IMPORT[pillar] & (pillars - {pillar})


def test_the_check_itself_finds_a_wrong_arrow():
    assert wrong_imports("viz", "def f():\n    from tpu_lab.backend import graph") == ["tpu_lab.backend.graph"]
    assert wrong_imports("backend", "import tpu_lab") == ["tpu_lab"]
    assert wrong_imports("trace", "from tpu_lab import chips") == ["tpu_lab.chips"]
    assert wrong_imports("metrics", "import marimo as mo") == ["marimo"]
    assert wrong_imports("viz", "import torch") == ["torch"]
    assert wrong_imports("profile", "import torch\nfrom tpu_lab.viz import ops\nfrom tpu_lab import trace") == []


def test_trace_needs_only_the_standard_library():
    import sys

    tops = {name.split(".")[0] for name in imports((PACKAGE / "trace.py").read_text(encoding="utf-8"))}
    assert tops <= set(sys.stdlib_module_names)
