"""`tpu-lab twins`: write the Jupyter twins, run those that changed, and keep their outputs as a code host shows them.

A code host drops style sheets and SVG from a notebook's HTML, and JupyterLab does so until the reader trusts the file.
So what is kept is text, and a picture of what is one; whoever runs the cells sees the pages themselves.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

from tpu_lab import twins

SECONDS = 900  # for one cell, on a slow machine
WIDTH, SCALE, COLOURS = 960, 1.25, 64  # of a picture: CSS pixels, device pixels a CSS pixel, colours of its palette
LINES, BESIDE = 160, 24  # lines of a kept text, and of one that has its picture beside it
BYTES = 290_000  # of a twin
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
Draw = Callable[..., bytes]


def add(commands) -> None:
    """The grammar of `tpu-lab twins`."""
    it = commands.add_parser("twins", help="renew the Jupyter twins of the notebooks", description=renew.__doc__)
    it.add_argument("notebook", nargs="*", type=Path, help="the .py files (default: all notebooks and tutorials)")
    it.add_argument(
        "--check", action="store_true", help="change nothing: name those that are not up to date, and exit 1"
    )
    it.add_argument("--all", action="store_true", help="also run those whose cells did not change")
    it.add_argument("--no-run", action="store_true", help="write the cells, without outputs")
    it.set_defaults(run=renew)


def renew(arguments: argparse.Namespace) -> int:
    """Write an .ipynb twin of each marimo notebook into jupyter/ beside it, run it, and keep what it shows."""
    paths = arguments.notebook or twins.all_notebooks()
    if not paths or any(not path.is_file() for path in paths):
        print("tpu-lab twins: give notebooks (.py), or run it in a source tree of TPU Lab.", file=sys.stderr)
        return 2
    try:
        wanted = list(map(Path.resolve, paths)) if arguments.all else twins.stale([path.resolve() for path in paths])
        if arguments.check:
            print("\n".join(f"not up to date: {twins.twin_of(path)}" for path in wanted) or "All twins are up to date.")
            return 1 if wanted else 0
        if not wanted:
            print("All twins are up to date; --all runs them again.")
            return 0
        with pictures() as draw:
            if draw is None and not arguments.no_run:
                print("Without Chromium and playwright the outputs are text: no pictures.")
            for path in wanted:
                _one(path, draw, not arguments.no_run)
    except ValueError as error:
        print(f"tpu-lab twins: {error}", file=sys.stderr)
        return 1
    return 0


def _one(path: Path, draw: Draw | None, execute: bool) -> None:
    notebook = twins.book(path)
    if execute:
        notebook = run(notebook, path.parent.parent)
        ran = [(cell, cell["outputs"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for coarse in (False, True):
            for cell, outputs in ran:
                cell["outputs"] = kept(outputs, draw and partial(draw, coarse=coarse))
            if len(twins.written(notebook).encode()) <= BYTES:
                break
        fit(notebook)
    out = twins.twin_of(path)
    out.parent.mkdir(exist_ok=True)
    out.write_text(twins.written(notebook), encoding="utf-8")
    print(f"wrote {out.parent.parent.name}/{out.parent.name}/{out.name}, {out.stat().st_size / 1e3:.0f} KB", flush=True)


def run(notebook: dict, folder: Path) -> dict:
    """The notebook with its outputs, run from top to bottom in `folder`. Raises ValueError where a cell fails."""
    try:
        import nbclient
        import nbformat
    except ImportError as error:
        raise ValueError(
            f"{error.name} runs the twins: pip install nbclient ipykernel, or write them with --no-run"
        ) from None
    node = nbformat.reads(twins.written(notebook), as_version=4)
    place = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(twins.SOURCE), os.environ.get("PYTHONPATH")))),
    }
    nothing = tempfile.TemporaryDirectory()  # a reader's first run finds no programs on disk, and neither does this one
    place["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] = nothing.name
    client = nbclient.NotebookClient(
        node, timeout=SECONDS, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    try:
        with nothing:
            client.execute(env=place)
    except nbclient.exceptions.CellExecutionError as error:
        raise ValueError(f"a cell failed:\n{error}") from None
    done = {**notebook, "cells": []}
    for cell, ran in zip(notebook["cells"], node.cells, strict=True):
        outputs = [dict(output) for output in ran.get("outputs", [])]
        done["cells"].append({**cell, **({"outputs": outputs} if cell["cell_type"] == "code" else {})})
    return done


def kept(outputs: list[dict], draw: Draw | None) -> list[dict]:
    """Outputs as they are stored: text, Markdown, and pictures of pages that are more than text."""
    found = []
    for output in outputs:
        if output["output_type"] == "stream":
            if output["name"] == "stdout":
                found.append({**output, "text": _lines(output["text"], LINES)})
            continue
        data, html = dict(output.get("data", {})), output.get("data", {}).get("text/html", "")
        plain = data.get("text/plain", "")
        stored: dict[str, Any] = {key: data[key] for key in ("text/markdown", "image/png") if key in data}
        if "text/markdown" in stored:
            stored["text/markdown"] = stored["text/markdown"].splitlines(keepends=True)
        if draw is not None and _pictured(html):
            stored["image/png"] = base64.b64encode(draw(html)).decode()
        if plain.strip() and not plain.startswith("controls: "):  # they are numbers in `params`
            stored["text/plain"] = _lines(plain, BESIDE if "image/png" in stored else LINES)
            found.append({"output_type": "display_data", "metadata": {}, "data": stored})
    return found


def fit(notebook: dict, most: int = BYTES) -> None:
    """Keep the file within `most` bytes: while it is larger, the largest picture goes, and its text stays."""
    held = [
        o["data"] for cell in notebook["cells"] for o in cell.get("outputs", []) if "image/png" in o.get("data", {})
    ]
    while held and len(twins.written(notebook).encode()) > most:
        largest = max(held, key=lambda data: len(data["image/png"]))
        held.remove(largest)
        del largest["image/png"]


def _pictured(html: str) -> bool:
    """Whether a page says more than its text: a drawing, an image, a report; not folds, which are closed."""
    shows = any(mark in html for mark in ("<svg", "<img", 'role="figure"'))
    return shows and not html.startswith("<div data-folds") and 'class="checks"' not in html


def _lines(text: str, most: int) -> list[str]:
    lines = text.splitlines(keepends=True)
    return lines if len(lines) <= most else [*lines[: most - 1], f"... and {len(lines) - most + 1} lines more"]


@contextmanager
def pictures() -> Iterator[Draw | None]:
    """Gives what turns HTML into a PNG on a white page, or None without playwright, Pillow or Chromium."""
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    try:
        from PIL import Image, ImageChops
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        pages = {}
        for coarse, scale in ((False, SCALE), (True, 1)):
            size: Any = {"width": WIDTH, "height": 400}
            pages[coarse] = browser.new_page(viewport=size, device_scale_factor=scale, color_scheme="light")
            pages[coarse].route("**/*", lambda route: route.abort())

        def draw(html: str, coarse: bool = False) -> bytes:
            page = pages[coarse]
            look = "margin:0;padding:12px 8px;background:#fff;color:#1c2024;font:14px/1.5 system-ui,sans-serif"
            page.set_content(f'<!doctype html><body style="{look}"><div id="it" style="max-width:100%">{html}</div>')
            with Image.open(io.BytesIO(page.screenshot(full_page=True))) as image:
                rgb = image.convert("RGB")
                _, _, right, bottom = ImageChops.difference(rgb, Image.new("RGB", rgb.size, "#fff")).getbbox() or (
                    0,
                    0,
                    1,
                    1,
                )
                small = rgb.crop((0, 0, right + 10, bottom + 10)).quantize(
                    COLOURS // 3 if coarse else COLOURS, dither=Image.Dither.NONE
                )
                out = io.BytesIO()
                small.save(out, "PNG", optimize=True)
            return out.getvalue()

        yield draw
        browser.close()
