"""The two places with state: the eager mode and the deferred graph; and the one lock around both.

Backward kernels run on autograd's own C++ thread, which has no Python thread-local of ours: there the mode is that of
the thread that ran an op last.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import warnings


class EagerMode(enum.IntEnum):
    """When a recorded op runs. The values are TorchTPU's."""

    DEFER_AND_FUSE = 0  # fused: when somebody needs a value
    DEFER_NEVER = 1  # strict, the default: at once
    DEFER_NEVER_AND_LAUNCH_BLOCKING = 2  # debug: at once, and wait for it


NAMES = {"fused": 0, "strict": 1, "debug": 2}
WORDS = {EagerMode(v): k for k, v in NAMES.items()}


def _start_mode() -> EagerMode:
    if os.environ.get("TORCH_TPU_DEFER_AND_FUSE") == "1":
        return EagerMode.DEFER_AND_FUSE
    if os.environ.get("TORCH_TPU_LAUNCH_BLOCKING") == "1":
        return EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    return EagerMode.DEFER_NEVER


class _Thread(threading.local):
    def __init__(self):
        self.stack = []
        self.tracing = None  # a Tracing while a program is being traced on this thread
        self.view = None  # the view op that is being made of others on this thread, by the name in the records
        known = threading._active.get(threading.get_ident())  # a thread that C++ made has none, or a dummy
        self.worker = known is None or isinstance(known, threading._DummyThread)


lock = threading.RLock()
thread = _Thread()
default_mode = _start_mode()
last_mode = default_mode  # of the last user thread that ran an op: what a thread that C++ made uses
compiler_options: tuple[tuple[str, object], ...] = ()  # torch.tpu.compiler.custom_compiler_options


_turn, _inside = threading.Lock(), 0  # of `alone`, and the thread that is in it


@contextlib.contextmanager
def alone(what: str):
    """One thread at a time: the block exchanges what ops of the whole process go through. Another thread waits for its
    turn; RuntimeError on the thread that is inside already."""
    global _inside
    if _inside == threading.get_ident():
        raise RuntimeError(f"{what} inside compile_for, find_nonfinite or coverage: they do not nest, call one after the other")
    while not _turn.acquire(timeout=0.1):  # in short turns: Ctrl-C comes in between
        pass
    _inside = threading.get_ident()
    try:
        yield
    finally:
        _inside = 0
        _turn.release()


class Tracing:
    """The random state of a program being traced: seed and counter are its runtime inputs (int64 tracers).

    keys: of its first random ops, made at once.
    """

    def __init__(self, seed, counter, keys=()):
        self.seed, self.counter, self.used, self.keys = seed, counter, 0, keys
        self.node = 0  # of the FX graph being traced: the index of its op
        self.checks: list = []  # (node, signature, its bounds' output): indices that must lie in range

    def next(self):
        """The key of the next random op, or the (seed, counter) that make it: see rng.of."""
        n, self.used = self.used, self.used + 1
        return (self.keys[n],) if n < len(self.keys) else (self.seed, self.counter + n)

    def check(self, sig, values) -> None:
        """An op with indices was traced."""
        self.checks.append((self.node, sig, sig.bounds.worst(values)))


def mode() -> EagerMode:
    """The eager mode in force on this thread."""
    global last_mode
    this = thread
    if this.worker:
        return last_mode
    stack = this.stack
    last_mode = stack[-1] if stack else default_mode
    return last_mode


def as_mode(value) -> EagerMode:
    """EagerMode from a member, its int, or "strict" | "debug" | "fused"; ValueError otherwise."""
    if isinstance(value, str) and value in NAMES:
        return EagerMode(NAMES[value])
    try:
        return EagerMode(value)
    except ValueError:
        names = ", ".join(f"EagerMode.{m.name} ({WORDS[m]})" for m in EagerMode)
        raise ValueError(f"{value!r} is no eager mode: use one of {names}") from None


@contextlib.contextmanager
def mode_scope(value):
    """The eager mode inside the block, on this thread; None changes nothing."""
    if value is None:
        yield
        return
    thread.stack.append(as_mode(value))
    try:
        yield
    finally:
        thread.stack.pop()


class Scope(contextlib.ContextDecorator):
    """`mode_scope` of the user's: as a block, or on a function. A warning when it is used as neither, and did nothing."""

    def __init__(self, mode):
        self._used, self._open = True, []  # used, until the mode is known to be one
        self._mode = as_mode(mode)
        self._used = False

    def __call__(self, fn):
        self._used = True
        return super().__call__(fn)

    def __enter__(self) -> None:
        self._used = True
        self._open.append(mode_scope(self._mode))
        self._open[-1].__enter__()

    def __exit__(self, *error) -> None:
        self._open.pop().__exit__(*error)

    def __del__(self) -> None:
        if not self._used:
            name = self._mode.name
            warnings.warn(
                "torch.tpu.set_eager_mode(...) alone changes nothing: `with torch.tpu.set_eager_mode(...):` holds for its block, "
                f"`torch.tpu.eager_mode = torch.tpu.EagerMode.{name}` from now on",
                stacklevel=2,
            )


@contextlib.contextmanager
def tracing(context: Tracing):
    """Inside the block ops on this thread run their lowerings directly, on tracers."""
    before, thread.tracing = thread.tracing, context
    try:
        yield context
    finally:
        thread.tracing = before
