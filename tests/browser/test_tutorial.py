"""A tutorial in a real Chromium, as a learner has it: an answer is typed into its blank, and the check ticks or hints."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import screenshots as browser

pytest.importorskip("playwright", reason="the browser tests need playwright: pip install playwright")
pytestmark = pytest.mark.skipif(
    browser.chromium() is None,
    reason=f"no Chromium on this machine (looked for {', '.join(browser.CHROMIUM)}): apt-get install chromium",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Tutorial 01, opened to be edited; a copy, as marimo saves what is typed."""
    copy = tmp_path_factory.mktemp("tutorials") / "01_first_tensor.py"
    shutil.copy(browser.ROOT / "tutorials" / copy.name, copy)
    shutil.copy(browser.ROOT / "pyproject.toml", copy.parent)  # marimo runs it when it is opened
    command = ["marimo", "edit", str(copy), "--no-token", "--no-sandbox", "--skip-update-check", "--host", "127.0.0.1"]
    with browser.serving(command) as (url, _), browser.opened(url, "light") as (page, seen):
        page.get_by_text("Your first tensor: 0 of 5 checks tick").wait_for(timeout=120_000)
        yield page, seen


def answer(page, blank, text):
    """Type `text` over the line that begins with `blank`, and run its cell."""
    line = page.locator(".cm-line", has_text=blank).first
    line.click()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+End")
    page.keyboard.type(text)
    page.keyboard.press("Control+Enter")


def test_a_right_answer_ticks_and_a_wrong_one_gets_a_hint(page):
    page, seen = page
    page.get_by_text("type your answer into").first.wait_for()
    answer(page, "ops = ", "ops = 7")
    page.get_by_text("7 is too many.").first.wait_for(timeout=60_000)
    page.get_by_text("a number such as 2 is no op").first.wait_for(state="attached")
    answer(page, "ops = ", "ops = 4")
    page.get_by_text("is one call of PyTorch's").first.wait_for(timeout=60_000)
    page.get_by_text("Your first tensor: 1 of 5 checks tick").wait_for(timeout=60_000)
    page.get_by_role("button", name="Look: every op, in order").wait_for()
    assert not seen.outside
