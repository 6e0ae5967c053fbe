"""Ctrl-C while torch's C++ is at work must not end the process.

For each node of the autograd graph torch asks the device guard for a stream, in a C++ function that may not throw. The
guard is written in Python, so the binding calls into Python there, and in doing so CPython may run a signal handler. If
that raises KeyboardInterrupt, the process ends in std::terminate: about one Ctrl-C in fifty during training (measured).

So the handler of SIGINT is wrapped. The wrapper lets the handler run and catches what it raises; a helper thread then
raises it in the main thread as an asynchronous exception, which CPython delivers between two bytecodes and nowhere else.
If nothing is delivered for a while, the main thread waits in C (`sleep`, `input`): then a second signal raises it there.
Where CPython would drop it, as in a callback of the garbage collector (jax has one), it is raised once more.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import signal
import sys
import threading
import time

PATIENCE = 0.2  # seconds until the main thread counts as waiting in C
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_clear_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
_main = threading.main_thread()
_wanted: queue.SimpleQueue = queue.SimpleQueue()
_helper: threading.Thread | None = None
_door = threading.RLock()  # the main thread has it while nothing may be raised there, the helper while it raises


class Gate:
    """A SIGINT handler around another one: it never raises where it is called, unless `direct` says that it is safe."""

    direct = None  # an exception to raise at once
    asked = False  # one waits already for the end of a `hold`
    answered = False  # that one is no longer wanted: a second came and was raised

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, number, frame):
        error, Gate.direct = Gate.direct, None
        if error is not None:
            _clear_in(_main.ident, None)
            if not _door._is_owned():
                raise error
        else:
            try:
                self.inner(number, frame)
                return
            except BaseException as raised:
                error = raised
        if Gate.asked:
            Gate.asked, Gate.answered = False, True
            raise error
        Gate.asked = _door._is_owned()
        _wanted.put(type(error))


def gated() -> bool:
    """Is the handler of SIGINT wrapped?"""
    return signal.getsignal(signal.SIGINT).__class__ is Gate


def ensure() -> None:
    """Wrap the handler of SIGINT that is in force now. Cheap when that is done; nothing off the main thread."""
    handler = signal.getsignal(signal.SIGINT)
    if handler.__class__ is Gate or not callable(handler) or threading.current_thread() is not _main:
        return
    global _helper
    if _helper is None or not _helper.is_alive():
        _helper = threading.Thread(target=_deliver, name="tpu_lab Ctrl-C", daemon=True)
        _helper.start()
        sys.unraisablehook = functools.partial(_again, sys.unraisablehook)
    signal.signal(signal.SIGINT, Gate(handler))


def after_fork() -> None:
    """A forked child has no helper thread, and no device to protect: give it the plain handler back."""
    if gated():
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT).inner)


@contextlib.contextmanager
def hold():
    """Inside the block, on the main thread, Ctrl-C waits; a second Ctrl-C does not, so no block can hang for good.

    For what must be whole: values that change hands, and jax at work on a program, which an exception at the wrong
    bytecode leaves in the middle of a trace.
    """
    if threading.current_thread() is not _main or _door._is_owned():
        yield
    elif gated():
        try:
            _door.acquire()  # what the helper raised just before is delivered here, and the door is given back
            yield
        finally:
            if _door._is_owned():
                Gate.asked = False
                _door.release()
    elif (previous := signal.getsignal(signal.SIGINT)) is None:  # a handler that is not Python's
        yield
    else:
        caught: list = []
        signal.signal(signal.SIGINT, lambda *args: caught.append(args))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
            if caught and callable(previous):
                previous(*caught[-1])


@functools.cache
def _marked(kind: type) -> type:
    """`kind`, whose instances note that they exist: an asynchronous exception is made when it is delivered."""

    def __init__(self, *args):  # noqa: N807
        kind.__init__(self, *args)
        cls.delivered += 1

    cls = type(
        kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__, "delivered": 0, "kind": kind}
    )
    cls.__qualname__ = kind.__qualname__
    return cls


def _again(hook, dropped) -> None:
    """`sys.unraisablehook`: an exception of ours that nobody could catch is raised anew; others are told as before."""
    kind = getattr(dropped.exc_type, "kind", None)
    if dropped.exc_type is not None and kind is not None and dropped.exc_type is _marked(kind):
        _wanted.put(kind)
    else:
        hook(dropped)


def _deliver() -> None:
    while True:
        plain = _wanted.get()
        kind = _marked(plain)
        before = kind.delivered
        with _door:
            if Gate.answered:
                Gate.answered = False
                continue
            _raise_in(_main.ident, kind)
        end = time.monotonic() + PATIENCE
        while kind.delivered == before and time.monotonic() < end:
            time.sleep(0.001)
        if kind.delivered == before and isinstance(signal.getsignal(signal.SIGINT), Gate):
            Gate.direct = plain()
            signal.pthread_kill(_main.ident, signal.SIGINT)
            while Gate.direct is not None and kind.delivered == before:
                time.sleep(0.001)
            Gate.direct = None  # the first one came through after all: the next Ctrl-C may not be raised just anywhere
