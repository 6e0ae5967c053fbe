"""The notebooks of the modes and of one's own model in a real Chromium: moved, edited, run, light and dark, no network."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import screenshots as browser  # the server and the sealed browser, next to this file

pytest.importorskip("playwright", reason="the browser tests need playwright: pip install playwright")
pytestmark = pytest.mark.skipif(
    browser.chromium() is None,
    reason=f"no Chromium on this machine (looked for {', '.join(browser.CHROMIUM)}): apt-get install chromium",
)

NOTEBOOKS = browser.ROOT / "notebooks"
ALL_THERE = re.compile(r"^\d+ ops; TorchTPU has them all$")
BROKEN = "class Net(nn.Module):\n    def forward(self, x):\n        return self.layer(x)\n"


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    """The notebook of the modes with a smaller network and without the modes that compile longest; all else as it is."""
    source = (NOTEBOOKS / "modes.py").read_text()
    small = {"modes": '["strict", "fused"]', "width": "32", "layers": "1", "batch": "16", "steps": "2"}
    for name, value in small.items():
        source, changed = re.subn(rf'"{name}": [^\n]+,\n', f'"{name}": {value},\n', source, count=1)
        assert changed == 1
    path = tmp_path_factory.mktemp("notebook") / "modes.py"
    path.write_text(source)
    with browser.served(path) as url:
        yield url


@pytest.fixture(scope="module")
def your_model():
    with browser.served(NOTEBOOKS / "your_model.py") as url:
        yield url


def inside(page):
    """Nothing is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_modes_more_layers_are_more_launches_where_each_op_is_one(modes):
    with browser.opened(modes, "light") as (page, seen):
        browser.settle(page, "What we saw")
        page.get_by_text("The same step, 23 launches or 1").first.wait_for()
        page.get_by_text("Launches a step: 23 strict, 1 fused.").wait_for()
        before = page.get_by_role("figure").first.screenshot()
        page.get_by_role("slider").nth(1).focus()
        page.keyboard.press("ArrowRight")  # two layers
        page.get_by_text("Launches a step: 33 strict, 1 fused.").wait_for(timeout=120_000)
        page.get_by_text(re.compile("^What changed, fused: ")).wait_for()
        page.get_by_text("The same step, 33 launches or 1").first.wait_for()
        assert page.get_by_role("figure").first.screenshot() != before
        assert inside(page) and not seen.errors and not seen.outside


def test_modes_a_mode_is_switched_on_and_all_are_switched_off(modes):
    with browser.opened(modes, "dark", width=900) as (page, seen):
        browser.settle(page, "What we saw")
        assert page.get_by_text("waits after each op").count() == 0
        page.get_by_role("checkbox", name="debug").click()
        page.get_by_text("Launches a step: 23 debug, 23 strict, 1 fused.").wait_for(timeout=120_000)
        page.get_by_text("waits after each op, to find the one that fails").wait_for()
        assert inside(page)
        for mode in ("debug", "strict", "fused"):
            page.get_by_role("checkbox", name=mode).click()
        page.get_by_text("No mode is chosen: choose one, and the step runs in it").wait_for(timeout=120_000)
        assert not seen.errors and not seen.outside


def test_your_model_another_example_is_another_answer(your_model):
    with browser.opened(your_model, "light") as (page, seen):
        browser.settle(page, "What we saw")
        page.get_by_text(ALL_THERE).first.wait_for()
        page.get_by_text("XLA:TPU v6e makes").first.wait_for()
        before = page.get_by_role("figure").first.screenshot()
        page.locator("select").select_option("an op that TorchTPU lacks")
        page.get_by_text("Replace aten.mish.").wait_for(timeout=60_000)
        page.get_by_text("TorchTPU lacks 1 of them: aten.mish at model.py:10").first.wait_for()
        page.get_by_text(re.compile("^What changed: ")).wait_for()
        assert page.get_by_role("figure").first.screenshot() != before
        assert inside(page) and not seen.errors and not seen.outside


def test_your_model_edited_code_waits_for_the_button_and_its_error_is_a_sentence(your_model):
    with browser.opened(your_model, "dark") as (page, seen):
        browser.settle(page, "What we saw")
        page.locator(".cm-content").first.click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(BROKEN)
        page.get_by_role("textbox").last.focus()  # out of the editor
        page.get_by_text("The code was edited: the button runs it, and below is what ran before").wait_for()
        assert page.get_by_text(ALL_THERE).count() and page.get_by_text("Line 3").count() == 0
        page.get_by_role("button", name="Run this code").click()
        page.get_by_text("It does not run yet").wait_for(timeout=60_000)
        page.get_by_text(
            "Line 3, “return self.layer(x)”: AttributeError, 'Net' object has no attribute 'layer'"
        ).wait_for()
        assert page.get_by_text("Traceback").count() == 0 and page.get_by_text(ALL_THERE).count() == 0
        page.locator(".cm-content").first.click()
        page.keyboard.press("Control+A")
        page.keyboard.insert_text("model = nn.Linear(32, 8)\n")
        page.get_by_role("button", name="Run this code").click()
        page.get_by_text("has not seen it yet").wait_for(timeout=60_000)
        assert page.get_by_text("It does not run yet").count() == 0
        assert not seen.errors and not seen.outside
