"""Write an OpRecord for each ATen call while a profile is active. Called from the door, at most a few µs an op."""

from __future__ import annotations

import time

import torch

from tpu_lab import trace
from tpu_lab.backend import launches, where

_forward: dict[int, tuple[int, where.Site, str]] = {}  # autograd sequence number -> (op index, site, module)
_owner = None  # the trace that `_forward` belongs to
_sequence = torch._C._autograd._get_sequence_nr if hasattr(torch._C._autograd, "_get_sequence_nr") else None
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
    entered = time.perf_counter_ns()
    if _owner is not active:
        _owner = active
        _forward.clear()
    index = active.meta.get("ops", 0)
    active.meta["ops"] = index + 1
    forward = None
    node = where.backward_node()
    if node is not None:
        way = "backward"
        forward, site, module = _forward.get(node[1], (None, where.NOWHERE, ""))
        if site is where.NOWHERE:
            site = where.site(3)
    else:
        way = "optimizer" if optimizer else "forward"
        site, module = where.site(3), optimizer or where.module()
        if way == "forward" and torch.is_grad_enabled() and _sequence is not None:
            _forward.setdefault(_sequence() - 1, (index, site, module))
    launches.op_site = site
    launch = None
    if launched:
        launch = launches.so_far(active)
        active.meta.setdefault("unlaunched", []).append(index)
    active.add(
        "ops",
        trace.OpRecord(
            index, name, inputs, outputs, static, kind, module, site.file, site.line, site.code, way, forward, launch,
            flops, nbytes, start, time.perf_counter_ns() - entered, fallback, entered - start,
        ),
    )  # fmt: skip


def end(start: int) -> None:
    """The op's call returns: its record, if it is still the last one, learns how long the whole call took on the host."""
    active, launches.op_site = trace.active, None
    if active is not None and active.ops and active.ops[-1].time_ns == start:
        object.__setattr__(active.ops[-1], "host_ns", time.perf_counter_ns() - start)  # nobody has read it yet
