"""Whose memory is it? While a profile is active: weights by their names, gradients, and the optimizer's state.

Looked up when a module's outermost forward begins and around each optimizer step: that is where these tensors are to be
had, and it costs a few hundred µs a step. A value that has not run yet gets its name when it has; what is written in
place stays whose it was, whichever array holds it afterwards.
"""

from __future__ import annotations

import weakref

import torch

from tpu_lab import trace
from tpu_lab.backend import live
from tpu_lab.backend.storage import Cell, Pending

_owner: trace.Trace | None = None
_seen: weakref.WeakSet = weakref.WeakSet()  # modules and optimizers whose weights are known
_names: dict[int, str] = {}  # id(parameter) -> "h.0.attn.qkv.weight"
_cells: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Cell -> (owner, name): the memory, whatever is in it
_waiting: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Pending -> (owner, name)


def _begin(active: trace.Trace) -> None:
    global _owner
    if _owner is not active:
        _owner = active
        _seen.clear()
        _names.clear()
        _cells.clear()
        _waiting.clear()
    live.begin(active)


def _is(tensor, owner: str, name: str) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "tpu":
        return
    cell = getattr(tensor.untyped_storage(), "_tpu", None)
    if cell.__class__ is Cell:
        _cells[cell] = owner, name
        _holds(cell.value, owner, name)


def _holds(value, owner: str, name: str) -> None:
    if value.__class__ is Pending and value.array is None:
        _waiting[value] = owner, name
    elif value is not None:
        live.name(value.array if value.__class__ is Pending else value, owner, name)


def module(mod: torch.nn.Module) -> None:
    """The outermost module of a forward pass."""
    active = trace.active
    if active is None:
        return
    _begin(active)
    if mod in _seen:
        return
    _seen.add(mod)
    for name, parameter in mod.named_parameters():
        name = name.removeprefix("_orig_mod.")
        _names[id(parameter)] = name
        _is(parameter, "weights", name)
    for name, buffer in mod.named_buffers():
        _is(buffer, "weights", name.removeprefix("_orig_mod."))


def before_step(optimizer) -> None:
    """An optimizer is about to step: the gradients are all there."""
    active = trace.active
    if active is None:
        return
    _begin(active)
    first = optimizer not in _seen
    _seen.add(optimizer)
    for parameter in _parameters(optimizer):
        name = _names.get(id(parameter), "")
        if first:
            _is(parameter, "weights", name)
        if parameter.grad is not None:
            _is(parameter.grad, "gradients", name)
    if first:
        _state(optimizer)


def after_step(optimizer) -> None:
    """It has stepped: new weights, new state; in fused mode they are still to be computed."""
    if trace.active is None or _owner is not trace.active:
        return
    for parameter in _parameters(optimizer):
        _is(parameter, "weights", _names.get(id(parameter), ""))
    _state(optimizer)


def wrote(cell) -> None:
    """An op, a compiled graph or the host has put a new value into this memory."""
    if trace.active is None or _owner is not trace.active or cell.__class__ is not Cell:
        return
    known = _cells.get(cell)
    if known is not None:
        _holds(cell.value, *known)


def settle(pendings) -> None:
    """These values have run: name their arrays."""
    if _waiting:
        for pending in pendings:
            known = _waiting.pop(pending, None)
            if known is not None:
                live.name(pending.array, *known)


def _parameters(optimizer):
    return (p for group in optimizer.param_groups for p in group["params"])


def _state(optimizer) -> None:
    for parameter, state in optimizer.state.items():
        name = _names.get(id(parameter), "") if isinstance(parameter, torch.Tensor) else ""
        for key, value in state.items() if isinstance(state, dict) else ():
            _is(value, "optimizer", f"{key} of {name}" if name else str(key))
