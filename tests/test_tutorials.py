"""The tutorials: checked by marimo; as shipped they hint and never raise; with the answers put in, every check ticks."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_lab.viz.check import Checked

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
names = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


@functools.cache
def load(path):
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # marimo finds the source through it
    spec.loader.exec_module(module)
    return module


def answers(path):
    return load(path.parent / "solutions" / path.name).ANSWERS


def checks(definitions):
    """The single checks of a run, and the sheet that shows them together."""
    found = [value for value in definitions.values() if isinstance(value, Checked)]
    (sheet,) = [view for view in found if view.name == "checks"]
    single = [view for view in found if view.name == "check"]
    assert sorted(o.number for o in sheet.outcomes) == sorted(view.outcomes[0].number for view in single)
    return single, sheet


def broken(*args, **kwargs):
    return 1 / 0


def test_marimo_finds_nothing_to_complain_about():
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "check", "--strict", *map(str, TUTORIALS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@names
def test_the_house_rules_of_a_tutorial(path):
    source = path.read_text(encoding="utf-8")
    assert source.startswith("# /// script\n") and "[tool.marimo.opengraph]" in source
    assert "http" not in source, "a tutorial loads nothing"
    assert not re.search(r"if abs\(.*\) > ", source), "NaN is not greater than anything: ask `not abs(…) <= …`"
    cells = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "_"]
    assert all("hide_code=True" in ast.unparse(c.decorator_list[0]) for c in cells if "mo.md" in ast.unparse(c))
    first = ast.unparse(cells[0])
    assert "?**" in first and "minute" in first.lower(), "title, the one question, the minutes"
    blanks = [c for c in cells if "hide_code" not in ast.unparse(c.decorator_list[0]) and "..." in ast.unparse(c)]
    assert len(blanks) >= len(answers(path)) >= 3, "each answer has its blank, in a cell that is seen"


@names
def test_as_shipped_every_check_waits_and_none_ticks(path):
    _, definitions = load(path).app.run()
    single, sheet = checks(definitions)
    assert len(single) >= 4 and sheet.outcomes[0].number
    for view in single:
        assert view.state == "open", f"{view.title}\n{view}"
        assert "Not tried" in view.outcomes[0].rest and "Traceback" not in view.html


@names
def test_the_answers_tick_everything(path):
    _, definitions = load(path).app.run(defs=answers(path))
    single, sheet = checks(definitions)
    for view in single:
        assert view.passed, f"\n{view}"
        assert all(score.gain == 0 for score in view.outcomes[0].scores if score.decides), "par is what the answers reach"
    assert sheet.passed and "all" in sheet.title


@names
@pytest.mark.parametrize(("value", "function"), [(-1, broken), ("no", 5)], ids=["errors", "other kinds"])
def test_a_wrong_answer_is_told_so_and_gives_a_hint(path, value, function):
    wrong = {name: function if callable(answer) else value for name, answer in answers(path).items()}
    _, definitions = load(path).app.run(defs=wrong)
    single, _ = checks(definitions)
    for view in single:
        assert view.state == "fail" and view.hint(1) == view.outcomes[0].hints[0], f"\n{view}"
        assert "Traceback" not in view.html


@names
def test_the_learners_file_holds_no_answer(path):
    """A typed answer stands in no blank, and no line of a solution's own stands in the tutorial."""
    source = path.read_text(encoding="utf-8")
    solution = (path.parent / "solutions" / path.name).read_text(encoding="utf-8")
    given = {line.strip() for line in source.splitlines()}
    tree = ast.parse(solution)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in answers(path)]
    for function in functions:
        assert set(map(str.strip, ast.get_source_segment(solution, function).splitlines())) - given, function.name


def test_an_early_look_in_a_step_is_found_with_its_line():
    def train(model, opt, batches):
        losses = []
        for x, y in batches:
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.item())
            opt.step()
            opt.zero_grad()
        return losses

    path = ROOT / "tutorials" / "03_three_modes.py"
    _, definitions = load(path).app.run(defs={**answers(path), "train": train})
    (outcome,) = definitions["without_flush"].outcomes
    assert outcome.state == "fail" and "`losses.append(loss.item())` flushes the graph" in outcome.rest
    (marked,) = [line for line in outcome.code if line.marked]
    assert marked.before.strip() == "losses.append(loss.item())"
    assert [(score.name, score.yours) for score in outcome.scores] == [("launches", 2), ("misses", 3)]
