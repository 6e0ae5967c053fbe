"""How long a reader waits: `python tests/browser/pace.py [notebook …]`, in seconds, at the sizes that a notebook opens with.

first: from the page's request to its first picture of a profile, Python's and PyTorch's start within it. change: from a
key on a slider to the sentence of what changed. cold: nothing was compiled or measured before; warm: the same once more.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time

import screenshots as browser
from test_showcases import SHOWS

SAID = {"unet": re.compile("^Padded to multiples of 64: programs ")}  # after a move from the notebook's own sizes
LIMITS = {"first": 20, "change": 10}  # of the issue: seconds on 2 cores


def pace(show, cache: str) -> dict[str, float]:
    """Seconds a reader of the notebook waits, with this cache folder."""
    notebook, out = browser.ROOT / "notebooks" / f"{show.name}.py", {}
    with browser.served(notebook, XDG_CACHE_HOME=cache) as url, browser.opened(url, "light", width=1100) as (page, _):
        start = time.monotonic()
        page.locator(".tl[role=figure]").first.wait_for(timeout=120_000)
        out["first"] = time.monotonic() - start
        browser.settle(page, "What we saw", 300)
        page.get_by_role("slider").nth(show.slider).focus()
        start = time.monotonic()
        page.keyboard.press(show.key)
        page.get_by_text(SAID.get(show.name, show.changed)).first.wait_for(timeout=120_000)
        out["change"] = time.monotonic() - start
    return out


def main(names: list[str]) -> int:
    slow = 0
    for show in SHOWS:
        if names and show.name not in names:
            continue
        with tempfile.TemporaryDirectory() as cache:
            for word in ("cold", "warm"):
                found = pace(show, cache)
                slow += any(found[what] > LIMITS[what] for what in LIMITS)
                print(
                    f"{show.name:8} {word}  " + "  ".join(f"{what} {s:5.1f} s" for what, s in found.items()), flush=True
                )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
