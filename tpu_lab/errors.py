"""What an exception says, as text: the one place where a stranger's `__str__` is called."""

from __future__ import annotations


def text(error: BaseException) -> str:
    """The exception's own text, "" when it has none. `__str__` is somebody's code, too: what it raises is told, not raised,
    as an error in the writing of an error would take the place of the first, and leave things half undone."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be had: __str__ raised {type(second).__name__})"


def named(error: BaseException) -> str:
    """`ValueError: no such name`, or `ValueError` when it says nothing more."""
    own = text(error)
    return f"{type(error).__name__}: {own}" if own else type(error).__name__


def line(error: BaseException, most: int = 240) -> str:
    """Its own text in one line of at most `most` letters."""
    return " ".join(text(error).split())[:most]
