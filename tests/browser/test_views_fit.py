"""In a real Chromium: nothing of a view is cut or sticks out, also in a wide face and a narrow cell; no console error."""

import html
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures import recorded, traces

from tpu_lab.profile import VIEWS, Profile

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("playwright", reason="the browser tests need playwright: pip install playwright")
from shoot import CHROMIUM, THEMES  # noqa: E402  (next to this file; it imports playwright)

pytestmark = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason="no Chromium on this machine: apt-get install chromium"
)

# Elements may end in an ellipsis where the stylesheet says so (shapes and paths, with the whole in `title`).
CUT = """(root) => [...(root ?? document.querySelector('.tl')).querySelectorAll('*')].filter(e => {
  if (e.closest('svg') || e.closest('.vh, .scroll') || e.tagName === 'STYLE') return false;
  const style = getComputedStyle(e);
  const hides = style.overflowX !== 'visible' && style.textOverflow !== 'ellipsis' && e.scrollWidth > e.clientWidth + 1;
  const out = e.getBoundingClientRect().right > e.closest('.tl').getBoundingClientRect().right + 1;
  return hides || (out && style.display !== 'none' && !e.closest('.el, .code'));
}).map(e => e.className + ': ' + e.textContent.slice(0, 60))"""


# Ink over its ground, both with the opacity and the colours of all that is around them; WCAG's formula.
PALE = """() => {
  const rgba = c => { const n = c.match(/[\\d.]+/g).map(Number); return c.startsWith('color(') ? [n[0] * 255, n[1] * 255, n[2] * 255, n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1] };
  const over = (a, b, o) => [0, 1, 2].map(i => a[i] * a[3] * o + b[i] * (1 - a[3] * o));
  const light = c => { const l = c.slice(0, 3).map(v => { v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4 }); return .2126 * l[0] + .7152 * l[1] + .0722 * l[2] };
  const out = [];
  for (const e of document.querySelectorAll('.tl *')) {
    const words = [...e.childNodes].filter(n => n.nodeType === 3 && n.textContent.trim()).map(n => n.textContent.trim()).join(' ');
    if (!words || e.closest('.vh, style, title') || e.matches('.cell')) continue;
    const chain = []; for (let p = e; p; p = p.parentElement) chain.unshift(p);
    let ground = [255, 255, 255], opacity = 1;
    for (const p of chain) { const s = getComputedStyle(p); opacity *= Number(s.opacity); ground = over(rgba(s.backgroundColor), ground, opacity) }
    const style = getComputedStyle(e);
    const ink = over(rgba(e.closest('svg') ? style.fill === 'none' ? style.color : style.fill : style.color), ground, opacity * (e.closest('svg') ? Number(style.fillOpacity) : 1));
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) out.push(ratio.toFixed(2) + ': ' + e.className + ': ' + words.slice(0, 40));
  }
  return [...new Set(out)];
}"""
FIXTURES = {"stored": lambda: Profile.from_json(recorded.FILE)} | {
    name: lambda name=name: Profile(getattr(traces, name)(), peak_flops=182e9)
    for name in ("mingpt", "strict", "growing")
}


@pytest.fixture(scope="module")
def profiles():
    return {name: make() for name, make in FIXTURES.items()}


@pytest.fixture(scope="module")
def page():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


def show(page, html, scheme="light"):
    ground, ink = THEMES[scheme]
    html = html.replace("<details>", "<details open>")
    page.set_content(f"<!doctype html><body style='margin:0;padding:24px;background:{ground};color:{ink}'>{html}")


@pytest.mark.parametrize("width", [748, 1100])
@pytest.mark.parametrize("name", VIEWS)
def test_nothing_is_cut_in_a_wide_face(page, profiles, name, width):
    errors = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.set_viewport_size({"width": width, "height": 800})
    for fixture, profile in profiles.items():
        show(page, profile.view(name).html + "<style>.tl *:not(code) { font-family: 'DejaVu Sans' !important }</style>")
        assert page.evaluate(CUT) == [], fixture
    assert errors == []


@pytest.mark.parametrize("scheme", THEMES)
@pytest.mark.parametrize("name", VIEWS)
def test_words_can_be_read(page, profiles, name, scheme):
    for fixture, profile in profiles.items():
        show(page, profile.view(name).html, scheme)
        assert page.evaluate(PALE) == [], fixture


