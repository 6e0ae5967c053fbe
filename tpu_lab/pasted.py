"""A model that somebody pasted: its code read and run, the inputs it asks for made, its errors told in a sentence.

    given = pasted.inputs("8, 3, 32, 32")
    model = pasted.model_of(code)

In every view the code's lines are those of a file `model.py`, which is nowhere on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import linecache
import re
import threading
import traceback

import torch
import torch.nn.functional as F
from torch import nn

from tpu_lab import errors

FILE = "model.py"
LARGEST = 2**24  # numbers in an input: more would keep a page waiting
PATIENCE = 60  # seconds
# A prototype of our own: whoever else uses the function may have given it other types.
_raise_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(("PyThreadState_SetAsyncExc", ctypes.pythonapi))
KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64, "i32": torch.int32}
_SHAPE = re.compile(r"(?:(\w+)\s*)?(?:\[([\d\s,]*)\]|\(([\d\s,]*)\))|([\d\s,]+)")


def inputs(text: str) -> list[torch.Tensor]:
    """The inputs that `8, 3, 32, 32` or `i64[8, 64]; f32[8, 16]` asks for, on the CPU.

    Random numbers, the same each time; of whole numbers 0 to 9 in turn, which every table of at least ten rows has.
    ValueError says how to write it.
    """
    return [_input(part.strip()) for part in text.split(";")]


def _input(text: str) -> torch.Tensor:
    found = _SHAPE.fullmatch(text)
    kind = (found[1] or "f32") if found else ""
    sizes = [int(size) for size in re.findall(r"\d+", found[2] or found[3] or found[4] or "")] if found else []
    if not sizes or kind not in KINDS:
        raise ValueError(
            f"“{text}” is no shape: write 8, 3, 32, 32 or i64[8, 64], several with ; between them; there are "
            f"{', '.join(KINDS)}"
        )
    total = torch.Size(sizes).numel()
    if not 0 < total <= LARGEST:
        raise ValueError(f"{text} has {total:,} numbers: from 1 to {LARGEST:,} can be tried here")
    if KINDS[kind].is_floating_point:
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(KINDS[kind])
    return (torch.arange(total) % 10).view(sizes).to(KINDS[kind])


def model_of(code: str) -> nn.Module:
    """The model that the code makes: its last nn.Module, else its last class of one, called without arguments.

    torch, nn and F are there without an import. ValueError when there is no model; errors of the code go through.
    """
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)  # for the views that show lines
    torch.manual_seed(0)
    names = {"__name__": "model", "torch": torch, "nn": nn, "F": F}
    exec(compile(code, FILE, "exec", dont_inherit=True), names)
    if models := [thing for thing in names.values() if isinstance(thing, nn.Module)]:
        return models[-1]
    own = (thing for thing in names.values() if isinstance(thing, type) and thing.__module__ == "model")
    classes = [thing for thing in own if issubclass(thing, nn.Module)]
    if not classes:
        raise ValueError("it makes no nn.Module: paste a class Net(nn.Module), or end with model = …")
    named = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    signature = inspect.signature(classes[-1]).parameters.values()
    if needs := [one.name for one in signature if one.default is one.empty and one.kind not in named]:
        made = f"model = {classes[-1].__name__}({', '.join(f'{name}=…' for name in needs)})"
        raise ValueError(f"{classes[-1].__name__} needs {', '.join(needs)}: end with {made}")
    return classes[-1]()


class TookTooLong(BaseException):
    """Raised in the middle of pasted code; no Exception, which its loop may catch and go on."""

    def __str__(self):
        return f"it was still running after {PATIENCE} s, and was stopped"


@contextlib.contextmanager
def within_patience():
    """TookTooLong ends what takes longer, between two steps of Python; a call into C is waited for.

    Not for code that calls the device: it must not stop there half way.
    """
    thread, done, one_at_a_time = threading.get_ident(), threading.Event(), threading.Lock()

    def watch():
        wait = PATIENCE
        while not done.wait(wait):
            with one_at_a_time:
                if not done.is_set():
                    _raise_in(thread, id(TookTooLong))
            wait = 1  # the code may catch everything: again

    threading.Thread(target=watch, name="tpu_lab patience", daemon=True).start()
    try:
        yield
    finally:
        with one_at_a_time:
            done.set()
            _raise_in(thread, None)  # asked for, and not raised yet


def said(error: BaseException, code: str, doing: str) -> str:
    """An error of pasted code in one sentence, with the line that it came through, else what was being done."""
    through = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    if isinstance(error, SyntaxError) and error.filename == FILE:
        through, words = [error.lineno], f"Python cannot read it, {error.msg}"
    else:
        words = errors.line(error, 400) or "it says no more"
        words = "this ends the program" if isinstance(error, SystemExit) else words
        if not isinstance(error, TookTooLong) and (through or not isinstance(error, ValueError)):
            words = f"{type(error).__name__}, {words}"
    lines, line = code.splitlines(), (through or [0])[-1] or 0
    if not 0 < line <= len(lines):
        return f"{doing}: {words}"
    return f"Line {line}, “{lines[line - 1].strip()}”: {words}"
