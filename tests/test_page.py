"""Pieces of a notebook's page: what is nested, what is escaped, where marks and labels stand."""

import base64
import io
import re

import matplotlib.image
import numpy as np
import pytest
from markupsafe import Markup

from tpu_lab.viz import page


class Shown:
    def _mime_(self):
        return "text/html", "<i>shown</i>"


class Jupyter:
    def _repr_html_(self):
        return "<i>jupyter</i>"


def heights(piece, names):
    """y of the labels of these names in a curve."""
    return [float(re.search(rf'y="([\d.]+)">{name}<', piece.html)[1]) for name in names]


def test_two_things_of_equal_widths_grow_alike_also_under_one_another():
    grown = re.findall(r"flex:(\d+) 1 (\d+)px;min-width:0(;max-width:\d+px)?", page.beside("a", "b", (480, 480)).html)
    assert grown == [("1", "480", ""), ("1", "480", "")]
    grown = re.findall(r"flex:(\d+) 1 (\d+)px;min-width:0(;max-width:\d+px)?", page.beside("a", "b").html)
    assert grown == [("1", "360", ";max-width:520px"), ("3", "700", "")]


def test_what_shows_itself_is_nested_and_a_string_is_escaped():
    made = page.beside(
        page.stack("a < b", None, Shown()), page.panel(("x & y", Jupyter()), ("z", Markup("<b>bold</b>")))
    )
    for part in ("a &lt; b", "<i>shown</i>", "x &amp; y", "<i>jupyter</i>", "<b>bold</b>"):
        assert part in made.html
    assert "None" not in made.html and made._mime_() == ("text/html", made._repr_html_())


def test_each_piece_has_one_root_no_script_and_says_something_in_a_terminal():
    pieces = [
        page.facts(("1 <s>", "a & b")),
        page.heading("A finding"),
        page.code("if a < b: pass"),
        page.table([{"name": "x", "bytes": 12.5}], caption="sizes"),
        page.pictures([(np.zeros((2, 2)), "dark")]),
        page.curve([3, 2, 1], "It falls"),
    ]
    for piece in pieces:
        assert re.match(r"<(\w+)[ >].*</\1>$", piece.html, re.S) and repr(piece)
        assert "<script" not in piece.html and "<s>" not in piece.html and "http" not in piece.html


def test_a_table_puts_numbers_to_the_right():
    made = page.table([{"group": "A", "size": "12.0 KiB", "share": 0.5}], caption="groups").html
    assert made.count("text-align:right") == 4 and made.count("text-align:left") == 2
    assert ">0.50<" in made and '<th scope="col"' in made
    painted = re.findall(r"<(?:table|thead|tr|th|td)\b[^>]*>", made)
    assert len(painted) == 10 and all("background:none" in tag for tag in painted), "hosts stripe rows"


@pytest.mark.parametrize("shape", [(4, 6), (1, 4, 6), (3, 4, 6), (4, 6, 3)])
def test_a_picture_comes_back_from_its_png(shape):
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    uri = page.png(image)
    back = matplotlib.image.imread(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    wanted = np.moveaxis(image, 0, -1) if shape[0] == 3 else image.reshape(4, 6, -1).squeeze()
    np.testing.assert_array_equal(np.rint(back * 255), wanted)
    assert page.png(image / 255) == uri


def test_what_is_no_picture_is_an_error_that_says_what_is():
    with pytest.raises(ValueError, match=r"\[h,w,3\], not \[2, 4, 6\]"):
        page.png(np.zeros((2, 4, 6)))


def test_a_curve_takes_the_ink_of_the_page_and_leaves_out_what_is_not_finite():
    made = page.curve([4.5, float("nan"), 3.0], "3.00 nats", y="nats", levels=[(4.56, "guessing")])
    assert 'role="img"' in made.html and 'aria-label="3.00 nats"' in made.html and "nan" not in made.html
    assert made.html.count("currentColor") > 2 and "guessing" in made.html
    assert "black" not in made.html and "#000" not in made.html


def test_the_numbers_on_an_axis_are_those_asked_for():
    made = page.curve([1, 2, 3], "grows", at=[16, 64, 256], ticks=[16, 64, 256]).html
    assert all(f">{n}</text>" in made for n in (16, 64, 256)) and ">100</text>" not in made
    assert ">4</text>" in page.curve([1], "one", at=[4], ticks=[4]).html


def test_labels_of_a_curve_never_touch_and_stay_inside():
    names = ["one", "two", "three", "four"]
    made = page.curve([1.0, 0.0], "close", levels=[(0.001 * i, name) for i, name in enumerate(names)])
    found = sorted(heights(made, names))
    assert all(b - a >= 15 for a, b in zip(found, found[1:], strict=False)) and found[-1] <= 264 + 4


def test_several_lines_differ_without_colour_and_one_value_is_a_curve():
    made = page.curve({"train": [1, 2], "test": [2, 1]}, "two", at=[10, 20]).html
    assert made.count("stroke-dasharray") == 1 and ">train<" in made and ">test<" in made
    assert "<circle" in page.curve([0.5], "one").html
    with pytest.raises(ValueError, match="at least one value"):
        page.curve([], "none")