# Ground and ink of hosts that show an output in a frame of its own, and say their theme on it: VS Code's standard light
# and its palest themes, measured in it; Colab's older dark, whose ground is lighter than any other.
FRAMES = {
    "VS Code light": ("", "vscode-light", "#ffffff", "#3b3b3b"),
    "VS Code Solarized Light": ("", "vscode-light", "#fdf6e3", "#657b83"),
    "VS Code Abyss": ("", "vscode-dark", "#000c18", "#6688cc"),
    "Colab dark": ("dark", "", "#383838", "#d5d5d5"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_the_frames_of_vs_code_and_colab(page, profiles, name):
    """Words can be read there whatever the system prefers, nothing scrolls inside the frame, and a fold makes it higher."""
    theme, body, ground, ink = FRAMES[name]
    wanted = "dark" if body == "vscode-dark" or theme == "dark" else "light"
    page.emulate_media(color_scheme="light" if wanted == "dark" else "dark")
    page.set_viewport_size({"width": 1100, "height": 800})
    views = profiles["stored"].view("summary").html  # the others are folded into it
    source = (
        f"<!doctype html><html theme='{theme}'><body class='{body}' style='margin:0;background:{ground};color:{ink}'>"
        "<style>table{border-collapse:collapse} td,th{text-align:right;white-space:nowrap;padding:.5em}"
        f" tr:nth-child(even){{background:#8882}} code{{background:#8884;color:#c00}}</style>{views}</body></html>"
    )
    page.set_content(
        f"<iframe sandbox='allow-scripts' style='border:0;width:1060px;height:900px' srcdoc=\"{html.escape(source)}\">"
    )
    frame = page.frames[1]
    frame.locator(".tl").last.wait_for()
    height = "document.documentElement.scrollHeight"
    closed = frame.evaluate(height)
    frame.evaluate("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    assert frame.evaluate(PALE) == []
    assert frame.evaluate(f"[...document.querySelectorAll('.tl')].flatMap({CUT})") == []
    assert frame.evaluate(height) > closed > 900
    assert frame.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.emulate_media(color_scheme="light")


def test_the_smallest_share_and_the_longest_figure_fit(page):
    trace = traces.growing()
    first = trace.compiles[0].site
    trace.compiles[:] = [
        c if c.site == first else replace(c, trace_ns=c.trace_ns // 99, lower_ns=0, compile_ns=c.compile_ns // 99)
        for c in trace.compiles
    ]
    shown = Profile(trace, peak_flops=182e9)
    assert "others: " in shown.cache.html
    show(page, shown.cache.html)
    last = page.locator(".sites > :last-child")
    assert last.evaluate("e => e.scrollWidth <= e.clientWidth") and page.evaluate(CUT) == []
    figure = re.sub(r'(<td class="r">)[^<]*( <span class="dim">)', r"\1&lt;0.001\2", shown.roofline.html)
    show(page, figure + "<style>.tl *:not(code) { font-family: 'DejaVu Sans' !important }</style>")
    assert "&lt;0.001 <" in figure and page.evaluate(CUT) == []


@pytest.mark.parametrize("width", [760, 860, 930, 1000, 1100])
def test_no_line_number_of_the_roofline_is_cut(page, width):
    trace = traces.mingpt(4)
    trace.ops[:] = [replace(o, file="a_model_with_a_name.py", line=100 + o.line) for o in trace.ops]
    page.set_viewport_size({"width": width, "height": 800})
    show(page, Profile(trace, peak_flops=182e9).roofline.html)
    lines = page.locator(".roof .where .at > :last-child")
    seen = "e => [e.textContent, e.scrollWidth - e.clientWidth, e.closest('td').getBoundingClientRect().right - e.getBoundingClientRect().right]"
    found = [one.evaluate(seen) for one in lines.all()]
    assert len(found) == 8 and any("bwd" in row for row in page.locator(".roof .where").all_inner_texts())
    assert all(re.fullmatch(":1[0-9]{2}", text) and hidden <= 0 and room >= 0 for text, hidden, room in found), found


def test_marks_can_be_seen_and_read(page, profiles):
    profile = profiles["stored"]
    op = next(o for o in profile.metrics.ops_in(profile.metrics.span) if o.kind == "matmul")
    show(page, profile.marked({"op": op.index}).html, "dark")
    row = page.locator(f"tr[data-op='{op.index}']").first
    assert row.locator("td").first.evaluate("e => getComputedStyle(e).boxShadow") != "none"
    other = page.locator("tr[data-op]").last
    assert other.locator("td").first.evaluate("e => getComputedStyle(e).boxShadow") == "none"
    assert page.evaluate(PALE) == []


def test_the_check_can_fail(page):
    page.set_content(
        "<div class='tl' style='width:100px'><div style='overflow:hidden;width:50px;white-space:nowrap'>a very long sentence</div></div>"
    )
    assert len(page.evaluate(CUT)) == 1
    page.set_content("<div class='tl'><p style='color:#999'>pale</p><p style='opacity:.5'>half</p><p>fine</p></div>")
    assert [found.split(": ")[-1] for found in page.evaluate(PALE)] == ["pale", "half"]
