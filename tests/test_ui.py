"""What is picked in one view is marked in the others, by itself and through marimo's tables."""

import re
import subprocess
import sys

import marimo as mo
import pytest
import torch
from fixtures import traces

import tpu_lab
from tpu_lab.profile import VIEWS, Profile
from tpu_lab.viz import linked, marks

app = mo.App()


@app.cell
def _():
    import sys

    profile = sys.modules["test_ui_profile"]
    picked = profile.ui({"line": "model.py:54"})
    return picked, profile


@app.cell
def _(picked):
    selection = picked.value
    return (selection,)


@app.cell
def _(profile, selection):
    shown = profile.marked(selection)
    shown
    return (shown,)


@pytest.fixture(scope="module")
def profile():
    sys.modules["test_ui_profile"] = found = Profile(traces.mingpt(4), peak_flops=1e11)
    yield found
    del sys.modules["test_ui_profile"]


@pytest.fixture(scope="module")
def fused():
    """A real step whose ops are fused, with its program."""
    x, w = torch.ones(8, 8, device="tpu"), torch.ones(8, 8, device="tpu")
    return tpu_lab.profile(lambda: torch.nn.functional.gelu(x @ w + 1.0).sum().item(), mode="fused", peak_flops=1e9)


def rows(html, kind, value):
    return len(re.findall(f'data-{kind}="{re.escape(value)}"', html))


def test_a_cell_picks_and_the_next_marks(profile):
    _, names = app.run()
    assert names["selection"] == {"op": None, "line": "model.py:54", "fusion": None}
    assert names["shown"].html == profile.marked({"line": "model.py:54"}).html


def test_a_test_needs_no_browser(profile):
    _, names = app.run(defs={"selection": {"op": 1380}})
    title = names["shown"].title
    assert title.startswith("Op 1,380, ") and title.endswith(", in every view")


def test_the_title_says_of_an_op_only_what_is_its_own(fused):
    gelu = next(o.index for o in fused.trace.ops if "gelu" in o.name)
    line, letter = (linked.resolve(fused.metrics, {"op": gelu})[kind] for kind in ("line", "fusion"))
    own = fused.marked({"op": gelu}).title
    assert own == f"Op {gelu}, gelu at {line} in fusion {letter}, in every view"
    assert fused.marked({"op": gelu, "line": "other.py:3"}).title == own.replace(f" at {line}", "; line other.py:3")
    assert fused.marked({"op": gelu, "fusion": "Z"}).title == own.replace(f" in fusion {letter}", "; fusion Z")
    assert fused.marked({"line": line, "fusion": letter}).title == f"Line {line} in fusion {letter}, in every view"
    assert fused.marked({"line": line, "fusion": "Z"}).title == f"Line {line}; fusion Z, in every view"


def test_an_op_brings_its_line_and_its_fusion(fused):
    picker = fused.ui()
    assert picker.value == {"op": None, "line": None, "fusion": None}
    gelu = next(op for op in fused.trace.ops if "gelu" in op.name)
    picker._update({"op": [str([r["op"] for r in picker.elements["op"].data].index(gelu.index))]})
    assert picker.value["op"] == gelu.index and picker.value["line"] == f"test_ui.py:{gelu.line}"
    assert picker.value["fusion"]
    page = fused.marked(picker.value)
    for kind, value in picker.value.items():
        assert rows(str(page.body), kind, str(value)), kind
    assert {"ops", "fusions"} & set(page.rows[page.rows.marks > 0].view)
    picker._update({"op": []})
    assert picker.value == {"op": None, "line": None, "fusion": None}


def test_the_tables_hold_the_drawn_step(profile):
    tables = profile.ui().elements
    ops, lines = tables["op"].data, tables["line"].data
    assert len(ops) == 458 and ops[0]["op"] == profile.metrics.span.ops[0]
    assert sum(r["ops"] for r in lines) == sum(1 for r in ops if r["line"])
    assert sum(r["ms"] for r in lines) == pytest.approx(sum(r["ms"] for r in ops if r["line"]), rel=1e-3)
    assert lines == sorted(lines, key=lambda r: -r["ms"])


def test_marks_open_the_folds_that_hold_them_and_nothing_else(profile):
    op = profile.metrics.span.ops[0] + 14
    page = profile.marked({"op": op})
    body = str(page.body)
    assert rows(body, "op", str(op)) == 1
    before = body[: body.index(f'data-op="{op}"')]
    opened = re.findall("<details[^>]*>|</details>", before)
    stack = []
    for tag in opened:
        stack.pop() if tag == "</details>" else stack.append(tag)
    assert stack and set(stack) == {"<details open>"}
    nothing = profile.marked()
    assert nothing.title == "Nothing is picked" and "<details open>" not in str(nothing.body)
    assert "data-marks" not in nothing.html
    assert profile.marked({"op": op}).html == page.html


def test_every_view_is_there(profile):
    page = profile.marked({"line": "model.py:54"})
    assert page.rows.view.tolist() == [v for v in VIEWS if v != "summary"]
    assert page.rows.set_index("view").marks["ops"] >= 2
    assert "model.py:54" in str(page) and "data-marks=" in page._repr_html_()


def test_a_name_that_is_markup_ends_no_rule():
    evil = 'a"]}</style><script>b:1'
    mark, rules = marks.style({"line": evil})
    assert "</style>" not in rules and "<" not in rules.replace("\\3c ", "") and mark in rules
    html, count = marks.unfold('<details><p data-line="a&#34;]}&lt;/style&gt;&lt;script&gt;b:1">', {"line": evil})
    assert count == 1 and html.startswith("<details open>")


@pytest.mark.parametrize(
    "picked, error, sentence",
    [
        ({"op": 10**6}, KeyError, "no op 1000000"),
        ({"module": "h.0"}, ValueError, "pick by op, line, fusion, not by module"),
    ],
)
def test_wrong_picks_are_told(profile, picked, error, sentence):
    with pytest.raises(error, match=sentence):
        profile.marked(picked)
    with pytest.raises(error, match=sentence):
        profile.ui(picked)


def test_an_op_of_another_step_cannot_be_picked_at_first(profile):
    with pytest.raises(ValueError, match="has ops 1374 to 1831"):
        profile.ui({"op": 3})


def test_an_empty_profile_has_empty_tables():
    picker = Profile(traces.empty()).ui()
    assert picker.value == {"op": None, "line": None, "fusion": None}


def test_marimo_is_imported_when_asked_for():
    code = "import sys, tpu_lab; tpu_lab.Profile; assert 'marimo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_picker_is_no_blank_outside_marimo(profile):
    from IPython.core.formatters import DisplayFormatter

    picker = profile.ui()
    shown, _ = DisplayFormatter().format(picker)
    assert all("p.marked({'op': 17})" in text for text in shown.values()) and "text/html" in shown
    assert "marimo-table" in mo.as_html(picker).text
