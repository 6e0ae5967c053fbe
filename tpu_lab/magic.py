"""`%tpu_profile` and `%%tpu_profile`: a thin shim over `tpu_lab.profile()` for IPython.

Imported by `%load_ext tpu_lab` only; nothing else of TPU Lab needs IPython. It uses what IPython 7.34 has, too: Colab's.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
import types
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from tpu_lab import options
from tpu_lab.profile import VIEWS, Profile


def _arguments(function):
    """The shared options as magic_arguments wants them: one decorator each, the last one first."""
    for flags, settings in reversed(options.MAGIC):
        settings = {**settings, "help": settings["help"].format(views=", ".join(VIEWS))}
        function = argument(*flags, **settings)(function)
    return function


@magics_class
class TpuProfileMagics(Magics):
    """The two magics. They change nothing but the names that the profiled code itself assigns, and `-v NAME`."""

    @no_var_expand
    @needs_local_scope
    @magic_arguments()
    @_arguments
    @line_cell_magic
    def tpu_profile(self, line, cell=None, local_ns=None):
        """Profile what a statement or a cell runs on device "tpu", and show where its time went.

        Names that the code assigns stay. An exception goes through after the report of what ran. A `;` at the end
        shows nothing. Options come before the code; `--` ends them.

        Examples::

            %tpu_profile loss = step(x, y)
            %tpu_profile -n 10 -w 2 --mode fused step(x, y)

            %%tpu_profile -v p --view summary,cache -s wasted
            for x, y in loader:
                step(x, y)

            %tpu_profile -q -T report.txt --html report.html --trace timeline.json.gz --csv ops.csv train()
            p = %tpu_profile -o -q train()
        """
        try:
            words, code = options.split(line, options.takes_value(self.tpu_profile.parser))
            args = parse_argstring(self.tpu_profile, words)
            options.check(args, VIEWS, Profile.orders)
        except options.Mistake as mistake:
            raise UsageError(f"%tpu_profile: {mistake}") from None
        if cell is not None:
            if code.strip():
                raise UsageError(
                    f"%%tpu_profile takes options only on its first line, not {code.strip()!r}: put the code below it"
                )
            code = cell
        _check(args, code)
        code_object, file = self._compile(code, "%tpu_profile" if cell is None else "%%tpu_profile")
        namespace = self.shell.user_ns
        names = (namespace,) if local_ns is None or local_ns is namespace else (namespace, local_ns)

        def run():
            exec(code_object, *names)

        import tpu_lab

        profiler = tpu_lab.profile(steps=args.steps, warmup=args.warmup, mode=args.mode, name=None)
        profiler.where = {"file": file, "line": 1, "end_line": max(1, len(code.rstrip().splitlines()))}
        holder = _Holder()
        __tracebackhide__ = True  # IPython leaves this frame out of tracebacks
        try:
            profiler.run(run, keep=holder)
        except BaseException as error:
            error.__traceback__ = _own(error.__traceback__, file)
            raise
        finally:  # after an exception, too: the report of what ran comes first, then the exception goes on
            if holder.profile is not None:
                self._deliver(holder.profile, args, code)
        return holder.profile if args.output and not _silenced(code) else None

    def _number(self) -> int:
        """The number of the cell that runs. `execution_count` may be that of the next one already."""
        numbers = getattr(self.shell.compile, "_filename_map", {})
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename in numbers:
                return numbers[frame.f_code.co_filename]
            frame = frame.f_back
        return self.shell.execution_count

    def _compile(self, code: str, magic: str):
        """The code as IPython would run it (magics, `!`, `?` work), with its lines known to tracebacks and records.

        UsageError for what is no Python, with its line: a SyntaxError from here would show frames of ours and IPython's.
        """
        cell = self.shell.transform_cell(code)
        name = self.shell.compile.cache(cell, self._number(), raw_code=code)
        try:
            tree = self.shell.transform_ast(self.shell.compile.ast_parse(cell, filename=name))
            return self.shell.compile(tree, name, "exec"), name
        except SyntaxError as error:
            if _awaits(cell):
                raise UsageError(
                    f"{magic} cannot await. A block can: with tpu_lab.profile() as p: await ..., then p on the last line"
                ) from None
            line = error.text.rstrip() if error.text else ""
            mark = f"\n    {line}\n    {' ' * (error.offset - 1)}^" if line and error.offset else ""
            raise UsageError(f"{magic}: {error.msg} in line {error.lineno}{mark}") from None

    def _deliver(self, profile, args, code: str) -> None:
        if args.variable:
            self.shell.user_ns[args.variable] = profile
        views = options.shown(profile, args)
        options.write(profile, args, views)
        shown_as_value = args.output and not args.view
        if not (args.quiet or shown_as_value or _silenced(code)):
            for view in views:
                display(view)


class _Holder:
    """Gets the profile before the code runs, so that it is there after an exception."""

    profile: Any = None


def _own(trail, file: str):
    """The traceback from the profiled code on; all of it when the code is not in it."""
    step = trail
    while step is not None and step.tb_frame.f_code.co_filename != file:
        step = step.tb_next
    return step or trail


def _silenced(code: str) -> bool:
    """Does it end in a `;`, comments aside?"""
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    last = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            last = last if token.type in skip else token.string
    except (SyntaxError, tokenize.TokenError):  # `!` and other magics are no Python
        return code.rstrip().endswith(";")
    return last == ";"


def _awaits(cell: str) -> bool:
    """Would it run as a coroutine?"""
    try:
        code = compile(cell, "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return False
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _check(args, code: str) -> None:
    if not code.strip():
        raise UsageError("%tpu_profile needs a statement, and %%tpu_profile a cell: %tpu_profile? shows examples")


def load_ipython_extension(ipython) -> None:
    """`%load_ext tpu_lab`."""
    ipython.register_magics(TpuProfileMagics)
