"""What torch's C++ asks an accelerator in the middle of its work, answered without running a line of Python.

torch asks also where nothing may be thrown: for each stream that autograd wants, and in destructors, while an error of
a hook in backward is on its way out. Two things must not happen there, as either ends the process in std::terminate:

- A Python function would run bytecode, between two of which Ctrl-C can arrive. So the answers are slots of C objects,
  which run none: the next item of an endless repetition, the membership test of a range.
- CPython takes the result of a call for a failure while an error is set, and an error that a hook raised is still
  set then. So the answer first takes the error away (PyErr_Fetch, called through ctypes), and the engine puts it back
  when the C++ is done. Other threads ask in between, so each thread's is kept apart.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import threading

import torch

from tpu_lab.backend import interrupts

_error = (ctypes.c_void_p * 3)()  # type, value, traceback of the last error taken away, or NULL
_taken: dict[int, bytes] = {}  # thread -> the same of the last time that torch asked there
_keep = map(_taken.__setitem__, iter(threading.get_ident, None), map(bytes, itertools.repeat(_error)))
_kinds = map(operator.itemgetter(1), zip(_keep, itertools.repeat(torch._C._autograd.DeviceType.PrivateUse1)))
# No argument types: converting would call Python objects, too. The meaningless result of a void function becomes the
# default of `next` on an iterator that never ends.
_fetch = ctypes.PYFUNCTYPE(functools.partial(next, _kinds))(("PyErr_Fetch", ctypes.pythonapi))
_restore = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 3)(("PyErr_Restore", ctypes.pythonapi))


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """It is there, it is built, and every context exists."""

    is_available = itertools.repeat(True).__next__
    is_built = itertools.repeat(True).__next__
    has_primary_context = range(-1, 1).__contains__


class Guard(torch._C._acc.DeviceGuard):
    """One device a process: index 0."""

    type_ = functools.partial(_fetch, *(ctypes.byref(_error, k * ctypes.sizeof(ctypes.c_void_p)) for k in range(3)))


class Engine(torch._C._ImperativeEngine):
    """Autograd's engine, which raises what a hook raised, and works in the thread that called it, as for the CPU.

    Its own thread for a device would gain nothing, as every kernel needs the interpreter, and handing the work over
    and back takes 0.1-0.2 ms of each backward.
    """

    def run_backward(self, *args, **kwargs):
        interrupts.ensure()
        outside = torch._C._is_multithreading_enabled()
        try:
            torch._C._set_multithreading_enabled(False)
            return super().run_backward(*args, **kwargs)
        except SystemError:  # the engine failed, and there is no error
            error = _take()
            if error is None:
                raise
        finally:
            torch._C._set_multithreading_enabled(outside)
        _restore(*error)  # ctypes raises it


def _take() -> list | None:
    """The error that was taken away on this thread, or on one of C++, where backward goes on below 60 levels of itself."""
    for ident in (threading.get_ident(), *list(_taken)):
        python = threading._active.get(ident)
        if ident == threading.get_ident() or python is None or isinstance(python, threading._DummyThread):
            error = _taken.pop(ident, b"")
            if any(error):
                return list((ctypes.c_void_p * 3).from_buffer_copy(error))
    return None


hooks, guard = Hooks(), Guard()  # torch keeps bare pointers: these must live as long as the process


def install() -> None:
    """Register the answers, and the engine that knows what they take away."""
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    torch.autograd.Variable._execution_engine = Engine()
