"""Every view of every stored fixture, whatever views there are: safe, well-formed, equal each time, legible."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures import recorded, traces
from safe_page import check_page

from tpu_lab.profile import VIEWS, Profile
from tpu_lab.viz import theme

MADE_UP = ("mingpt", "strict", "growing", "empty", "hostile")
FIXTURES = (*MADE_UP, "stored")
TEMPLATES = Path(theme.__file__).parent / "templates"


def load(name):
    return Profile.from_json(recorded.FILE) if name == "stored" else Profile(getattr(traces, name)(), peak_flops=182e9)


@pytest.fixture(scope="module")
def profiles():
    found = {}
    return lambda name: found.setdefault(name, load(name))


def views(profile):
    """All views, and the page that marks."""
    first = profile.trace.ops[len(profile.trace.ops) // 2].index if profile.trace.ops else None
    picked = {"op": first} if first is not None else {}
    return {**{name: profile.view(name) for name in VIEWS}, "marked": profile.marked(picked)}


@pytest.mark.parametrize("fixture", FIXTURES)
def test_safe_and_well_formed(profiles, fixture):
    for name, view in views(profiles(fixture)).items():
        if name == "marked":  # all views in one page, not shown in a cell by itself
            check_page(view, size=1_000_000)
        else:
            check_page(view)
            assert 0 < len(view.title) <= 85 and not view.title.endswith("."), view.title
            assert view.finding and "\n" not in view.finding


@pytest.mark.parametrize("fixture", FIXTURES)
def test_ids_are_unique_and_each_reference_has_its_mark(profiles, fixture):
    for name, view in views(profiles(fixture)).items():
        ids = re.findall(r'\sid="([^"]*)"', view.html)
        assert len(ids) == len(set(ids)), name
        used = set(re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"|aria-labelledby="([^"]*)"', view.html))
        assert {next(filter(None, u)) for u in used} <= set(ids), name


@pytest.mark.parametrize("fixture", FIXTURES)
def test_equal_bytes_from_equal_records(profiles, fixture):
    again = views(load(fixture))
    for name, view in views(profiles(fixture)).items():
        assert again[name].html == view.html and again[name].text() == view.text(), name


@pytest.mark.parametrize("fixture", ["empty", "hostile"])
def test_user_text_is_text_and_nothing_explains_itself(profiles, fixture):
    for name, view in views(profiles(fixture)).items():
        assert "<img" not in view.html and "\x1b" not in view.text(), name
        if fixture == "empty" and name != "marked":
            assert "No op ran on 'tpu'" in view.text() and '.to("tpu")' in view.text(), name
            assert not len(view.rows) or name == "summary"


@pytest.mark.parametrize("names", ["layer{}", "{}", "2.{}", "conv2d_1.b{}", "block.x{}.0"])
def test_modules_may_have_any_name(names):
    """Most people write self.fc1 and self.fc2: names that end in a number, and are no row of equal modules."""
    trace = traces.mingpt(2, layers=2)
    trace.ops[:] = [replace(o, module=re.sub(r"^h\.(\d)", lambda m: names.format(m[1]), o.module)) for o in trace.ops]
    for view in views(Profile(trace, peak_flops=182e9)).values():
        assert view.html and view.text() and len(view.title) <= 85


@pytest.mark.parametrize("name", VIEWS)
def test_rows_are_a_table_with_plain_names(profiles, name):
    rows = profiles("stored").view(name).rows
    assert len(rows) and all(re.fullmatch(r"[a-z][a-zA-Z0-9_]*", c) for c in rows.columns)


# Contrast, as WCAG 2.2 computes it (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio).


def luminance(hexcode):
    parts = [int(hexcode[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def blend(ink, ground, opacity):
    mixed = [round(int(ink[i : i + 2], 16) * opacity + int(ground[i : i + 2], 16) * (1 - opacity)) for i in (1, 3, 5)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


GROUNDS = {"light": ("#1c2024", "#ffffff"), "dark": ("#dfe5e2", "#181c1a")}  # ink, ground
GLYPHS = {"cell.hit", "cell.miss", "cell.disk"}  # one glyph beside its word: 3:1 is asked of graphics
PAINTS = {"matmul": "#0072B2", "other": "#56B4E9", "move": "#E69F00", "collective": "#CC79A7", "free": "#8a8f8c"}


def rules():
    css = re.sub(r"/\*.*?\*/", "", (TEMPLATES / "style.css").read_text(encoding="utf-8"), flags=re.S)
    return [
        (s.strip(), dict(re.findall(r"([\w-]+):\s*([^;]+)", body)))
        for s, body in re.findall(r"([^{}]+)\{([^{}]*)\}", css)
    ]


@pytest.mark.parametrize("scheme", GROUNDS)
def test_no_text_is_paler_than_four_and_a_half_to_one(scheme):
    ink, ground = GROUNDS[scheme]
    checked = 0
    for selector, declared in rules():
        opacity = float(declared.get("opacity", 1))
        if opacity < 1 and not re.search(r"i\b|polygon|path|svg|::before|line|\.grid|rect", selector):
            assert contrast(blend(ink, ground, opacity), ground) >= 4.5, f"{selector} has opacity {opacity}"
            checked += 1
    assert checked >= 10


def test_text_on_paint_can_be_read():
    """Every rule that fixes a text's colour: on its own ground, or on the paint that its class names."""
    checked = 0
    for selector, declared in rules():
        colour = declared.get("color", "").strip()
        if not re.fullmatch(r"#(?:[0-9a-fA-F]{3}){1,2}", colour):
            continue
        colour = "#" + "".join(c * 2 for c in colour[1:]) if len(colour) == 4 else colour
        least = 3 if any(g in selector for g in GLYPHS) else 4.5
        own = re.search(r"#[0-9a-fA-F]{6}", declared.get("background", "") + declared.get("background-color", ""))
        named = [p for p in PAINTS if re.search(rf"\.{p}\b", selector)]
        if own:
            grounds = [own[0]]
        elif named:
            grounds = [PAINTS[p] for p in named]
        elif any(g in selector for g in GLYPHS):
            grounds = [GROUNDS["light"][1], GROUNDS["dark"][1]]
        else:  # a chip's or a band's ink: on every paint that has no ink of its own
            grounds = [PAINTS[p] for p in ("other", "move", "collective", "free")]
        for ground in grounds:
            assert contrast(colour, ground) >= least, f"{selector}: {colour} on {ground}"
            checked += 1
    assert checked >= 5
