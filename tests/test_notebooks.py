"""The notebooks as programs: checked by marimo, run with small parameters, and again as the exported .ipynb twin."""

import ast
import subprocess
import sys

import nbclient
import nbformat
import pytest
from small_notebooks import ROOT, SMALL, load

from tpu_lab import twins
from tpu_lab.lessons import modes as modes_lesson
from tpu_lab.lessons import your_model as your_model_lesson
from tpu_lab.viz import ahead

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


def test_every_notebook_has_small_parameters_here():
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)


def test_marimo_finds_nothing_to_complain_about():
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "check", "--strict", *map(str, NOTEBOOKS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_house_rules_of_a_notebook(path):
    source = path.read_text()
    assert source.startswith("# /// script\n")
    header = source.partition("# ///\n")[0]
    assert "[tool.marimo.opengraph]" in header and "# title = " in header and "# description = " in header, "its card"
    assert "http" not in source.replace("http.client", ""), "a notebook loads nothing"
    cells = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "_"]
    prose = [cell for cell in cells if "mo.md" in ast.unparse(cell) and len(cell.body) <= 2]
    assert prose and all("hide_code=True" in ast.unparse(cell.decorator_list[0]) for cell in prose)
    first = ast.unparse(cells[0])
    assert "**" in first and "?**" in first and "minute" in first.lower(), "title, the one question, the minutes"
    assert any("assert " in ast.unparse(cell) for cell in cells[-1:]), "the last cell holds what the text claims"


def test_hello_counts_launches_hits_and_misses():
    _, definitions = load("hello").app.run(defs={"params": SMALL["hello"]})
    strict, fused = definitions["strict"].trace, definitions["fused"].trace
    assert [launch.mode for launch in strict.launches] == ["strict"] * 8
    assert [len(launch.ops) for launch in fused.launches] == [4, 4]
    assert [launch.cache for launch in strict.launches[4:]] == ["hit"] * 4
    assert fused.launches[1].cache == "hit" and fused.launches[1].compile_ns == 0
    assert definitions["strict_results"] == definitions["fused_results"] == [16 * 128 * 3.0] * 2


def test_hello_an_early_look_cuts_the_fused_program():
    for look in (1, 2, 3):
        _, definitions = load("hello").app.run(defs={"params": {**SMALL["hello"], "look": look}})
        assert [len(launch.ops) for launch in definitions["fused"].trace.launches] == [look, 4 - look] * 2
        assert len(definitions["strict"].trace.launches) == 8


def test_hello_draws_what_ran():
    module = load("hello")
    _, definitions = module.app.run(defs={"params": SMALL["hello"]})
    strict = module.picture("strict", definitions["strict"].trace).html
    fused = module.picture("fused", definitions["fused"].trace).html
    for name in ("mul", "add", "relu", "sum"):
        assert strict.count(f">{name}<") == fused.count(f">{name}<") == 2
    assert strict.count("✓") >= 4 and fused.count("✓") >= 1
    assert 'role="figure"' in strict and "<script" not in strict + fused


@pytest.fixture(scope="module")
def small_modes():
    _, definitions = load("modes").app.run(defs={"params": SMALL["modes"]})
    return definitions


def test_modes_counts_launches_and_misses(small_modes):
    rows = {row["mode"]: row for row in modes_lesson.costs(small_modes["seen"])}
    assert list(rows) == ["strict", "fused", "compiled"]
    assert rows["strict"]["launches a step"] > 10 > 4 >= rows["compiled"]["launches a step"] > 1
    assert rows["fused"]["launches a step"] == 1
    for mode, row in rows.items():
        launches = small_modes["seen"].profiles[mode].trace.launches
        assert row["misses"] + row["disk hits"] + row["hits"] == len(launches) > row["misses"] + row["disk hits"]
        assert 0 < row["a step after it"]


def test_modes_every_mode_and_the_cpu_compute_the_same(small_modes):
    losses = small_modes["seen"].rows.set_index("mode").loss
    assert list(losses.index) == ["strict", "fused", "compiled", "native CPU"]
    assert losses.tolist() == pytest.approx([losses["native CPU"]] * 4, rel=load("modes").TOLERANCE)


