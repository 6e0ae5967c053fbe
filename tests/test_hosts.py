"""A profile in the places that show it: a Jupyter kernel, marimo, a terminal, a pipe."""

import os
import re
import subprocess
import sys

import marimo as mo
import nbclient
import nbformat
import pytest
from fixtures import recorded

from tpu_lab.profile import VIEWS, Profile

CODE = f"from tpu_lab.profile import Profile\np = Profile.from_json({str(recorded.FILE)!r})"
ANSI = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def profile():
    return Profile.from_json(recorded.FILE)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """A notebook that a real kernel has run: its cells' outputs."""
    sources = [
        CODE,
        "p",
        "%load_ext tpu_lab\nimport torch\nx = torch.ones(8, 8, device='tpu')",
        "%%tpu_profile -v q --view summary,ops\ny = (x @ x).relu()\ntotal = y.sum().item()",
        "%tpu_profile -v r -w 1 x + 1",
        "%tpu_profile x + 1;",
        *[f"p.{name}" for name in VIEWS],
        "print(total, q.trace.ops[0].line, len(r.trace.ops))",
        "%%tpu_profile\nx * 2\n1 / 0",
    ]
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    folder = tmp_path_factory.mktemp("kernel")
    nbclient.NotebookClient(
        notebook, timeout=200, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell.outputs for cell in notebook.cells]


def check_bundle(data):
    html, text = data["text/html"], data["text/plain"]
    assert html.startswith('<div class="tl" role="figure"') and "<script" not in html
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100
    return text


def test_jupyter_shows_a_page_and_a_text(executed, profile):
    (shown,) = executed[1]
    text = check_bundle(shown.data)
    assert len(text.splitlines()) <= 25 and text == str(profile)
    assert shown.data["text/html"] == profile._repr_html_()


def test_the_magic_in_a_kernel(executed):
    assert [o.output_type for o in executed[3]] == ["display_data", "display_data"]
    for output in executed[3]:
        check_bundle(output.data)
    assert "cell:1" in executed[3][1].data["text/plain"]  # the user's own line
    assert len(executed[4]) == 1 and executed[5] == []
    assert executed[6 + len(VIEWS)][0].text == "512.0 1 2\n"
    report, error = executed[-1]
    assert "stopped by ZeroDivisionError" in check_bundle(report.data) and error.ename == "ZeroDivisionError"


def test_every_view_in_a_kernel(executed, profile):
    for name, outputs in zip(VIEWS, executed[6:]):
        assert [o.output_type for o in outputs] == ["execute_result"], (name, outputs)
        assert check_bundle(outputs[0].data) == str(profile.view(name))


def test_marimo_shows_the_same_page_without_a_frame(profile):
    for shown in (profile, *map(profile.view, VIEWS)):
        html = mo.as_html(shown).text
        assert "<iframe" not in html and html.count('role="figure"') == 1
        assert shown._repr_html_() in html


def test_a_pipe_and_a_terminal(profile):
    """Colours for a terminal only, and only where they are wanted; the words are the same."""
    script = f"import sys\n{CODE}\nprint(repr(p))"
    plain = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=120)
    assert plain.stdout.decode() == f"{profile}\n"
    if os.name != "posix":
        return
    import pty

    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=theirs, env={**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        said += more
    assert child.wait(60) == 0
    os.close(ours)
    text = said.decode().replace("\r\n", "\n")
    assert "\x1b[" in text and ANSI.sub("", text) == f"{profile}\n"


def test_a_terminal_that_knows_only_ascii(profile):
    script = f"{CODE}\nprint(repr(p))"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=120, env=env)
    assert done.stdout.decode("ascii") == profile.summary.text(ascii=True) + "\n"
