"""The Jupyter twins and the recorded results: what the commands make, and that what is in the tree is what they make now."""

import json
import re

import nbformat
import pytest

from tpu_lab import cli, recorded, twins, twins_run
from tpu_lab.viz import page, still

ALL = twins.all_notebooks()
TUTORIALS = [path for path in ALL if path.parent.name == "tutorials"]
stems = {"ids": lambda path: path.stem}

NOTEBOOK = '''
import marimo

app = marimo.App()

with app.setup:
    import marimo as mo
    from tpu_lab.viz import page


@app.cell(hide_code=True)
def _():
    mo.md("""
    # Title

    **Question?** See `other.py` and `gone.py`.
    """)
    return


@app.cell
def _():
    # What the controls start with. A test, or you, can put other values here.
    params = {"rows": 4}
    return (params,)


@app.function
def double(x):
    """Twice."""
    return 2 * x


@app.cell(hide_code=True)
def _(params):
    rows = mo.ui.slider(1, 8, value=params["rows"])
    page.stack(mo.md("""
        ## Part

        Prose of `other.py`.
        """), page.facts((rows.value, "rows")))
    return (rows,)


@app.cell
def _(rows):
    doubled = double(rows.value)
    doubled
    return (doubled,)


@app.cell(hide_code=True)
def _():
    mo.md("code") if mo.app_meta().mode == "run" else None
    return


if __name__ == "__main__":
    app.run()
'''


@pytest.fixture
def lesson(tmp_path):
    """A notebook of one of each kind of cell, with a neighbour and a closing cell."""
    folder = tmp_path / "notebooks"
    (folder / "jupyter").mkdir(parents=True)
    (folder / "other.py").write_text(NOTEBOOK)
    (folder / "jupyter" / ".your_turn.md").write_text(
        "# lesson\n\n## Your turn\n\nDo.\n\n```python\n%%tpu_profile\n1\n```\n\n# x\n"
    )
    path = folder / "lesson.py"
    path.write_text(NOTEBOOK)
    return path


def test_each_kind_of_cell_becomes_what_jupyter_knows(lesson):
    book = twins.book(lesson)
    nbformat.validate(nbformat.from_dict(json.loads(twins.written(book))))
    found = twins.sources(book)
    assert [kind for kind, _ in found] == [
        "markdown",
        "code",
        "markdown",
        "code",
        "code",
        "markdown",
        "code",
        "code",
        "markdown",
        "code",
    ]
    texts = [text for _, text in found]
    assert texts[0].startswith("# Title\n") and "%pip install" in texts[0]
    assert "marimo as mo" not in texts[1] and texts[1].endswith("%load_ext tpu_lab")
    assert texts[3] == 'params = {"rows": 4}' and "number here" in texts[2]
    assert texts[4].startswith("def double(x):\n    ")
    assert texts[5] == "## Part\n\nProse of `other.ipynb`.", "a neighbour is named by its twin"
    assert texts[6].startswith("rows = mo.ui.slider") and texts[6].endswith(
        'page.stack(page.facts((rows.value, "rows")))'
    )
    assert texts[-2:] == ["## Your turn\n\nDo.", "%%tpu_profile\n1"]
    assert "source_hidden" in str(book["cells"][6]["metadata"]) and not book["cells"][7]["metadata"]


def test_a_cell_that_needs_a_later_one_is_refused(lesson):
    lesson.write_text(NOTEBOOK.replace("def _(params):", "def _(params, doubled):"))
    with pytest.raises(ValueError, match="uses doubled, which a later cell makes"):
        twins.book(lesson)


def test_the_command_writes_and_checks(lesson, capsys):
    assert cli.main(["twins", "--check", str(lesson)]) == 1
    assert cli.main(["twins", "--no-run", str(lesson)]) == 0
    assert cli.main(["twins", "--check", str(lesson)]) == 0
    lesson.write_text(NOTEBOOK.replace("Prose", "Verse"))
    assert twins.stale([lesson]) == [lesson]
    assert cli.main(["twins", str(lesson.parent / "none.py")]) == 2


