"""The notebooks in a real Chromium: a control is moved, numbers and pictures change, light and dark, no network."""

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
import screenshots as browser  # the server and the sealed browser, next to this file

pytest.importorskip("playwright", reason="the browser tests need playwright: pip install playwright")
pytestmark = pytest.mark.skipif(
    browser.chromium() is None,
    reason=f"no Chromium on this machine (looked for {', '.join(browser.CHROMIUM)}): apt-get install chromium",
)

NOTEBOOKS = browser.ROOT / "notebooks"


@pytest.fixture(scope="module")
def hello():
    with browser.served(NOTEBOOKS / "hello.py") as url:
        yield url


@pytest.fixture(scope="module")
def mingpt(tmp_path_factory):
    """The minGPT notebook with fewer steps and letters, so that the test is short; all else as it is."""
    values = {"steps": 20, "letters": 20, "layers": 1, "width": 32, "block": 16}
    path = browser.smaller("mingpt", values, tmp_path_factory.mktemp("notebook"))
    with browser.served(path) as url:
        yield url


def press(page, index, key):
    """Move the slider number `index` of the page one step with the keyboard, as a user may."""
    page.get_by_role("slider").nth(index).focus()
    page.keyboard.press(key)


def greys(png):
    """The picture's brightness, 0 to 255, as rows of pixels."""
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("L"))


def test_the_gallery_shows_a_card_for_each_notebook_and_opens_it():
    with browser.gallery() as url, browser.opened(url, "light") as (page, seen):
        cards = page.get_by_role("link")
        cards.first.wait_for()
        assert cards.count() == len(list(NOTEBOOKS.glob("*.py")))
        hello = cards.filter(has_text="Hello, TPU device")
        assert "One minute." in hello.inner_text()
        picture = hello.get_by_role("img").first
        assert (
            picture.evaluate("image => image.complete && image.naturalWidth") == 1000
        )  # the card's own, no placeholder
        with page.expect_popup() as popup:
            hello.click()
        browser.settle(popup.value, "What we saw")
        popup.value.get_by_text("4 launches in strict mode, 1 in fused").wait_for()
        assert not seen.errors and not seen.outside


def test_the_gallery_is_closed_to_a_wrong_token():
    with browser.gallery() as url, browser.opened(url[:-4] + "nope", "light") as (page, _):
        page.get_by_role("textbox").wait_for()  # marimo asks for the right one
        assert "/auth/login" in page.url and page.get_by_text("Hello, TPU device").count() == 0


def test_hello_moving_a_slider_cuts_the_fused_program(hello):
    with browser.opened(hello, "light") as (page, seen):
        browser.settle(page, "What we saw")
        page.get_by_text("4 launches in strict mode, 1 in fused").wait_for()
        before = page.screenshot()
        press(page, 1, "ArrowLeft")  # look after op 3
        page.get_by_text("4 launches in strict mode, 2 in fused").wait_for(timeout=30_000)
        fused = page.get_by_role("figure", name=re.compile("^fused mode: 2 launches a run"))
        assert fused.get_by_text("relu", exact=True).count() == 2
        assert page.screenshot() != before
        assert page.get_by_text("hit", exact=True).count() >= 6
        assert not seen.errors and not seen.outside


def test_hello_a_new_shape_is_not_a_hit_and_then_it_is(hello):
    with browser.opened(hello, "light") as (page, seen):
        browser.settle(page, "What we saw")
        first = page.get_by_role("figure", name=re.compile("^fused mode")).get_attribute("aria-label")
        press(page, 0, "ArrowRight")  # 80 rows
        changed = page.get_by_role("figure", name=re.compile("^fused mode: 1 launch a run; (miss|disk), hit$"))
        changed.wait_for(timeout=30_000)
        press(page, 0, "ArrowLeft")  # back
        page.get_by_role("figure", name="fused mode: 1 launch a run; hit, hit").wait_for(timeout=30_000)
        assert first.endswith("hit")
        assert not seen.errors and not seen.outside


def test_mingpt_another_mode_changes_the_report(mingpt):
    with browser.opened(mingpt, "light") as (page, seen):
        browser.settle(page, "What we saw")
        summary = page.get_by_text(re.compile(r"ops ran as [\d,]+ launches\."))
        fused = summary.inner_text()
        curve = page.get_by_role("img", name=re.compile("nats a character after 20 steps"))
        curve.first.wait_for()
        assert " as 20 launches" in fused
        page.locator("select").first.select_option("strict")
        page.wait_for_function(
            "before => { const t = document.body.innerText.match(/ops ran as ([\\d,]+) launches\\./); "
            "return t && t[1] !== before }",
            arg="20",
            timeout=90_000,
        )
        launches = int(re.search(r"as ([\d,]+) launches", summary.inner_text())[1].replace(",", ""))
        assert launches > 20 * 50
        assert not seen.errors and not seen.outside


def test_mingpt_the_report_stands_beside_the_curve_and_under_it_when_narrow(mingpt):
    with browser.opened(mingpt, "light", width=1600) as (page, _):
        browser.settle(page, "What we saw")
        curve = page.get_by_role("img", name=re.compile("nats a character after")).first.bounding_box()
        report = page.get_by_role("figure").first.bounding_box()
        assert report["x"] > curve["x"] + curve["width"] and report["width"] >= 700
        page.set_viewport_size({"width": 900, "height": 1000})
        page.wait_for_timeout(500)
        curve = page.get_by_role("img", name=re.compile("nats a character after")).first.bounding_box()
        report = page.get_by_role("figure").first.bounding_box()
        assert report["y"] > curve["y"] + curve["height"]
        assert report["x"] + report["width"] <= 900


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(hello, scheme):
    with browser.opened(hello, scheme) as (page, seen):
        browser.settle(page, "What we saw")
        ground = greys(page.screenshot())[-5:, :5].mean()
        assert ground > 240 if scheme == "light" else ground < 40
        word = page.get_by_role("figure").first.get_by_text("strict", exact=True)
        ink = greys(word.screenshot())
        ink = ink.min() if scheme == "light" else ink.max()
        assert abs(ground - ink) > 150, "words can be read on the ground"
        assert not seen.errors and not seen.outside
