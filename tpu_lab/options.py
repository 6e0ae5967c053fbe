"""The options of `%tpu_profile`: one list for the magic, for `tpu-lab profile` and for `tpu-lab convert`.

Options come before the code, and the code may hold any `-x` itself: `split` finds where it begins.
"""

from __future__ import annotations

import argparse
import os
import shlex
from typing import Any

from tpu_lab import targets

SORTS = ("time", "wasted", "bytes", "flops", "compiles")
MODES = ("fused", "strict", "debug")

Option = tuple[tuple[str, ...], dict[str, Any]]
RUN: tuple[Option, ...] = (
    (
        ("-n", "--steps"),
        {"type": int, "default": 1, "metavar": "N", "help": "run the code N times, each a step (default 1: code has side effects)"},
    ),
    (("-w", "--warmup"), {"type": int, "default": 0, "metavar": "N", "help": "run it N times before that, not averaged"}),
    (("-o",), {"dest": "output", "action": "store_true", "help": "return the Profile"}),
    (("-v",), {"dest": "variable", "metavar": "NAME", "help": "store the Profile in NAME"}),
)  # fmt: skip
SHOW: tuple[Option, ...] = (
    (("-q", "--quiet"), {"action": "store_true", "help": "show nothing"}),
    (("-l", "--limit"), {"type": int, "metavar": "N", "help": "rows that are shown before a fold"}),
    (
        ("-s", "--sort"),
        {"choices": SORTS, "help": "order of the rows: time, bytes and flops for ops, compiles (seconds) and wasted "
         "(seconds compiling what ran once) for call sites"},
    ),
    (("--view",), {"metavar": "V[,V]", "help": "the views to show: {views} (default summary)"}),
    (("--mode",), {"choices": MODES, "help": "eager mode of the run"}),
    (("--chip",), {"metavar": "CHIP", "help": "add the TPU compiler's view for a chip, such as v6e"}),
)  # fmt: skip
FILES: tuple[Option, ...] = (
    (("-T", "--text"), {"dest": "text", "metavar": "FILE", "help": "write the report as text"}),
    (("--html",), {"metavar": "FILE", "help": "write the report as one HTML file"}),
    (("--trace",), {"metavar": "FILE", "help": "write a timeline for ui.perfetto.dev"}),
    (("--csv",), {"metavar": "FILE", "help": "write the rows of the ops view"}),
    (("--json",), {"metavar": "FILE", "help": "write all records; tpu_lab.Profile.from_json reads them"}),
)
MAGIC = (*RUN, *SHOW, *FILES)


class Mistake(ValueError):
    """A wrong option, in one sentence."""


class Parser(argparse.ArgumentParser):
    """argparse that raises Mistake instead of ending the process."""

    def error(self, message: str):
        raise Mistake(message)


def magic_parser(views: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """The magic's grammar without IPython."""
    return fill(Parser(prog="%tpu_profile", add_help=False, allow_abbrev=False), MAGIC, views)


def fill(parser, options, views: tuple[str, ...] = ()):
    """Add options to an ArgumentParser; `{views}` in a help text becomes the views' names."""
    for flags, settings in options:
        settings = {**settings, "help": settings["help"].format(views=", ".join(views))}
        parser.add_argument(*flags, **settings)
    return parser


def takes_value(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """Option string -> does it take a value?"""
    return {text: action.nargs != 0 for action in parser._actions for text in action.option_strings}


def split(line: str, takes: dict[str, bool]) -> tuple[str, str]:
    """(options, code): options end at the first word that is none."""
    rest, taken = line.lstrip(), []
    while rest.startswith("-"):
        word, _, after = rest.partition(" ")
        if word == "--":
            return " ".join(taken), after.lstrip()
        name, equals, _ = word.partition("=")
        if name not in takes:
            short = word[:2]
            if word.startswith("--") or short not in takes:
                if not word.startswith("--") and not word[1:2].isalpha():
                    break  # `-1 * x`: a number, so the code has begun
                raise Mistake(f"there is no option {word}: %tpu_profile? lists them")
            name, equals = short, "="  # -n3
        taken.append(word)
        rest = after.lstrip()
        if takes[name] and not equals:
            value, rest = _word(rest)
            taken.append(value)
    return " ".join(taken), rest


def _word(text: str) -> tuple[str, str]:
    """The first word, quotes respected, and what follows."""
    lexer = shlex.shlex(text, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        word = lexer.get_token() or ""
    except ValueError:
        raise Mistake(f"a quote is not closed in {text!r}") from None
    return word, text[text.index(word) + len(word) :].lstrip() if word else ""


def names(view: str | None) -> list[str]:
    """The views of `--view a,b`, each once; the summary when none is given."""
    return list(dict.fromkeys(v.strip() for v in view.split(",") if v.strip())) if view else ["summary"]


def check(args, views: tuple[str, ...], orders) -> None:
    """Each bad option is one sentence (Mistake), before any code runs. orders: view -> the orders it knows."""
    if getattr(args, "steps", 1) < 1 or getattr(args, "warmup", 0) < 0:
        raise Mistake("-n wants at least 1 step and -w no negative number")
    for name in names(args.view):
        if name not in views:
            raise Mistake(f"there is no view {name!r}: there are {', '.join(views)}")
    if args.sort and not any(args.sort in orders(name) for name in names(args.view)):
        knows = [name for name in views if args.sort in orders(name)]
        raise Mistake(
            f"{' and '.join(names(args.view))} cannot be sorted by {args.sort}: add --view {' or '.join(knows)}"
        )
    if args.limit is not None and args.limit < 1:
        raise Mistake("-l wants at least 1 row")
    if args.chip:
        try:
            targets.target(args.chip)
        except ValueError as error:
            raise Mistake(str(error)) from None
    for path in (args.html, args.trace, args.csv, args.json, args.text):
        if path and path != "-" and not os.path.isdir(os.path.dirname(path) or "."):
            raise Mistake(f"there is no folder {os.path.dirname(path)} to write {os.path.basename(path)} into: make it first")
    variable = getattr(args, "variable", None)
    if variable and not variable.isidentifier():
        raise Mistake(f"-v wants a name to store the profile in, not {variable!r}")


def shown(profile, args) -> list:
    """The views that the options ask for, in their order; a view that does not know `-s` keeps its own order."""
    views = [
        profile.view(v, args.limit, args.sort if args.sort in profile.orders(v) else None) for v in names(args.view)
    ]
    return [*views, profile.chip_view(args.chip, args.limit)] if args.chip else views


def write(profile, args, views: list) -> list[str]:
    """Write the files that the options ask for; gives their names."""
    written = []
    for path, writer in ((args.html, profile.to_html), (args.trace, profile.to_perfetto), (args.csv, profile.to_csv),
                         (None if args.json == "-" else args.json, profile.to_json)):  # fmt: skip
        if path:
            writer(path)
            written.append(str(path))
    if args.text:
        with open(args.text, "w", encoding="utf-8") as file:
            file.write("\n\n".join(map(str, views)) + "\n")
        written.append(args.text)
    return written