def test_what_runs_is_kept_as_text_and_pictures(lesson):
    done = twins_run.run(twins.book(lesson), lesson.parent)
    drawn = []
    outputs = [
        twins_run.kept(c["outputs"], lambda html: drawn.append(html) or b"png") for c in done["cells"] if "outputs" in c
    ]
    shown = [output["data"] for found in outputs for output in found if "data" in output]
    assert ["4  rows"] in [data["text/plain"] for data in shown] and ["8"] in [data["text/plain"] for data in shown]
    assert not any("text/html" in data for data in shown), "a code host drops its style sheet"


def test_a_page_that_is_a_picture_is_drawn_and_folds_are_text():
    curve, folds = page.curve([3.0, 2.0], "it falls"), still.accordion({"Look": page.facts((1, "one"))})
    outputs = [
        {"output_type": "display_data", "data": {"text/html": p._repr_html_(), "text/plain": repr(p)}}
        for p in (curve, folds)
    ]
    first, second = twins_run.kept(outputs, lambda html: b"png")
    assert first["data"]["image/png"] == "cG5n" and first["data"]["text/plain"] == ["it falls"]
    assert "image/png" not in second["data"] and "".join(second["data"]["text/plain"]) == "Look\n----\n1  one"


def test_a_still_page_has_the_values_of_its_controls():
    ui = still.ui
    assert ui.slider(steps=[2, 4], value=4).value == 4 and ui.slider(1, 9).value == 1
    assert ui.dropdown({"one": 1, "two": 2}, value="two").value == 2 and ui.dropdown(["a", "b"]).value == "a"
    both = ui.dictionary({"a": ui.slider(1, 3, value=2), "b": ui.switch(True)})
    assert both.value == {"a": 2, "b": True} and "2" in page.as_html(both["a"])
    assert ui.run_button(label="Train").value is False
    assert list(still.status.progress_bar([1, 2], title="x")) == [1, 2]
    assert "<strong>b</strong>" in page.as_html(still.md("**b**")) and still.md("*a*")._repr_markdown_() == "*a*"


# ---- what is in the tree --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL, **stems)
def test_the_twin_in_the_tree_has_the_notebooks_cells(path):
    assert not twins.stale([path]), f"run: tpu-lab twins {path.parent.name}/{path.name}"
    file = twins.twin_of(path)
    book = nbformat.read(file, as_version=4)
    assert file.stat().st_size < 300_000
    assert "%%tpu_profile" in book.cells[-1].source
    shown = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert shown and not [o for o in shown if o.output_type == "error"]
    assert all("text/plain" in o.data and "text/html" not in o.data for o in shown if "data" in o)


@pytest.mark.parametrize("path", TUTORIALS, **stems)
def test_the_recorded_results_are_of_the_tutorials_own_checks(path):
    text = (path.parent / recorded.FOLDER / f"{path.stem}.md").read_text(encoding="utf-8")
    numbers = set(re.findall(r'^        "(\d\.\d)",$', path.read_text(encoding="utf-8"), re.M))
    assert numbers and {n for n in numbers if f"\u2713 {n} \u00b7 " in text} == numbers
    assert (
        re.search(r": all \d checks tick$", text, re.M)
        and "## What we saw" in text
        and "\u2717" not in text.split("## What we saw")[-1]
    )


@pytest.mark.parametrize("stem", ["01_first_tensor", "04_views_and_writes"])
def test_a_tutorials_twin_ticks_in_jupyter(stem):
    """With the answers; the other tutorials run in `tpu-lab twins` and `tpu-lab recorded`."""
    (path,) = [path for path in TUTORIALS if path.stem == stem]
    done = twins_run.run(recorded.answered(path), path.parent.parent)
    assert re.search(r": all \d checks tick\n", recorded.page(done, path))


def test_a_cell_that_fails_is_told(lesson):
    lesson.write_text(NOTEBOOK.replace("double(rows.value)", "1 / 0"))
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        twins_run.run(twins.book(lesson), lesson.parent)


def test_a_twin_that_is_too_large_gives_up_its_largest_pictures():
    pictures = ["p" * 1000, "q" * 9000, "r" * 2000]
    outputs = [{"data": {"image/png": picture, "text/plain": ["x"]}} for picture in pictures]
    book = {"cells": [{"cell_type": "code", "outputs": outputs}]}
    twins_run.fit(book, most=4_000)
    assert ["image/png" in output["data"] for output in outputs] == [True, False, True]
    assert all(output["data"]["text/plain"] == ["x"] for output in outputs)
