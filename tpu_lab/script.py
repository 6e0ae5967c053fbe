"""`tpu-lab profile script.py [args]`: run a script that knows nothing of the lab, and report what ran on "tpu".

The script sees what it would see under `python`: its own sys.argv, its folder first on sys.path, `__name__` as
"__main__"; its exit code and its exceptions go through after the report. The report goes to stderr, so that the
script's own output stays what it was.
"""

from __future__ import annotations

import argparse
import ast
import os
import runpy
import sys
import tokenize
import traceback
from pathlib import Path
from types import TracebackType

from tpu_lab import options

LATE = ("--json", "--html", "--trace", "--csv")  # may also follow the script's own arguments
ELSEWHERE = ("cuda", "cpu", "mps", "xla")


def add(commands) -> None:
    """The grammar of `tpu-lab profile`."""
    it = commands.add_parser(
        "profile",
        help="run a script, unchanged, and report what ran on the device",
        description=profile.__doc__,
        usage="tpu-lab profile [options] (script.py | -m module) [arguments of the script]",
        epilog="Options come before the script; --json, --html, --trace and --csv may also follow it, and a bare --json "
        "prints the records as the last line. What stands after `--` is the script's, whatever it is.",
        allow_abbrev=False,
    )
    it.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module with its arguments, as `python -m` does")
    options.fill(it, [*options.SHOW, *options.FILES], ("all of the report",))
    it.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    it.set_defaults(run=profile)


def profile(arguments: argparse.Namespace) -> int:
    """Run a script or a module as `python` would, recording what runs on device "tpu"; the report goes to stderr."""
    from tpu_lab.profile import VIEWS, Profile

    words = [*(arguments.module or ()), *arguments.script]
    words = words[1:] if arguments.module is None and words[:1] == ["--"] else words
    target, rest = (words[0], words[1:]) if words else (None, [])
    try:
        rest = _late(arguments, rest)
        options.check(arguments, VIEWS, Profile.orders)
        if target is None:
            raise options.Mistake("say what to run: tpu-lab profile script.py, or tpu-lab profile -m module")
        if arguments.module is None and not Path(target).is_file():
            raise options.Mistake(
                f"there is no script {target}" + (": options come before it" if target[:1] == "-" else "")
            )
    except options.Mistake as mistake:
        print(f"tpu-lab profile: {mistake}", file=sys.stderr)
        return 2
    for flags, settings in options.FILES:  # from where the command was given, wherever the script goes
        name = settings.get("dest", flags[-1].lstrip("-"))
        if (path := getattr(arguments, name, None)) not in (None, "-"):
            setattr(arguments, name, os.path.abspath(path))
    recorded, end = run(target, rest, module=arguments.module is not None, mode=arguments.mode)
    sys.stdout.flush()
    _report(recorded, arguments)
    if end is None:
        return 0
    if isinstance(end, SystemExit):
        raise end
    sys.excepthook(type(end), end, end.__traceback__)
    return 130 if isinstance(end, KeyboardInterrupt) else 1  # 130: what a shell makes of an end by Ctrl-C


def _late(arguments: argparse.Namespace, rest: list[str]) -> list[str]:
    """Take the lab's file options out of the script's arguments, up to a `--`."""
    stop = rest.index("--") if "--" in rest else len(rest)
    late = options.Parser(add_help=False, allow_abbrev=False)
    for flags, settings in options.FILES:
        if flags[-1] in LATE:  # a bare --json prints the records
            late.add_argument(*flags, **(settings | ({"nargs": "?", "const": "-"} if flags[-1] == "--json" else {})))
    found, own = late.parse_known_args(rest[:stop])
    for name, path in vars(found).items():
        if path:
            setattr(arguments, name, path)
    return own + rest[stop + 1 :]


def run(target: str, args: list[str], *, module: bool = False, mode: str | None = None):
    """(Profile, how it ended): None, or the exception that ended it, with a traceback that begins in the script."""
    import tpu_lab

    before = sys.argv, list(sys.path)
    sys.argv = [target, *args]
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    source = "" if module else _source(target)
    profiler = tpu_lab.profile(mode=mode)
    profiler.where = {"file": target, "line": 1, "end_line": max(1, source.count("\n"))} if source else {"name": target}
    end: BaseException | None = None
    try:
        with profiler as recorded:
            recorded.trace.meta["whole"] = f"`tpu-lab profile` records all of {target}"
            try:
                runpy.run_module(target, run_name="__main__", alter_sys=True) if module else runpy.run_path(
                    target, run_name="__main__"
                )
            except SystemExit as exit:
                end = exit
                if exit.code not in (None, 0):
                    recorded.trace.meta["error"] = f"SystemExit: {exit.code}"
            except BaseException as error:
                end = error
                recorded.trace.meta["error"] = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
                error.__traceback__ = _own(error.__traceback__)
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
    recorded.trace.meta.pop("whole", None)
    if end is None and not recorded.trace.ops and not recorded.trace.launches and source and (hint := device_hint(target, source)):
        recorded.trace.meta["hint"] = hint
    return recorded, end


def _report(recorded, arguments: argparse.Namespace) -> None:
    from tpu_lab.viz import theme

    views = options.shown(recorded, arguments)
    if not arguments.quiet:
        for view in views:
            print(view.text(theme.colours_wanted(sys.stderr)), end="\n\n", file=sys.stderr)
    if arguments.json == "-":
        recorded.to_json(sys.stdout)
    for file in options.write(recorded, arguments, views):
        print(f"wrote {file}", file=sys.stderr)


def _own(trail: TracebackType | None) -> TracebackType | None:
    """The traceback without the lab's and runpy's frames at its top: it begins where the script does, if it began at all."""
    ours = {__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"}
    step = trail
    while step is not None and step.tb_frame.f_code.co_filename in ours:
        step = step.tb_next
    return step


def _source(path: str) -> str:
    try:
        return tokenize.open(path).read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def device_hint(path: str, source: str) -> str:
    """What to change in a script that ran nothing on "tpu": the line that names its device, or how to name one."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    loads = [k for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "map_location"]
    skipped = {id(inner) for k in loads for inner in ast.walk(k)}
    named = 0  # the line that names ours
    found = []  # (line, column, what is written there, what to write instead)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            if node.value.split(":")[0] == "tpu":
                named = named or node.lineno
            if node.value.split(":")[0] in ELSEWHERE:
                found.append((node.lineno, node.col_offset, f'"tpu" instead of "{node.value}"'))
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) != "torch":
            found.append((node.lineno, node.col_offset, '.to("tpu") instead of .cuda()'))
    if named:
        return (
            f"{os.path.basename(path)}:{named} names \"tpu\", and no op came there: either that line was not reached, or "
            "neither the model nor its inputs were moved to what it names"
        )
    if found:
        line, _, instead = min(found)
        code = source.splitlines()[line - 1].strip()[:80]
        return (
            f"Its tensors were on another device: {os.path.basename(path)}:{line} says `{code}`. Write {instead} there"
        )
    return (
        f"{os.path.basename(path)} names no device, so its tensors were on the CPU: move the model and its inputs with "
        '.to("tpu"), or begin it with torch.set_default_device("tpu")'
    )
