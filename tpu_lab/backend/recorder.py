"""Note each ATen call while a profile is active. Called from the door: what it costs, every op pays.

So a note is a list of what is at hand, and writer.py makes an OpRecord of it later.
"""

from __future__ import annotations

import sys
import time

import torch

from tpu_lab import trace
from tpu_lab.backend import launches, live, where, writer

# What stands where in the note of an op:
#     what, start, entered, noted, spot, module, phase, forward, again, index, launch, returned
# and, of one that is a launch of its own (strict and debug mode):
#     ready, (program, before, after, born), apart, seen, made, mode
# what: its signature; or (name, inputs, outputs, static, kind, fallback), the middle two as texts or (size, dtype, ...).
# start, returned: host clock when it was called, and when its call returned; 0 until then. entered, noted: when this file
# began and was done, of every 64th op, as the clock itself costs. spot: see where.spot. module, phase, forward, again,
# index, launch: as in OpRecord. The launch's: see launches.py. apart: something was noted between the op and its launch:
# the note stands in the log twice. seen: the writer has made the op's record (1), and the launch's (2): it may read on
# another thread at any place of the code here.
SPOT, MODULE, INDEX, LAUNCH, RETURNED, MODE = 4, 5, 9, 10, 11, 17
SAMPLED = 63

_sequence = torch._C._autograd._get_sequence_nr
_node, _grad, _now = torch._C._current_autograd_node, torch.is_grad_enabled, time.perf_counter_ns
_keeps = torch._C._autograd._get_current_graph_task_keep_graph
_forward = writer.forward
_UNKNOWN = [None] * 4 + [None, "", "", None, False, None]  # no forward op is known
_modules = where._modules
optimizer = None  # the class name of the optimizer that is stepping: it stands for the module


def begin(what, start: int, launched: bool = True) -> list | None:
    """The op is about to run, or to be deferred: its note. launched: a launch will run it."""
    active = trace.active
    if active is None:
        return None
    index = active.op_count
    active.op_count = index + 1
    entered = 0 if index & SAMPLED else _sampled(active, index)
    note = [what, start, entered, 0, None, "", "forward", None, False, index, None, 0, 0, None, False, 0, None, "strict"]
    if _node() is not None:
        _backward(active, note)
    elif optimizer is not None and not _grad():  # a closure's forward (LBFGS) is a forward
        note[5:7] = optimizer, "optimizer"
        if active.lines:
            note[4] = _spot()
    else:
        stack = _modules.stack
        if stack:
            note[5] = stack[-1]
        if active.lines:
            note[4] = _spot()
        # also without grad: the first op inside a user's autograd.Function stands for all of it
        _forward.setdefault(_sequence(), note)
    active.note(note)
    if launched:
        launches.op = note
    if entered:
        note[3] = _now()
    return note


def _sampled(active, index: int) -> int:
    """What not every op needs to pay for; and the host clock."""
    if not index:
        live.begin(active)
    elif index >= active.limit:
        writer.of(active).bound()
    return _now()


def _spot() -> tuple | None:
    try:
        frame = sys._getframe(3)  # behind this function, `begin` and the door
    except ValueError:  # C++ called the backend itself, on a thread of its own
        return None
    return where.spot(frame)


def _backward(active, note: list) -> None:
    """The op runs in backward: it stands on the line of its forward op."""
    of = _forward.get(_node()._sequence_nr() + 1, _UNKNOWN)
    spot, module, forward = of[SPOT], of[MODULE], of[INDEX]
    again = _grad() and not _keeps()  # torch.utils.checkpoint: part of the forward pass, once more
    if again:
        forward, module = None, where.module() or module
    if (again or spot is None) and active.lines:
        spot = _spot() or spot
    note[4:9] = spot, module, "backward", forward, again
    if again:  # a reentrant checkpoint: the backward pass of these comes next
        _forward.setdefault(_sequence(), note)


def write(name, inputs, outputs, static, kind, start, fallback=False) -> None:
    """An op that no launch runs: a free view, or one on the host. inputs, outputs: texts, or (size, dtype, size, ...)."""
    begin((name, inputs, outputs, static, kind, fallback), start, launched=False)
