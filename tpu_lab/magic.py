"""`%tpu_profile` and `%%tpu_profile`: a thin shim over `tpu_lab.profile()` for IPython.

Imported by `%load_ext tpu_lab` only; nothing else of TPU Lab needs IPython.
"""

from __future__ import annotations

import shlex
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
    output_can_be_silenced,
)
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

SORTS = ("time", "wasted", "bytes", "flops", "compiles")


@magics_class
class TpuProfileMagics(Magics):
    """The two magics. They change nothing but the names that the profiled code itself assigns, and `-v NAME`."""

    @output_can_be_silenced
    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @argument(
        "-n",
        "--steps",
        type=int,
        default=1,
        metavar="N",
        help="run the code N times, each a step (default 1: code has side effects)",
    )
    @argument("-w", "--warmup", type=int, default=0, metavar="N", help="run it N times before that, not averaged")
    @argument("-o", dest="output", action="store_true", help="return the Profile")
    @argument("-v", dest="variable", metavar="NAME", help="store the Profile in NAME")
    @argument("-q", "--quiet", action="store_true", help="show nothing")
    @argument("-l", "--limit", type=int, metavar="N", help="rows that are shown before a fold")
    @argument("-s", "--sort", choices=SORTS, help="order of the rows")
    @argument("-T", dest="text", metavar="FILE", help="write the report as text")
    @argument("--view", metavar="V[,V]", help="the views to show: summary, ops, cache (default summary)")
    @argument("--mode", choices=("fused", "strict", "debug"), help="eager mode of the run")
    @argument("--chip", metavar="CHIP", help="add the TPU compiler's view for a chip, such as v6e")
    @argument("--html", metavar="FILE", help="write the report as one HTML file")
    @argument("--trace", metavar="FILE", help="write a timeline for ui.perfetto.dev")
    @argument("--csv", metavar="FILE", help="write the rows of the ops view")
    @line_cell_magic
    def tpu_profile(self, line, cell=None, local_ns=None):
        """Profile what a statement or a cell runs on device "tpu", and show where its time went.

        Names that the code assigns stay. An exception goes through after the report of what ran. A `;` at the end
        shows nothing. Options come before the code; `--` ends them.

        Examples::

            %tpu_profile loss = step(x, y)
            %tpu_profile -n 10 -w 2 --mode fused step(x, y)

            %%tpu_profile -v p --view summary,cache
            for x, y in loader:
                step(x, y)
        """
        options, code = _split(line, _takes_value(self.tpu_profile.parser))
        args = parse_argstring(self.tpu_profile, options)
        if cell is not None:
            if code.strip():
                raise UsageError(
                    f"%%tpu_profile takes options only on its first line, not {code.strip()!r}: put the code below it"
                )
            code = cell
        _check(args, code)
        code_object, file = self._compile(code)
        namespace = self.shell.user_ns
        names = (namespace,) if local_ns is None or local_ns is namespace else (namespace, local_ns)

        def run():
            exec(code_object, *names)

        import tpu_lab

        profiler = tpu_lab.profile(steps=args.steps, warmup=args.warmup, mode=args.mode, name=None)
        profiler.where = {"file": file, "line": 1, "end_line": max(1, len(code.rstrip().splitlines()))}
        holder = _Holder()
        try:
            profiler.run(run, keep=holder)
        finally:  # after an exception, too: the report of what ran comes first, then the exception goes on
            if holder.profile is not None:
                self._deliver(holder.profile, args, code)
        return holder.profile if args.output else None

    def _compile(self, code: str):
        """The code as IPython would run it (magics, `!`, `?` work), with its lines known to tracebacks and records."""
        cell = self.shell.transform_cell(code)
        name = self.shell.compile.cache(cell, self.shell.execution_count, raw_code=code)
        tree = self.shell.transform_ast(self.shell.compile.ast_parse(cell, filename=name))
        return self.shell.compile(tree, name, "exec"), name

    def _deliver(self, profile, args, code: str) -> None:
        if args.variable:
            self.shell.user_ns[args.variable] = profile
        for path, write in (
            (args.html, profile.to_html),
            (args.trace, profile.to_perfetto),
            (args.csv, profile.to_csv),
        ):
            if path:
                write(path)
        views = [
            profile.view(name, args.limit, args.sort if name in _sorted_by(args.sort) else None)
            for name in _names(args.view)
        ]
        if args.text:
            with open(args.text, "w", encoding="utf-8") as f:
                f.write("\n\n".join(str(v) for v in views) + "\n")
        shown_as_value = args.output and not args.view
        if not (args.quiet or shown_as_value or DisplayHook.semicolon_at_end_of_expression(code)):
            for view in views:
                display(view)


class _Holder:
    """Gets the profile before the code runs, so that it is there after an exception."""

    profile: Any = None


def _takes_value(parser) -> dict[str, bool]:
    """Option string -> does it take a value?"""
    return {text: action.nargs != 0 for action in parser._actions for text in action.option_strings}


def _split(line: str, takes_value: dict[str, bool]) -> tuple[str, str]:
    """(options, code): options end at the first word that is none, so that the code may hold any `-x` itself."""
    rest, taken = line.lstrip(), []
    while rest.startswith("-"):
        word, _, after = rest.partition(" ")
        if word == "--":
            return " ".join(taken), after.lstrip()
        name, equals, _ = word.partition("=")
        if name not in takes_value:
            short = word[:2]
            if word.startswith("--") or short not in takes_value:
                if not word.startswith("--") and not word[1:2].isalpha():
                    break  # `-1 * x`: a number, so the code has begun
                raise UsageError(f"%tpu_profile has no option {word}: %tpu_profile? lists them")
            name, equals = short, "="  # -n3
        taken.append(word)
        rest = after.lstrip()
        if takes_value[name] and not equals:
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
        raise UsageError(f"%tpu_profile: a quote is not closed in {text!r}") from None
    return word, text[text.index(word) + len(word) :].lstrip() if word else ""


def _names(view: str | None) -> list[str]:
    return [v.strip() for v in view.split(",") if v.strip()] if view else ["summary"]


def _sorted_by(sort: str | None) -> tuple[str, ...]:
    """The views that know this order."""
    return {"compiles": ("cache",), None: ()}.get(sort, ("ops", "summary"))


def _check(args, code: str) -> None:
    """Each bad option is one sentence, before any code runs."""
    from tpu_lab.profile import VIEWS

    if args.chip:
        raise UsageError(
            f"--chip {args.chip} needs the TPU compiler's view, which this version does not have yet: leave it out"
        )
    if args.steps < 1 or args.warmup < 0:
        raise UsageError("%tpu_profile: -n wants at least 1 step and -w no negative number")
    for name in _names(args.view):
        if name not in VIEWS:
            raise UsageError(f"%tpu_profile has no view {name!r}: there are {', '.join(VIEWS)}")
    if args.sort == "wasted":
        raise UsageError("%tpu_profile: no view knows the order 'wasted' yet: sort by time, bytes, flops or compiles")
    if args.variable and not args.variable.isidentifier():
        raise UsageError(f"%tpu_profile -v wants a name to store the profile in, not {args.variable!r}")
    if not code.strip():
        raise UsageError("%tpu_profile needs a statement, and %%tpu_profile a cell: %tpu_profile? shows examples")


def load_ipython_extension(ipython) -> None:
    """`%load_ext tpu_lab`."""
    ipython.register_magics(TpuProfileMagics)
