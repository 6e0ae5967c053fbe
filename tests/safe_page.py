"""What every view must hold: well-formed, safe, equal when shown twice, at most 100 columns in a terminal."""

import re
from html.parser import HTMLParser

VOID = {"col", "br", "meta"}


class _Page(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, f"</{tag}> closes nothing"


def check_page(view, size: int = 300_000) -> None:
    """AssertionError where a view's text or page breaks a rule of the house. size: of the page at most, in bytes."""
    page = _Page()
    page.feed(view.html)
    assert page.stack == []
    assert not {"script", "img", "iframe", "link", "object"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?:|url\((?!#)|@import|javascript:", view.html)
    assert not [k for _, attrs in page.tags for k in attrs if k.startswith("on")]
    assert page.tags[0][1]["role"] == "figure" and page.tags[0][1]["aria-label"] == view.title
    assert view.html == view._repr_html_() and len(view.html.encode()) < size
    assert max(map(len, view.text().splitlines())) <= 100
    assert view.text(ascii=True).isascii()
