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
import gc
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
_current: Press | None = None  # what the helper raised last
_door = threading.RLock()  # the main thread has it while nothing may be raised there, the helper while it raises


class Press:
    """One Ctrl-C on its way to the main thread."""

    __slots__ = ("done", "kind")

    def __init__(self, kind: type):
        self.kind, self.done = kind, False


class Gate:
    """A SIGINT handler around another one: it never raises where it is called, unless nothing else would help."""

    waiting: Press | None = None  # it waits for the end of a `hold`
    woken: Press | None = (
        None  # the helper sent a signal of its own, so that this one is raised in a call that waits in C
    )

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, number, frame):
        press, Gate.woken = Gate.woken, None
        if press is not None:  # mostly it was raised on the way in here, at the first bytecode
            if not press.done:
                _clear_in(_main.ident, None)
                if not _door._is_owned():
                    press.done = True
                    raise press.kind
                _wanted.put(press)
            return
        try:
            self.inner(number, frame)
        except BaseException as error:
            press = Press(type(error))
            if Gate.waiting is not None:
                Gate.waiting.done, Gate.waiting = True, None
                raise
            if _door._is_owned():
                Gate.waiting = press
            _wanted.put(press)


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
    """Inside the block nothing comes in between: the garbage collector stands still, whose callbacks and finalizers may
    run ops, and on the main thread Ctrl-C waits; a second Ctrl-C does not, so no block can hang for good.

    For what must be whole: values that change hands, and jax at work on a program, which an exception at the wrong
    bytecode leaves in the middle of a trace.
    """
    collecting = gc.isenabled()
    try:
        gc.disable()
        with _waits():
            yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _waits():
    if threading.current_thread() is not _main or _door._is_owned():
        yield
    elif gated():
        try:
            _door.acquire()  # what the helper raised just before is delivered here, and the door is given back
            yield
        finally:
            if _door._is_owned():
                Gate.waiting = None
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
        Gate.woken = None
        if _current is not None:
            _current.done = True

    cls = type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__, "kind": kind})
    cls.__qualname__ = kind.__qualname__
    return cls


def _again(hook, dropped) -> None:
    """`sys.unraisablehook`: an exception of ours that nobody could catch is raised anew; others are told as before."""
    kind = getattr(dropped.exc_type, "kind", None)
    if dropped.exc_type is not None and kind is not None and dropped.exc_type is _marked(kind):
        _wanted.put(Press(kind))
    else:
        hook(dropped)


def _deliver() -> None:
    global _current
    while True:
        press = _wanted.get()
        with _door:
            if press.done:
                continue
            _current = press
            _raise_in(_main.ident, _marked(press.kind))
        end = time.monotonic() + PATIENCE
        while not press.done and time.monotonic() < end:
            time.sleep(0.001)
        if not press.done and gated():
            Gate.woken = press
            signal.pthread_kill(_main.ident, signal.SIGINT)
            while Gate.woken is press and not press.done:
                time.sleep(0.001)
