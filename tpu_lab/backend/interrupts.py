"""Ctrl-C, and other signals whose handlers raise, while torch's C++ is at work must not end the process.

For each node of the autograd graph torch asks the device guard for a stream, in a C++ function that may not throw, and
in many others Python code of ours runs, where CPython may run a signal handler. If that raises KeyboardInterrupt, the
process can end in std::terminate: about one Ctrl-C in fifty during training (measured).

So the handlers of SIGNALS are wrapped. The wrapper lets the handler run and catches what it raises; a helper thread then
raises it in the main thread as an asynchronous exception, which CPython delivers between two bytecodes and nowhere else.
If nothing is delivered for a while, the main thread waits in C (`sleep`, `input`): then a second signal raises it there.
Where CPython would drop it, as in a callback of the garbage collector (jax has one), it is raised once more.
"""

from __future__ import annotations

import _signal
import contextlib
import ctypes
import functools
import gc
import queue
import signal
import sys
import threading
import time

PATIENCE = 0.2  # seconds until the main thread counts as waiting in C, if it uses no processor
LONGEST = 20.0  # seconds more until it does in any case
SIGNALS = (  # handlers of these raise: Ctrl-C, the end of a time limit, a cluster that wants the machine back
    signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM,
    signal.SIGPROF,
)  # fmt: skip
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_clear_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
_main = threading.main_thread()
_wanted: queue.SimpleQueue = queue.SimpleQueue()
_helper: threading.Thread | None = None
_HEAP = 1 << 9  # of a class that a program has made, in its __flags__
_door = threading.RLock()  # the main thread has it while nothing may be raised there, the helper while it raises


class Press:
    """What the handler of a signal has raised, on its way to the main thread."""

    __slots__ = ("done", "error", "number")

    def __init__(self, number: int, error: BaseException):
        self.number, self.done = number, False
        self.error = error.with_traceback(None)  # it is never raised itself: its traceback would hold the user's tensors

    def raised(self) -> type:
        """A class whose call gives a copy of the error: an asynchronous exception is a class, and made when delivered."""
        press, error, kind = self, self.error, type(self.error)
        base = next(c for c in kind.__mro__ if not c.__flags__ & _HEAP)  # KeyboardInterrupt, Exception, SystemExit, ...

        def make(cls, *args):
            made = base.__new__(cls, *error.args)
            base.__init__(made, *error.args)
            made.__dict__.update(error.__dict__)
            made.__cause__ = error.__cause__
            press.done = True
            if Gate.woken is press:
                Gate.woken = None
            return made

        names = {"__new__": make, "__init__": lambda made, *args: None, "press": press}
        cls = type(kind)(kind.__name__, (kind,), {**names, "__module__": kind.__module__})
        cls.__qualname__ = kind.__qualname__
        return cls


class Gate:
    """A signal handler around another one: it never raises where it is called, unless nothing else would help."""

    later: list[tuple] = []  # (gate, number, frame) of each signal that waits for the end of a `hold`
    woken: Press | None = (
        None  # the helper sent a signal of its own, so that this one is raised in a call that waits in C
    )

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, number, frame):
        press = Gate.woken
        if press is not None and press.number == number:  # mostly it was raised on the way in here, at the first bytecode
            Gate.woken = None
            if not press.done:
                _clear_in(_main.ident, None)
                if not _door._is_owned():
                    raise press.raised()
                _wanted.put(press)
            return
        if _door._is_owned():
            first = all(n != number for _, n, _ in Gate.later)
            if first:
                Gate.later.append((self, number, frame))
            elif number == signal.SIGINT:
                Gate.later[:] = [waits for waits in Gate.later if waits[1] != number]
                self.inner(number, frame)
            return
        try:
            self.inner(number, frame)
        except BaseException as error:
            _wanted.put(Press(number, error))


def gated(number: int = signal.SIGINT) -> bool:
    """Is the handler of this signal wrapped?"""
    return _signal.getsignal(number).__class__ is Gate


def ensure() -> None:
    """Wrap the handlers that are in force now. Cheap when that is done; nothing off the main thread."""
    if threading.get_ident() != _main.ident:
        return
    for number in SIGNALS:
        handler = _signal.getsignal(number)
        if handler.__class__ is not Gate and callable(handler):
            _start()
            signal.signal(number, Gate(handler))


def _start() -> None:
    global _helper
    if _helper is None or not _helper.is_alive():
        _helper = threading.Thread(target=_deliver, name="tpu_lab Ctrl-C", daemon=True)
        _helper.start()
        sys.unraisablehook = functools.partial(_again, sys.unraisablehook)


def after_fork() -> None:
    """A forked child has no helper thread, and no device to protect: give it the plain handlers back."""
    global _door, _wanted
    _door, _wanted = threading.RLock(), queue.SimpleQueue()  # the helper may have held them
    Gate.woken, Gate.later = None, []
    for number in filter(gated, SIGNALS):
        signal.signal(number, signal.getsignal(number).inner)


@contextlib.contextmanager
def hold():
    """Inside the block nothing comes in between: the garbage collector stands still, whose callbacks and finalizers may
    run ops, and on the main thread signals wait, as their handlers may raise or run ops, too; a second Ctrl-C does not,
    so no block can hang for good.

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
    if threading.get_ident() != _main.ident or _door._is_owned():
        yield
        return
    ensure()
    try:
        _door.acquire()  # what the helper raised just before is delivered here, and the door is given back
        yield
    finally:
        if _door._is_owned():
            _door.release()
        while Gate.later:
            gate, *signaled = Gate.later.pop(0)
            gate(*signaled)


def _again(hook, dropped) -> None:
    """`sys.unraisablehook`: an exception of ours that nobody could catch is raised anew; others are told as before."""
    press = getattr(dropped.exc_type, "press", None)
    if isinstance(press, Press):
        _wanted.put(Press(press.number, press.error))
    else:
        hook(dropped)


def _in_a_gate() -> bool:
    """Is the main thread about to leave a handler? CPython may have called it while torch asks for the device's guard, where
    nothing may be thrown (pybind11 makes a str() of a name there, and str() looks for signals)."""
    frame = sys._current_frames().get(_main.ident)
    return frame is not None and frame.f_code is Gate.__call__.__code__


def _computes() -> bool:
    """Does the main thread use a processor? Then it comes back to Python by itself, and a signal of ours, whose handler raises,
    might meet it where nothing may be thrown."""
    clock = getattr(time, "pthread_getcpuclockid", lambda thread: None)(_main.ident)
    if clock is None:  # not on macOS
        return False
    before = time.clock_gettime(clock)
    time.sleep(0.02)
    return time.clock_gettime(clock) - before > 0.001


def _deliver() -> None:
    while True:
        press = _wanted.get()
        while _in_a_gate():
            time.sleep(0.0002)
        with _door:
            if press.done:
                continue
            _raise_in(_main.ident, press.raised())
        end = time.monotonic() + PATIENCE
        while not press.done and (time.monotonic() < end or (time.monotonic() < end + LONGEST and _computes())):
            time.sleep(0.001)
        if not press.done and gated(press.number):
            Gate.woken = press
            signal.pthread_kill(_main.ident, press.number)
            while Gate.woken is press and not press.done:
                time.sleep(0.001)
