"""The tutorials: checked by marimo; as shipped they hint and never raise; with the answers put in, every check ticks."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tpu_lab.models import mingpt
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


# ---- answers that do their work elsewhere, and what is said of them ---------------------------------------------------


def judged(stem, name, **given):
    """What the check `name` of a tutorial says, with these answers in place of the right ones."""
    path = ROOT / "tutorials" / f"{stem}.py"
    _, definitions = load(path).app.run(defs={**answers(path), **given})
    (outcome,) = definitions[name].outcomes
    return outcome


def there_and_back(model, opt, batches):
    """The loop of 3.5, on the CPU."""
    model.to("cpu")
    losses = []
    for x, y in batches:
        loss = (model(x.cpu()) - y.cpu()).square().mean()
        loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    model.to("tpu")
    return losses


def by_formula(w, x, y):
    w.grad = (2 * x.t() @ (x @ w - y) / 16).detach()
    return w.grad


def typed_in(x):
    return torch.full((), 64 * 128 * 9.0, device="tpu")


def scale_elsewhere(x, j, factor):
    moved = x.cpu()
    moved[:, j] *= factor
    x.copy_(moved)


def scale_in_part(x, j, factor):
    x[:, j] = x.cpu()[:, j] * factor


def normalise_elsewhere(x):
    y = x.cpu() - x.cpu().mean(1, keepdim=True)
    x.copy_(y / y.abs().amax(1, keepdim=True))
    return x


def likeliest_number(logits, k):
    return int(logits.cpu()[0, k].argmax())


def likeliest_here(logits, k):
    return logits.cpu()[0, k].argmax()


def likeliest_moved(logits, k):
    return logits.cpu()[0, k].argmax().to("tpu")


def quiet_elsewhere(model, optimizer, images, labels):
    model.to("cpu")
    logits = model(images.cpu())
    loss = torch.nn.functional.cross_entropy(logits, labels.cpu())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    right = (logits.argmax(1) == labels.cpu()).float().mean()
    model.to("tpu")
    return loss.detach().to("tpu"), right.to("tpu")


def train_elsewhere(model, batches):
    model.to("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids, following in batches:
        loss = mingpt.loss(model, ids, following)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("stem", "name", "given", "said"),
    [
        ("01_first_tensor", "go_there", {"double": lambda x: (x * 2).to("tpu")}, "nothing was computed on `tpu`"),
        ("01_first_tensor", "go_there", {"double": lambda x: torch.tensor([2.0, 4, 6]).to("tpu")}, "nothing was computed"),
        ("01_first_tensor", "by_gradient", {"gradient": by_formula}, "holds no backward op"),
        ("03_three_modes", "for_a_block", {"quick": typed_in}, "nothing was computed on `tpu`"),
        ("03_three_modes", "without_flush", {"train": there_and_back}, "nothing was computed on `tpu`"),
        ("04_views_and_writes", "through_a_view", {"scale_column": scale_elsewhere}, "nothing was computed on `tpu`"),
        ("04_views_and_writes", "through_a_view", {"scale_column": scale_in_part}, "nothing was computed on `tpu`"),
        ("04_views_and_writes", "half_the_memory", {"normalise": normalise_elsewhere}, "nothing was computed on `tpu`"),
        ("05_fusion_boundaries", "one_launch", {"quiet": quiet_elsewhere}, "nothing was computed on `tpu`"),
        ("06_compile_cache", "a_number", {"likeliest": likeliest_number}, "gives a Python `int`, and a tensor on the"),
        ("06_compile_cache", "a_number", {"likeliest": likeliest_here}, "gives a tensor on `cpu`, and a tensor on the"),
        ("06_compile_cache", "a_number", {"likeliest": likeliest_moved}, "nothing was computed on `tpu`"),
    ],
)
def test_work_on_the_cpu_does_not_tick(stem, name, given, said):
    outcome = judged(stem, name, **given)
    assert outcome.state == "fail" and outcome.hints and said in f"{outcome.lead} {outcome.rest}", outcome


def test_a_training_on_the_cpu_ticks_none_of_the_capstone():
    path = ROOT / "tutorials" / "08_capstone.py"
    _, definitions = load(path).app.run(defs={**answers(path), "train": train_elsewhere})
    for name in ("few_launches", "few_misses", "few_bytes"):
        (outcome,) = definitions[name].outcomes
        assert outcome.state == "fail" and outcome.rest.startswith("nothing was computed on `tpu`"), outcome


@pytest.mark.parametrize(
    ("stem", "name", "given"),
    [
        ("01_first_tensor", "go_there", {"double": lambda x: x.to("tpu") + x.to("tpu")}),
        ("01_first_tensor", "by_gradient", {"gradient": lambda w, x, y: torch.autograd.grad((x @ w - y).square().mean(), w)[0]}),
        ("03_three_modes", "for_a_block", {"quick": lambda x: torch.compile(lambda x: ((x * 2 + 1).relu() ** 2).sum(), backend="tpu")(x)}),
        ("04_views_and_writes", "through_a_view", {"scale_column": lambda x, j, factor: x.select(1, j).mul_(factor)}),
        ("05_fusion_boundaries", "without_asking", {"factor": lambda norm: torch.where(norm > 1, 1 / norm, torch.tensor(1.0, device="tpu"))}),
        ("06_compile_cache", "a_number", {"likeliest": lambda logits, k: logits[0].argmax(-1).index_select(0, torch.tensor([k]).to("tpu"))}),
    ],
)  # fmt: skip
def test_other_right_answers_tick(stem, name, given):
    outcome = judged(stem, name, **given)
    assert outcome.state == "pass", outcome


def asks(norm):
    return norm.item()


def test_a_question_in_a_helper_is_a_question():
    def factor(norm):
        asks(norm)
        return 1 / norm.clamp(min=1.0)

    outcome = judged("05_fusion_boundaries", "without_asking", factor=factor)
    assert outcome.state == "fail" and outcome.lead == "Not yet: `return norm.item()` waits for a value."


def test_losses_that_are_stacked_are_told_of_their_program():
    def train(model, opt, batches):
        losses = []
        for x, y in batches:
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.detach())
            opt.step()
            opt.zero_grad()
        return torch.stack(losses).tolist()

    outcome = judged("03_three_modes", "without_flush", train=train)
    assert outcome.state == "fail" and "`return torch.stack(losses).tolist()` makes one program more" in outcome.rest
    assert [line.before.strip() for line in outcome.code if line.marked] == ["return torch.stack(losses).tolist()"]


def test_ones_and_zeros_are_not_taken_for_a_wrong_guess():
    for stem, name, given in (
        ("02_lower_an_op", "for_nothing", {"both_work": (np.True_, np.True_)}),
        ("04_views_and_writes", "who_shares", {"shares": (1, 1, 0, 0)}),
    ):
        assert "is neither `True` nor `False`" in judged(stem, name, **given).lead
