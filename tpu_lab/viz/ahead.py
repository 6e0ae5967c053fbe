"""Views of a chip that were made ahead of time for a notebook: they also show where no TPU compiler is.

    python -m tpu_lab.viz.ahead notebooks/resnet.py        makes data/precomputed/resnet.json.gz anew

They come with the package, so a twin that was copied alone, to Colab or anywhere, finds them.
A notebook that has such a file has a function `ahead(params)`, which gives what is to be kept: a dict of names and
what shows itself (a view, a `Compiled`) or plain figures. `read` gives the same names; the file says with which releases
it was made.
"""

from __future__ import annotations

import ast
import gzip
import importlib.metadata
import importlib.util
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tpu_lab.place import short_file
from tpu_lab.viz.view import View

FORMAT = 1
FOLDER = Path(__file__).resolve().parents[1] / "data" / "precomputed"
RELEASES = ("libtpu", "jax", "torch")


@dataclass(frozen=True)
class Ahead:
    """What a file holds. params: the notebook's defaults it was made with. made_with: releases by package.

    shown: views and figures by name.
    """

    params: dict[str, Any]
    made_with: dict[str, str]
    shown: dict[str, Any]

    @property
    def words(self) -> str:
        """`compiled ahead of time: libtpu 0.0.42.1, jax 0.10.2, torch 2.13.0`."""
        return "compiled ahead of time: " + ", ".join(f"{name} {self.made_with[name]}" for name in RELEASES)

    @property
    def words_at_first(self) -> str:
        """The same, of a page whose controls may have been moved since."""
        return f"{self.words}, for what the controls start with"

    def __getitem__(self, name: str) -> Any:
        return self.shown[name]


def write(path: Path, params: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
    """Keep views and figures; the same contents give the same bytes."""
    content = {
        "format": FORMAT,
        "params": dict(params),
        "made_with": {name: importlib.metadata.version(name).partition("+")[0] for name in RELEASES},
        "shown": {name: _plain(thing) for name, thing in shown.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(content, sort_keys=True).encode(), mtime=0))


def read(path: Path) -> Ahead:
    """What `write` kept; ValueError for a file of another format."""
    content = json.loads(gzip.decompress(Path(path).read_bytes()))
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{Path(path).name} has format {content.get('format')}, this code reads {FORMAT}: make it anew"
        )
    shown = {name: _view(thing) if _kept_view(thing) else thing for name, thing in content["shown"].items()}
    return Ahead(content["params"], content["made_with"], shown)


def of(name: str) -> Ahead:
    """What was made for the notebook of this name."""
    file = FOLDER / f"{name}.json.gz"
    if not file.exists():
        raise FileNotFoundError(f"no {file.name} in {FOLDER}: python -m tpu_lab.viz.ahead notebooks/{name}.py makes it")
    return read(file)


def params_of(notebook: Path) -> dict[str, Any]:
    """The values in the `params` cell of a notebook."""
    for node in ast.walk(ast.parse(notebook.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["params"]:
            return ast.literal_eval(node.value)
    raise ValueError(f"{notebook.name} has no cell with params = {{...}}")


def _plain(thing: Any) -> Any:
    view = getattr(thing, "view", thing)
    if not isinstance(view, View):
        return thing
    rows = view.rows
    if "file" in rows:  # a path of the machine that made it says nothing elsewhere
        rows = rows.assign(file=[short_file(file) if file else "" for file in rows["file"]])
    about = {name: getattr(view, name) for name in ("name", "title", "finding")}
    return {"view": about, "body": str(view.body), "text": view.text(), "rows": rows.to_json(orient="split")}


def _kept_view(thing: Any) -> bool:
    return isinstance(thing, dict) and set(thing) == {"view", "body", "text", "rows"}


def _view(kept: dict[str, Any]) -> View:
    import pandas as pd

    about = kept["view"]
    return View(
        about["name"],
        about["title"],
        about["finding"],
        lambda: pd.read_json(io.StringIO(kept["rows"]), orient="split"),
        lambda: [[line] for line in kept["text"].splitlines()],
        lambda: Markup(kept["body"]),
    )


def main(arguments: list[str]) -> int:
    """Make the files of these notebooks anew; the exit code."""
    for argument in arguments:
        notebook = Path(argument)
        spec = importlib.util.spec_from_file_location(f"notebook_{notebook.stem}", notebook)
        if spec is None or spec.loader is None or not notebook.exists():
            print(f"no notebook at {argument}")
            return 2
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        params = params_of(notebook)
        path = FOLDER / f"{notebook.stem}.json.gz"
        write(path, params, module.ahead(params))
        print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
