"""The four showcases in a real Chromium, small: a result, a control that changes numbers and picture, light and dark.

Each page is opened once: opening it again would train its model again. The network is blocked.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import screenshots as browser  # the server and the sealed browser, next to this file

pytest.importorskip("playwright", reason="the browser tests need playwright: pip install playwright")
pytestmark = pytest.mark.skipif(
    browser.chromium() is None,
    reason=f"no Chromium on this machine (looked for {', '.join(browser.CHROMIUM)}): apt-get install chromium",
)


@dataclass(frozen=True)
class Show:
    """A notebook, its small parameters, the slider that is moved and the key that does it."""

    name: str
    small: dict[str, object] = field(hash=False)
    slider: int
    key: str
    changed: re.Pattern  # what the page says afterwards
    figure: int = 0  # the view that changes: which of the page
    at_once: tuple[int, str, str] | None = None  # a slider that is moved right after, its key, and what only both make


SHOWS = (
    Show(
        "mingpt",
        {"steps": 8, "letters": 8, "layers": 1, "width": 32, "block": 16, "read": 5},
        0,
        "ArrowLeft",
        re.compile("^What changed: "),
        at_once=(1, "ArrowRight", "minGPT d32 L1 B4 T32"),
    ),
    Show("resnet", {"channels": 4, "batch": 8, "steps": 4}, 1, "ArrowRight", re.compile("^What changed: ")),
    Show("dlrm", {"batch": 256, "width": 4, "rows": 16, "steps": 6}, 0, "ArrowLeft", re.compile("^What changed: ")),
    Show(
        "unet", {"sizes": 2, "bucket": 8}, 1, "ArrowRight", re.compile("^Padded to multiples of 16: programs 2 . "), 1
    ),
)
# What a user clicks next, and what the page then says.
BUTTONS = {
    "mingpt": (
        "Let it read 5 characters with either cache",
        "5 tokens: 5 programs as the cache grows, 1 with its places ready",
    )
}

# Words that are cut off at the side, stick out of the window, or lie on other words of the same curve.
CLIPPED = """() => {
  const seen = e => { const r = e.getBoundingClientRect(); return r.width > 1 && r.height > 1 && getComputedStyle(e).visibility !== 'hidden' };
  const words = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  const name = e => e.tagName + ' ' + e.textContent.trim().slice(0, 60);
  const out = [];
  for (const e of document.querySelectorAll('.output-area *, .tl *')) {
    if (!seen(e) || !words(e) || e.closest('.vh, caption, style, title, pre, .cm-editor')) continue;
    const style = getComputedStyle(e), r = e.getBoundingClientRect();
    let scrolls = false; for (let p = e; p; p = p.parentElement) scrolls ||= p !== document.body && p !== document.documentElement && getComputedStyle(p).overflowX !== 'visible' && p.scrollWidth > p.clientWidth;
    if (!e.closest('svg') && style.overflowX !== 'visible' && style.textOverflow !== 'ellipsis' && e.scrollWidth > e.clientWidth + 1) out.push('cut: ' + name(e));
    if (!scrolls && r.right > innerWidth + 1) out.push('outside: ' + name(e));
  }
  for (const svg of document.querySelectorAll('svg[role=img]')) {
    const texts = [...svg.querySelectorAll('text')].filter(seen).map(e => [e, e.getBoundingClientRect()]);
    texts.forEach(([e, a], i) => texts.slice(i + 1).forEach(([f, b]) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3) out.push('over one another: ' + name(e) + ' / ' + name(f));
    }));
  }
  return [...new Set(out)];
}"""


@pytest.mark.parametrize("show", SHOWS, ids=lambda show: show.name)
def test_a_control_changes_the_numbers_and_the_picture(show, tmp_path):
    notebook = browser.smaller(show.name, show.small, tmp_path)
    with browser.served(notebook) as url, browser.opened(url, "light", width=1100) as (page, seen):
        browser.settle(page, "What we saw", 300)
        figure = page.locator(".tl[role=figure]").nth(show.figure)
        figure.wait_for(timeout=120_000)
        before, told = figure.screenshot(), figure.inner_text()
        assert page.get_by_text(show.changed).count() == 0 and len(told) > 100
        browser.whole(page)
        assert page.evaluate(CLIPPED) == []

        page.get_by_role("slider").nth(show.slider).focus()
        page.keyboard.press(show.key)
        if show.at_once:
            other, key, both = show.at_once
            page.get_by_role("slider").nth(other).focus()
            page.keyboard.press(key)
            page.get_by_text(both).first.wait_for(timeout=180_000)
        page.get_by_text(show.changed).first.wait_for(timeout=180_000)
        page.wait_for_timeout(500)
        assert figure.screenshot() != before and figure.inner_text() != told
        if show.name in BUTTONS:
            button, said = BUTTONS[show.name]
            page.get_by_role("button", name=button).click()
            page.get_by_text(said).first.wait_for(timeout=180_000)
        browser.whole(page)
        assert page.evaluate(CLIPPED) == []

        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(500)
        assert browser.ground(page) < 60
        assert page.evaluate(CLIPPED) == []
        page.emulate_media(color_scheme="light")
        page.wait_for_timeout(500)
        assert browser.ground(page) > 235
        assert not seen.errors and not seen.outside
