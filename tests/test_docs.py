"""The pages beside the README are true: their code prints what they show, and what they name exists."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / name
    for name in ("tpu_lab/backend/README.md", "tpu_lab/DIFFERENCES.md", "notebooks/README.md", "tutorials/GLOSSARY.md")
]


def outputs(page: Path) -> list[str]:
    """What each python block of a page prints, run in order in one namespace."""
    names: dict = {"__name__": "__main__"}
    printed = []
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"<block {number} of {page.name}>", "exec"), names)
        printed.append(out.getvalue())
    return printed


def shown(page: Path) -> list[str]:
    """What a page says its python blocks print: the text block that follows each."""
    return [text or "" for text in re.findall(r"```python\n.*?```(?:\s*```text\n(.*?)```)?", page.read_text(), re.S)]


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda p: p.parent.name)
def test_the_code_of_a_page_prints_what_it_shows(page):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, str(page)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "".join(shown(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_what_a_page_names_exists(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset|href)="([^":]+)"', text)
    assert links or "`" in text
    assert [name for name in links if not (page.parent / name).exists()] == []
    files = {name for name in re.findall(r"`([\w/]+\.py)`", text)}
    assert [f for f in files if not any((base / f).exists() for base in (page.parent, ROOT, ROOT / "tpu_lab"))] == []


def test_the_gallery_shows_every_notebook():
    text = (ROOT / "notebooks/README.md").read_text()
    for notebook in (ROOT / "notebooks").glob("*.py"):
        assert f"({notebook.name})" in text and f"screenshots/{notebook.stem}_dark.png" in text, notebook.name


def test_the_differences_page_counts_ops_as_the_table_does():
    first = (ROOT / "tpu_lab/backend/OPS.md").read_text().split("\n\n")[1]
    counts = re.findall(r"\d+", first)
    assert len(counts) == 4 and re.search("{} of those {}, and {} of {}".format(*counts), PAGES[1].read_text()), first


if __name__ == "__main__":
    print("".join(outputs(Path(sys.argv[1]))), end="")
