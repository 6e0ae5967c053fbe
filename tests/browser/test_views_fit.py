"""In a real Chromium: nothing of a view is cut or sticks out, also in a wide face and a narrow cell; no console error."""

import sys
from pathlib import Path

import pytest
from fixtures import traces

from tpu_lab.chips import Peak
from tpu_lab.metrics import Metrics
from tpu_lab.viz import cache, ops, summary

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("playwright", reason="the browser tests need playwright: pip install playwright")
from shoot import CHROMIUM  # noqa: E402  (next to this file; it imports playwright)

pytestmark = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason="no Chromium on this machine: apt-get install chromium"
)

PEAK = Peak(182e9, "f32", "this CPU\u2019s f32 matmul", "a test")
# Elements may end in an ellipsis where the stylesheet says so (shapes and paths, with the whole in `title`).
CUT = """() => [...document.querySelectorAll('.tl *')].filter(e => {
  if (e.closest('svg') || e.closest('.vh') || e.tagName === 'STYLE') return false;
  const style = getComputedStyle(e);
  const hides = style.overflowX !== 'visible' && style.textOverflow !== 'ellipsis' && e.scrollWidth > e.clientWidth + 1;
  const out = e.getBoundingClientRect().right > document.querySelector('.tl').getBoundingClientRect().right + 1;
  return hides || (out && style.display !== 'none' && !e.closest('.el'));
}).map(e => e.className + ': ' + e.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def page():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


@pytest.mark.parametrize("width", [748, 1100])
@pytest.mark.parametrize("view", [summary, ops, cache], ids=["summary", "ops", "cache"])
def test_nothing_is_cut_in_a_wide_face(page, view, width):
    errors = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.set_viewport_size({"width": width, "height": 800})
    for fixture in (traces.mingpt, traces.strict, traces.growing):
        html = view.draw(Metrics(fixture(), PEAK)).html.replace("<details>", "<details open>")
        page.set_content(
            f"<!doctype html><body style='margin:0;padding:24px'>{html}"
            "<style>.tl *:not(code) { font-family: 'DejaVu Sans' !important }</style>"
        )
        assert page.evaluate(CUT) == []
    assert errors == []


def test_the_check_can_fail(page):
    page.set_content(
        "<div class='tl' style='width:100px'><div style='overflow:hidden;width:50px;white-space:nowrap'>a very long sentence</div></div>"
    )
    assert len(page.evaluate(CUT)) == 1
