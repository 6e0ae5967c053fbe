"""Pictures of the notebooks for the README and the gallery's cards: `make screenshots`.

    python tests/browser/screenshots.py modes       those of one notebook

Each notebook is opened in Chromium through marimo's own server, in light and dark, and saved at twice the pixels.
Also the helpers of the browser tests: a server, and a browser that cannot leave this machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
# What is shown of each notebook: from one heading to another.
PARTS = {
    "resnet": ("Train a few steps, and look", "What the tile wastes"),
    "hello": (None, "What we saw"),
    "your_model": ("What a TPU's compiler joins", "What to change"),
    "modes": ("Four modes on one time axis", "What a mode costs"),
    "mingpt": ("Train, and look", "A longer sequence"),
    "dlrm": ("Train a few steps, and look", "Each op under its roof"),
    "unet": ("Photographs come in many sizes", "The same programs on a TPU v6e"),
}
CARDS = {
    "resnet": "Train a few steps, and look",
    "hello": "The same four ops: 4 launches in strict mode, 1 in fused",
    "your_model": "What a TPU's compiler joins",
    "modes": "Four modes on one time axis",
    "mingpt": "Train, and look",
    "dlrm": "Train a few steps, and look",
    "unet": "Photographs come in many sizes",
}
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The path of an installed Chromium or Chrome, or None."""
    return next((path for name in CHROMIUM if (path := shutil.which(name))), None)


@contextlib.contextmanager
def served(notebook: Path, **env: str):
    """The URL of a notebook on a marimo server in run mode, on 127.0.0.1; it ends with the block."""
    command = ["marimo", "run", str(notebook), "--no-token", "--host", "127.0.0.1"]
    with serving(command, **env) as (url, _):
        yield url


@contextlib.contextmanager
def gallery():
    """The URL, with its token, that `tpu-lab open` prints for the notebooks; the server ends with the block."""
    with serving(["tpu_lab", "open"]) as (_, server):
        for line in server.stdout:
            if "access_token=" in line:
                yield line.split()[-1]
                return


@contextlib.contextmanager
def serving(command: list[str], **env: str):
    """(URL, process) of `python -m command`, once it answers on a free port of 127.0.0.1; env: variables it also has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", *command, "--headless", "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            if server.poll() is not None:
                raise RuntimeError(f"{command[0]} ended before it served:\n{server.stdout.read()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                break
            time.sleep(0.2)
        else:
            raise RuntimeError(f"{command[0]} served nothing within a minute")
        yield url, server
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


@dataclass
class Seen:
    """What a page asked for and complained of."""

    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextlib.contextmanager
def opened(url: str, scheme: str, width: int = 1440, height: int = 1000, scale: int = 1):
    """(page, Seen) for a URL in a fresh browser; whatever is not on 127.0.0.1 is refused and noted."""
    from playwright.sync_api import sync_playwright

    seen = Seen()

    def gate(route):
        if route.request.url.startswith((url.split("?")[0], "data:", "blob:")):
            route.continue_()
        else:
            seen.outside.append(route.request.url)
            route.abort()

    with sync_playwright() as playwright:
        # No sandbox: it needs rights that containers and root do not have; only our own page is opened.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale
            )
            page.route("**/*", gate)
            page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: seen.errors.append(str(error)))
            page.goto(url)
            yield page, seen
        finally:
            browser.close()


def smaller(name: str, values: dict, folder: Path) -> Path:
    """A copy of a notebook in `folder` with some other numbers among its parameters, so that a test of it is short."""
    source = (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    for key, value in values.items():
        source, changed = re.subn(rf'"{key}": [\d_]+,', f'"{key}": {value},', source, count=1)
        if not changed:
            raise KeyError(f"{name}.py has no parameter {key}")
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return path


def ground(page) -> float:
    """How bright the page's lower left corner is, 0 to 255."""
    size = page.viewport_size
    shot = page.screenshot(clip={"x": 0, "y": size["height"] - 5, "width": 5, "height": 5})
    with Image.open(io.BytesIO(shot)) as image:
        return image.convert("L").resize((1, 1)).getpixel((0, 0))


def settle(page, text: str, seconds: float = 120) -> None:
    """Wait until `text` is on the page and no cell runs any more."""
    page.get_by_text(text, exact=False).first.wait_for(timeout=seconds * 1000)
    page.wait_for_timeout(500)


def whole(page, limit: int = 8000) -> None:
    """Make the window as high as its content, so that a picture shows all of it."""
    height = page.evaluate("Math.max(...[...document.querySelectorAll('*')].map(e => e.scrollHeight))")
    page.set_viewport_size({"width": page.viewport_size["width"], "height": min(height + 20, limit)})
    page.wait_for_timeout(500)


def part(page, first: str | None, after: str | None, margin: int = 28) -> dict:
    """The page's rectangle from above the heading `first` to above the heading `after`; None is the page's own end."""
    size = page.viewport_size
    heading = lambda text: page.get_by_role("heading", name=text, exact=True).bounding_box()["y"] - margin  # noqa: E731
    top = heading(first) if first else 0
    bottom = heading(after) if after else size["height"]
    return {"x": 0, "y": top, "width": size["width"], "height": bottom - top}


def small(image: Image.Image, file: Path) -> None:
    """Save a picture with 256 colours: a third of the size, and the eye sees none of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def shoot(page, clip: dict) -> Image.Image:
    """What the page shows within `clip`, at the page's own scale."""
    return Image.open(io.BytesIO(page.screenshot(clip=clip)))


def pictures(notebook: Path, folder: Path) -> Seen:
    """Save a notebook, light and dark, and the picture of its card, which marimo wants to be 1000 x 525 pixels.

    All are of one run, as it is the first time, when nothing was compiled or measured before: then programs are misses.
    """
    assets = notebook.parent / "__marimo__" / "assets" / notebook.stem
    with (
        tempfile.TemporaryDirectory() as empty,
        served(notebook, XDG_CACHE_HOME=empty) as url,
        opened(url, "light", scale=2) as (page, seen),
    ):
        settle(page, "What we saw", 300)
        whole(page)
        shown = part(page, *PARTS[notebook.stem])
        small(shoot(page, shown), folder / f"{notebook.stem}_light.png")
        top = part(page, CARDS[notebook.stem], None)["y"]
        card = shoot(page, {"x": 60, "y": top, "width": 1280, "height": 672})
        small(card.resize((1000, 525), Image.Resampling.LANCZOS), assets / "opengraph.png")
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(2000)
        small(shoot(page, shown), folder / f"{notebook.stem}_dark.png")
        return seen


def main(names: list[str]) -> int:
    """Save the pictures of the notebooks of these names, of all if none is given; the exit code."""
    if chromium() is None:
        print(f"No Chromium found (looked for {', '.join(CHROMIUM)}). On Debian: apt-get install chromium")
        return 1
    if unknown := set(names) - set(PARTS):
        print(f"No notebook {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
        return 2
    for name in names or PARTS:
        seen = pictures(ROOT / "notebooks" / f"{name}.py", ROOT / "notebooks" / "screenshots")
        print(name, *seen.errors, sep="\n  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
