"""The views inside real pages of JupyterLab and marimo: `python tests/browser/hosts.py out/ --jupyter PATH/TO/jupyter`.

Each view of screens.py is shown by the host itself, light and dark, in a window of 1100 and of 760 px, and once more in
a wider face. What is cut or too pale is printed; the rest is for the eye. Without --jupyter only marimo's pictures are
made: JupyterLab is no requirement of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import nbformat

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import screens  # noqa: E402
import screenshots as browser  # noqa: E402
from test_views_fit import CUT  # noqa: E402

WIDE = "DejaVu Sans"
HEIGHT = 2800  # of the window: what is higher is cut in the picture, for both hosts scroll inside the page
SHOTS = [(scheme, width, "") for scheme in ("light", "dark") for width in (1100, 760)] + [("light", 760, WIDE)]


def marimo_page(folder: Path, names: list[str]) -> Path:
    """One marimo notebook with a cell a view, the picker first."""
    page = folder / "views.py"
    cells = [
        f"@app.cell\ndef _(screens):\n    screens.Stored({str(folder)!r}, {name!r})\n    return\n" for name in names
    ]
    page.write_text(
        '# /// script\n# [tool.marimo.display]\n# theme = "system"\n# ///\nimport marimo\n\napp = marimo.App(width="full")\n\n\n'
        f"@app.cell\ndef _():\n    import sys\n\n    sys.path[:0] = [{str(HERE)!r}]\n    import screens\n    return (screens,)\n\n\n"
        f"@app.cell\ndef _(screens):\n    screens.Profile.from_json({str(folder / 'profile.json')!r}).ui()\n    return\n\n\n"
        + "\n\n".join(cells)
    )
    return page


def notebook(folder: Path, names: list[str]) -> Path:
    """The same for Jupyter, as the outputs of cells that ran."""
    book = nbformat.v4.new_notebook()
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, name in enumerate(names, 1):
        data = json.loads((folder / f"{name}.bundle").read_text(encoding="utf-8"))
        output = nbformat.v4.new_output("execute_result", data, execution_count=number)
        book.cells.append(nbformat.v4.new_code_cell(f"p.{name}", execution_count=number, outputs=[output]))
    path = folder / "views.ipynb"
    nbformat.write(book, path)
    return path


def pictures(tab, names: list[str], out: Path, start: str, font: str) -> list[str]:
    """A picture of each view of an open page, of each of its folds opened, too; what is cut."""
    if font:
        tab.add_style_tag(content=f".tl, .tl *:not(code) {{ font-family: '{font}' !important }}")
    found = []
    roots = tab.locator(".tl")
    for number, name in enumerate(names):
        roots.nth(number).screenshot(path=out / f"{name}_{start}.png")
    tab.evaluate("document.querySelectorAll('.tl details').forEach(fold => fold.open = true)")
    tab.wait_for_timeout(500)
    for number, name in enumerate(names):
        found += [f"{name} {start}: {cut}" for cut in roots.nth(number).evaluate(f"root => ({CUT})(root)")]
        roots.nth(number).screenshot(path=out / f"{name}_{start}_open.png")
    return found


def marimo(out: Path, folder: Path, names: list[str], scale: float) -> list[str]:
    """Pictures of the views in marimo; what the page complained of, and what is cut."""
    found = []
    with browser.served(marimo_page(folder, names)) as url:
        for scheme, width, font in SHOTS:
            with browser.opened(url, scheme, width=width, height=HEIGHT, scale=scale) as (tab, seen):
                tab.locator(".tl").nth(len(names) - 1).wait_for(timeout=120_000, state="attached")
                tab.wait_for_timeout(1000)
                start = f"marimo_{scheme}_{width}{'_wide' if font else ''}"
                tab.locator("marimo-table").first.locator(
                    "xpath=ancestor::*[contains(@class, 'output')][1]"
                ).screenshot(path=out / f"ui_{start}.png")
                found += pictures(tab, names, out, start, font) + [f"{start}: {error}" for error in seen.errors]
    return found


@contextlib.contextmanager
def lab(jupyter: str, folder: Path, theme: str):
    """The URL of a JupyterLab on 127.0.0.1 that serves `folder` and keeps its settings in it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = folder / "settings" / "@jupyterlab"
    for file, values in (
        ("apputils-extension/themes", {"theme": theme}),
        ("apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False}),
        ("notebook-extension/tracker", {"windowingMode": "none"}),  # draw every cell, seen or not
    ):
        path = settings / f"{file}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    env = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTER_CONFIG_DIR": str(folder / "config"),
           "JUPYTER_DATA_DIR": str(folder / "data"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces")}  # fmt: skip
    for path in folder.glob("*.ipynb"):  # an untrusted page loses its style
        subprocess.run([jupyter, "trust", str(path)], env=env, check=True, capture_output=True)
    server = subprocess.Popen(
        [jupyter, "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--IdentityProvider.token=",
         f"--ServerApp.root_dir={folder}"],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api", timeout=2):
                break
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(20)


def jupyter_lab(jupyter: str, out: Path, folder: Path, names: list[str], scale: float) -> list[str]:
    """Pictures of the views in JupyterLab, as the outputs of a notebook that is trusted; what is cut."""
    found = []
    path = notebook(folder, names)
    for theme in ("light", "dark"):
        with lab(jupyter, folder, f"JupyterLab {theme.title()}") as url:
            for scheme, width, font in SHOTS:
                if scheme != theme:
                    continue
                with browser.opened(url, scheme, width=width, height=HEIGHT, scale=scale) as (tab, _):
                    tab.goto(f"{url}/doc/tree/{path.name}?reset")
                    tab.locator(".tl").nth(len(names) - 1).wait_for(timeout=120_000, state="attached")
                    tab.wait_for_timeout(2000)
                    start = f"jupyter_{scheme}_{width}{'_wide' if font else ''}"
                    found += pictures(tab, names, out, start, font)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jupyter", help="the `jupyter` command of an environment that has jupyterlab")
    parser.add_argument("--only", choices=("marimo", "jupyter"))
    parser.add_argument(
        "--views", type=Path, help="a folder that screens.py filled; without it the views are made first"
    )
    parser.add_argument("--scale", type=float, default=2, help="pixels of a picture to a pixel of the page")
    parser.add_argument("names", nargs="*", help="views of screens.py; default: all of them")
    args = parser.parse_intermixed_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.views or Path(temporary)
        names = [path.stem for path in sorted(folder.glob("*.bundle"))] or screens.write(folder)
        names = [name for name in names if not args.names or name in args.names]
        found = marimo(args.out, folder, names, args.scale) if args.only != "jupyter" else []
        if args.jupyter and args.only != "marimo":
            found += jupyter_lab(args.jupyter, args.out, folder, names, args.scale)
        print(*found, sep="\n")


if __name__ == "__main__":
    main()
