"""Note each ATen call while a profile is active. Called from the door: what it costs, every op pays.

So a note is a list of what is at hand, and writer.py makes an OpRecord of it later.
"""

from __future__ import annotations

import sys
import time

import torch

from tpu_lab import trace
from tpu_lab.backend import launches, live, where, writer

# What stands where in the note of an op
WHAT = 0  # its signature; or (name, inputs, outputs, static, kind, fallback), the middle two as texts or (size, dtype, ...)
START, ENTERED, NOTED = 1, 2, 3  # host clock: it was called, this file began, this file was done
SPOT = 4  # see where.spot
MODULE, PHASE, FORWARD, AGAIN, INDEX, LAUNCH = 5, 6, 7, 8, 9, 10  # as in OpRecord
RETURNED = 11  # host clock when its call returned; 0 until then

_forward: dict[int, tuple[int, tuple | None, str]] = {}  # autograd sequence number -> (op index, spot, module)
_owner = None  # the trace that `_forward` belongs to
_sequence = torch._C._autograd._get_sequence_nr
_node, _grad, _now = torch._C._current_autograd_node, torch.is_grad_enabled, time.perf_counter_ns
_keeps = torch._C._autograd._get_current_graph_task_keep_graph
_UNKNOWN = (None, None, "")
_modules = where._modules
optimizer = None  # the class name of the optimizer that is stepping: it stands for the module


def begin(what, start: int, launched: bool = True) -> list | None:
    """The op is about to run, or to be deferred: its note. launched: a launch will run it."""
    global _owner
    active = trace.active
    if active is None:
        return None
    entered = _now()
    if _owner is not active:
        _owner = active
        _forward.clear()
        live.begin(active)
    index = active.op_count
    active.op_count = index + 1
    forward, again = None, False
    if _node() is not None:
        phase = "backward"
        forward, spot, module, again = _backward(active)
        if again:  # a reentrant checkpoint: the backward pass of these comes next
            _forward.setdefault(_sequence() - 1, (index, spot, module))
    elif optimizer is not None:
        phase, module = "optimizer", optimizer
        spot = _spot() if active.lines else None
    else:
        phase = "forward"
        stack = _modules.stack
        module = stack[-1] if stack else ""
        spot = _spot() if active.lines else None
        # also without grad: the first op inside a user's autograd.Function stands for all of it
        _forward.setdefault(_sequence() - 1, (index, spot, module))
    note = [what, start, entered, 0, spot, module, phase, forward, again, index, None, 0]
    if launched:
        launches.op = note
    active.log.append(note)
    if index >= active.limit:
        writer.of(active).bound(_forward)
    note[3] = _now()
    return note


def _spot() -> tuple | None:
    try:
        frame = sys._getframe(3)  # behind this function, `begin` and the door
    except ValueError:  # C++ called the backend itself, on a thread of its own
        return None
    return where.spot(frame)


def _backward(active) -> tuple:
    """(forward op, spot, module, is it a forward op that runs again?)"""
    forward, spot, module = _forward.get(_node()._sequence_nr(), _UNKNOWN)
    again = _grad() and not _keeps()  # torch.utils.checkpoint: part of the forward pass, once more
    if again:
        forward, module = None, where.module() or module
    if (again or spot is None) and active.lines:
        spot = _spot() or spot
    return forward, spot, module, again


def write(name, inputs, outputs, static, kind, start, fallback=False) -> None:
    """An op that no launch runs: a free view, or one on the host. inputs, outputs: texts, or (size, dtype, size, ...)."""
    begin((name, inputs, outputs, static, kind, fallback), start, launched=False)


def end(note: list) -> None:
    """The op's call returns."""
    launches.op = None
    note[11] = _now()