def test_modes_says_what_changed(small_modes):
    module, before = load("modes"), small_modes["seen"]
    after = module.compare(16, 2, 16, ["fused"], 1, "tpu")
    assert modes_lesson.changed(before, after).startswith("What changed, fused: ")
    assert modes_lesson.changed(after, module.compare(16, 1, 16, ["strict"], 1, "tpu")) is None, "no mode in common"


def test_modes_none_chosen_says_so():
    outputs, definitions = load("modes").app.run(defs={"params": {**SMALL["modes"], "modes": []}})
    assert definitions["seen"] is None
    assert any("No mode is chosen" in repr(output) for output in outputs)


def test_modes_more_programs_more_bytes_on_a_tpu():
    fused, compiled = ahead.of("modes")["rows"]
    assert fused["programs"] == 1 < compiled["programs"] and fused["moved"] < compiled["moved"]


def test_your_model_shows_coverage_and_steps():
    outputs, definitions = load("your_model").app.run(defs={"params": SMALL["your_model"]})
    seen = definitions["seen"]
    assert not seen.fault and "aten.embedding.default" in set(seen.coverage.rows.op)
    m = seen.profile.metrics
    assert [launch.mode for launch in m.launches_in(m.span)] == ["fused"]
    assert {op.file for op in m.ops_in(m.span) if op.phase == "forward" and op.module} == {"model.py"}
    assert any("TorchTPU has them all" in repr(output) for output in outputs)


def test_your_model_a_fault_is_one_calm_sentence():
    code = "class Net(nn.Module):\n    def forward(self, x):\n        return self.layer(x)\n"
    defs = {"params": {**SMALL["your_model"], "code": code, "shape": "2, 3"}}
    outputs, definitions = load("your_model").app.run(defs=defs)
    fault = definitions["seen"].fault
    assert fault == "Line 3, “return self.layer(x)”: AttributeError, 'Net' object has no attribute 'layer'"
    shown = "".join(map(repr, outputs))
    assert "It does not run yet" in shown and "Traceback" not in shown
    assert your_model_lesson.look("class A(nn.Module):\n    def forward(self, x): return x", "2", "tpu").fault


def test_your_model_says_what_to_change():
    module, found = your_model_lesson, {}
    for name in ("an op that TorchTPU lacks", "a question in the middle"):
        code, _ = module.examples()[name]
        found[name] = module.changes(module.look(code, "4, 128", "tpu"), None)
    (lacks,), (cut,) = found.values()
    assert lacks == ("Replace aten.mish.", "TorchTPU 0.2.0 has no kernel for it, and would raise at model.py:10.")
    assert cut[0] == "Read no value inside the step." and "at model.py:11" in cut[1] and "2 launches a step" in cut[1]
    scale = module.look("class A(nn.Module):\n    def forward(self, x): return x * 2", "4, 128", "tpu")
    assert module.changes(scale, None)[0][0] == "Nothing stands out."
    assert module.changes(scale, ["Try 128 for 10.", "It fills a tile"])[-1] == ("Try 128 for 10.", "It fills a tile")


def test_your_model_has_a_tpu_view_of_each_example():
    stored = ahead.of("your_model")
    for name in your_model_lesson.examples():
        groups = stored[f"{name}: groups"].rows
        assert (~groups.compiler.str.contains("CPU")).any() and "v6e" in stored[f"{name}: memory"].title


@pytest.mark.parametrize("name", SMALL)
def test_the_twin_runs_as_a_jupyter_notebook(name):
    book = nbformat.reads(twins.written(twins.book(ROOT / "notebooks" / f"{name}.py")), as_version=4)
    (cell,) = [cell for cell in book.cells if cell.cell_type == "code" and "params = {" in cell.source]
    cell.source = f"params = {SMALL[name]!r}"
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert not [output for output in shown if output.output_type == "error"]
    assert any("What we saw" in str(output.get("data", "")) for output in shown)
