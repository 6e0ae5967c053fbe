"""Where in the user's program are we? The file and line behind an ATen call, and the nn.Module path around it."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import sysconfig
import threading
import warnings
from typing import NamedTuple

import torch

from tpu_lab.backend import owners


class Site(NamedTuple):
    """One line of the user's code; `file` is "" when no user frame is on the stack."""

    file: str
    line: int
    code: str


NOWHERE = Site("", 0, "")
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_MODELS = (os.path.join(PACKAGE, "models", ""), os.path.join(PACKAGE, "lessons", ""))
_LIBRARIES = tuple(
    os.path.join(path, "") for path in {sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib")}
)
_is_user: dict[str, bool] = {}  # file -> does it belong to the user
_lines: dict[tuple[str, int], Site] = {}  # what was read of the user's files; a notebook's cell may change: see watch_modules


def _user_code(code) -> bool:
    file = code.co_filename
    if file.startswith(PACKAGE):  # plain PyTorch: the user's, as far as a reader is concerned
        return file.startswith(_MODELS)
    if "ipykernel" in file or "/marimo/" in file:
        return "site-packages" not in file and "/marimo/_" not in file  # their temporary cell files are the user's
    return not file.startswith((*_LIBRARIES, "<frozen", "<string>", "<__array_function__"))


def site(skip: int = 1) -> Site:
    """The innermost user line on this thread's stack."""
    try:
        frame = sys._getframe(skip)
    except ValueError:  # C++ called the backend itself, on a thread of its own
        return NOWHERE
    return _site_of(frame)


def _site_of(frame) -> Site:
    return read(spot(frame))


def spot(frame) -> tuple | None:
    """(code, position in it, globals) of the innermost user frame, for `read`; None without one. A line number costs more."""
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        user = _is_user.get(file)  # by file: Dynamo makes code objects that cannot be hashed
        if user is None:
            user = _is_user[file] = _user_code(code)
        if user:
            return code, frame.f_lasti, frame.f_globals
        frame = frame.f_back
    return None


def read(found: tuple | None) -> Site:
    """The line of a spot."""
    if found is None:
        return NOWHERE
    code, at, names = found
    line = next((line for start, end, line in code.co_lines() if start <= at < end), None) or code.co_firstlineno
    key = code.co_filename, line
    site = _lines.get(key)
    if site is None:
        text = linecache.getline(*key, names).strip()
        if len(_lines) >= 10_000:
            _lines.clear()
        site = _lines[key] = Site(*key, text)
    return site


def compile_site() -> Site:
    """The user's line for a program that is about to be made: on a thread that C++ made the main thread's, which waits for it."""
    here = site(2)
    if here.file:
        return here
    frame = sys._current_frames().get(threading.main_thread().ident)
    return NOWHERE if frame is None else _site_of(frame)


def within() -> str | None:
    """Which call of the user's line is this: the innermost nn.Module in forward, "" outside of any. None in a backward
    pass and in an optimizer's step, where one line makes ops for many tensors. It walks the stack: for compiles."""
    if torch._C._current_graph_task_id() != -1:
        return None
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("_call_impl", "step") else None
        if isinstance(owner, torch.optim.Optimizer):
            return None
        if isinstance(owner, torch.nn.Module):
            return f"{type(owner).__name__} {id(owner)}"
        frame = frame.f_back
    return ""


class _Modules(threading.local):
    """The stack of module paths that are in their forward on this thread."""

    def __init__(self):
        self.stack = []
        self.names = {}  # id(module) -> path below the outermost module


_modules = _Modules()


def module() -> str:
    """The path of the innermost module in forward, such as "h.0.attn"; "" outside."""
    return _modules.stack[-1] if _modules.stack else ""


def enter(mod, args) -> None:
    """Forward pre-hook of every module. Dynamo sees an empty function instead (compile.py): a graph knows its modules."""
    if not _modules.stack:
        owners.module(mod)
        _modules.names = {id(m): name.removeprefix("_orig_mod").lstrip(".") for name, m in mod.named_modules()}
    _modules.stack.append(_modules.names.get(id(mod), type(mod).__name__))


def leave(mod, args, output) -> None:
    """Forward hook of every module, also after an exception."""
    if _modules.stack:
        _modules.stack.pop()


_handles: list = []


def _hook_modules() -> list:
    """Hooks on all modules, under the same keys each time: Dynamo compares the keys, and would compile again for others."""
    hooks = torch.nn.modules.module
    if not _handles:
        _handles.append(hooks.register_module_forward_pre_hook(enter))
        _handles.append(hooks.register_module_forward_hook(leave, always_call=True))
        return _handles
    before, after = _handles
    hooks._global_forward_pre_hooks[before.id] = enter
    hooks._global_forward_hooks[after.id] = leave
    hooks._global_forward_hooks_always_called[after.id] = True
    return _handles


@contextlib.contextmanager
def watch_modules():
    """Keep track of nn.Module paths while the block runs."""
    _lines.clear()
    linecache.checkcache()  # a file may have been edited and loaded again
    handles = _hook_modules()
    # torch.compile warns that hooks on all modules also run for its wrapper module: ours expect that
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            warnings.filters.remove(ours)
        for handle in handles:
            handle.remove()
        _modules.stack.clear()


def backward_node() -> tuple[str, int] | None:
    """(name, sequence number) of the autograd node whose backward is running on this thread, or None."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())
