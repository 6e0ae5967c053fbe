"""`tpu-lab coverage [op ...] [--model module:factory]`: which ops there are here, and which TorchTPU has."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add(commands) -> None:
    """The grammar of `tpu-lab coverage`."""
    it = commands.add_parser("coverage", help="which ops there are here and on TorchTPU, or that a model needs")
    it.add_argument(
        "op", nargs="*", help='such as "mm" or "aten.add.Tensor" (default: the totals of TorchTPU\u2019s lists)'
    )
    it.add_argument("--model", metavar="MODULE:FACTORY", help="a model of yours: factory() gives (model, input, ...)")
    it.add_argument("--forward", action="store_true", help="with --model: without the backward pass")
    it.add_argument("--csv", type=Path, metavar="F", help="also write the table to a file")
    it.add_argument("--md", type=Path, metavar="F", help="also write TorchTPU\u2019s lists as a Markdown page")
    it.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table; 2 for an op or a model that cannot be."""
    from tpu_lab.coverage import of_factory, page, table

    if arguments.model and arguments.op:
        print("tpu-lab coverage: give ops or --model, not both", file=sys.stderr)
        return 2
    sys.path.insert(0, "")  # the user's module lies in the current folder
    try:
        if arguments.model:
            view = of_factory(arguments.model, backward=not arguments.forward)
        else:
            view = table(arguments.op)
    except (KeyError, ValueError, ImportError, AttributeError) as error:
        print(f"tpu-lab coverage: {error.args[0] if error.args else error}", file=sys.stderr)
        return 2
    finally:
        sys.path.remove("")
    print(view)
    if arguments.csv:
        view.rows.to_csv(arguments.csv, index=False)
        print(f"\nAll {len(view)} rows: {arguments.csv}")
    if arguments.md:
        arguments.md.write_text(page(), encoding="utf-8")
        print(f"\nTorchTPU\u2019s lists as a page: {arguments.md}")
    return 0
