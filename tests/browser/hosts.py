"""The views inside real pages of JupyterLab and marimo: `python tests/browser/hosts.py out/ --jupyter PATH/TO/jupyter`.

Each view is shown by the host itself, light and dark, in a window of 1100 and of 760 px; look at the pictures. Without
--jupyter only marimo's are made: JupyterLab is no requirement of the tests.
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
import screenshots as browser  # noqa: E402
from fixtures import recorded, traces  # noqa: E402

from tpu_lab.profile import VIEWS, Profile  # noqa: E402

WIDTHS = (1100, 760)


def profile(name: str) -> Profile:
    """A fixture's profile: "stored" for the recording, else a made-up trace."""
    return Profile.from_json(recorded.FILE) if name == "stored" else Profile(getattr(traces, name)(), peak_flops=182e9)


def marimo_pages(folder: Path, shown: list[tuple[str, str]]) -> dict[str, Path]:
    """A marimo notebook a view."""
    pages = {}
    for fixture, name in shown:
        page = folder / f"{fixture}_{name}.py"
        page.write_text(
            '# /// script\n# [tool.marimo.display]\n# theme = "system"\n# ///\nimport marimo\n\n'
            'app = marimo.App(width="full")\n\n\n@app.cell\ndef _():\n    import sys\n\n'
            f"    sys.path[:0] = [{str(HERE)!r}]\n    import hosts\n\n    hosts.profile({fixture!r}).view({name!r})\n    return\n"
        )
        pages[f"{fixture}_{name}"] = page
    return pages


def marimo(out: Path, folder: Path, shown) -> list[str]:
    """Pictures of the views in marimo; what the pages complained of."""
    complaints = []
    for name, page in marimo_pages(folder, shown).items():
        with browser.served(page) as url:
            for scheme in ("light", "dark"):
                for width in WIDTHS:
                    with browser.opened(url, scheme, width=width, scale=2) as (tab, seen):
                        tab.locator(".tl").first.wait_for(timeout=120_000)
                        tab.wait_for_timeout(500)
                        browser.whole(tab)
                        tab.screenshot(path=out / f"marimo_{name}_{scheme}_{width}.png")
                        complaints += seen.errors
    return complaints


@contextlib.contextmanager
def lab(jupyter: str, folder: Path, theme: str):
    """The URL of a JupyterLab on 127.0.0.1 that serves `folder` and keeps its settings in it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    quiet = settings / "notification.jupyterlab-settings"
    quiet.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    env = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTER_CONFIG_DIR": str(folder / "config"),
           "JUPYTER_DATA_DIR": str(folder / "data"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces")}  # fmt: skip
    for notebook in folder.glob("*.ipynb"):  # an untrusted page loses its style
        subprocess.run([jupyter, "trust", str(notebook)], env=env, check=True, capture_output=True)
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


def jupyter_lab(jupyter: str, out: Path, folder: Path, shown) -> None:
    """Pictures of the views in JupyterLab, as the outputs of a notebook that is trusted."""
    for fixture, name in shown:
        notebook = nbformat.v4.new_notebook()
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        data = profile(fixture).view(name)._repr_mimebundle_()
        output = nbformat.v4.new_output("execute_result", data, execution_count=1)
        notebook.cells = [nbformat.v4.new_code_cell(f"p.{name}", execution_count=1, outputs=[output])]
        nbformat.write(notebook, folder / f"{fixture}_{name}.ipynb")
    for scheme, theme in (("light", "JupyterLab Light"), ("dark", "JupyterLab Dark")):
        with lab(jupyter, folder, theme) as url:
            for fixture, name in shown:
                for width in WIDTHS:
                    with browser.opened(url, scheme, width=width, height=3200, scale=2) as (tab, _):
                        tab.goto(f"{url}/doc/tree/{fixture}_{name}.ipynb?reset")
                        tab.locator(".tl").first.wait_for(timeout=120_000)
                        tab.wait_for_timeout(1500)
                        tab.locator(".tl").first.screenshot(
                            path=out / f"jupyterlab_{fixture}_{name}_{scheme}_{width}.png"
                        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jupyter", help="the `jupyter` command of an environment that has jupyterlab")
    parser.add_argument("--only", choices=("marimo", "jupyter"))
    parser.add_argument(
        "views", nargs="*", help="fixture.view, such as mingpt.summary (default: each view of the recording)"
    )
    args = parser.parse_args()
    shown = [tuple(v.split(".")) for v in args.views] or [("stored", name) for name in VIEWS]
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if args.only != "jupyter":
            print(*marimo(args.out, Path(folder), shown), sep="\n")
        if args.jupyter and args.only != "marimo":
            jupyter_lab(args.jupyter, args.out, Path(folder), shown)


if __name__ == "__main__":
    main()
