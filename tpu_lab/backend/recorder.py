"""Write an OpRecord for each ATen call while a profile is active. Called from the door, at most a few µs an op."""

from __future__ import annotations

import time

import torch

from tpu_lab import trace
from tpu_lab.backend import launches, where

_forward: dict[int, tuple[int, where.Site, str]] = {}  # autograd sequence number -> (op index, site, module)
_owner = None  # the trace that `_forward` belongs to
_sequence = torch._C._autograd._get_sequence_nr
_node, _grad, _now = torch._C._current_autograd_node, torch.is_grad_enabled, time.perf_counter_ns
_keeps = torch._C._autograd._get_current_graph_task_keep_graph
_UNKNOWN = (None, where.NOWHERE, "")
optimizer = None  # the class name of the optimizer that is stepping: it stands for the module


def begin(record, sig, start: int) -> None:
    """The op is about to run or to be recorded in the graph."""
    write(record.name, sig.inputs, sig.out_text, sig.static, record.kind, start, sig.flops, sig.nbytes)


def write(name, inputs, outputs, static, kind, start, flops=0, nbytes=0, launched=True, fallback=False) -> None:
    """Append one OpRecord. launched: it will be part of the next launch (False: a free view, a host op)."""
    global _owner
    active = trace.active
    if active is None:
        return
    entered = _now()
    if _owner is not active:
        _owner = active
        _forward.clear()
    index = active.op_count
    active.op_count = index + 1
    node, forward, again = _node(), None, False
    if node is not None:
        way = "backward"
        forward, site, module = _forward.get(node._sequence_nr(), _UNKNOWN)
        again = _grad() and not _keeps()  # torch.utils.checkpoint: part of the forward pass, once more
        if again:
            forward, module = None, where.module() or module
        if (again or site is where.NOWHERE) and active.lines:
            found = where.site(3)
            site = found if found.file else site
    else:
        way = "optimizer" if optimizer else "forward"
        site = where.site(3) if active.lines else where.NOWHERE
        module = optimizer or where.module()
        if _grad() and way == "forward":
            _forward.setdefault(_sequence() - 1, (index, site, module))
    launches.op_site = site
    launch = None
    if launched:
        launch = active.launch_count
        active.unlaunched.append(index)
    record = trace.OpRecord(
        index, name, inputs, outputs, static, kind, module, site.file, site.line, site.code, way, forward, launch, flops,
        nbytes, start, 0, fallback, 0, again,
    )  # fmt: skip
    if len(active.ops) < active.limit:
        active.ops.append(record)
    else:
        active.dropped += 1
    done = _now()
    record.record_ns, record.host_ns = done - entered, done - start


def end(start: int) -> None:
    """The op's call returns: its record, if it is still the last one, learns how long the whole call took on the host."""
    active, launches.op_site = trace.active, None
    if active is not None and active.ops and active.ops[-1].time_ns == start:
        active.ops[-1].host_ns = _now() - start
