"""Who asks for a value: `.item()`, an `if`, `int()`, `float()`, an index? Read off the instruction that the caller runs.

torch's C++ turns all of them into one call, `_local_scalar_dense`. The innermost Python frame outside this package stands at
the instruction that led here; a jump is a question for a truth value, and of a call the source says what is called.
"""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import sys

_BOOL = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL", "CONTAINS_OP")
_INDEX = ("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "BINARY_SLICE", "STORE_SLICE")
_CALLS = {"bool": "bool", "any": "bool", "all": "bool", "sorted": "bool", "max": "bool", "min": "bool", "sort": "bool",
          "int": "int", "float": "float", "range": "index", "index": "index", "islice": "index"}  # fmt: skip


def value(package: str) -> str:
    """ "bool" | "int" | "float" | "index", or "item" where it is `.item()` or cannot be told. package: our folder, whose
    frames do not count."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    if frame is None:
        return "item"
    try:
        operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    except IndexError:  # a frame that has not begun
        return "item"
    if operation.startswith(_BOOL):
        return "bool"
    if operation.startswith(_INDEX):
        return "index"
    return _called(frame) if operation.startswith(("CALL", "PRECALL")) else "item"


def _called(frame) -> str:
    """By the name of what the current instruction calls, from the source text."""
    place = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if place is None or None in place:
        return "item"
    first, last, start, end = place
    lines = [linecache.getline(frame.f_code.co_filename, n, frame.f_globals).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        tree = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError, SystemError):  # the last: another thread parses, too (CPython 3.11)
        return "item"
    called = tree.func if isinstance(tree, ast.Call) else None
    if isinstance(called, ast.Attribute):
        if isinstance(called.value, ast.Name) and called.value.id == "math":
            return "float"
        return _CALLS.get(called.attr, "item") if called.attr in ("sort", "index", "islice") else "item"
    return _CALLS.get(called.id, "item") if isinstance(called, ast.Name) else "item"
