"""The same step on the CPU: a copy of a function whose tensors, in closures, globals and arguments, lie on the CPU.

Nothing of the original changes: modules, optimizers and tensors are copied, and the function is made anew around the
copies. A function that itself asks for device "tpu" stays one; whoever runs the copy must look whether it did.
"""

from __future__ import annotations

import copy
import types

import torch

from tpu_lab.snapshot import Found, find, used_globals


def on_cpu(fn, args: tuple, kwargs: dict):
    """(fn, args, kwargs) that run on the CPU, from the same values. What cannot be copied raises its own error."""
    found = find(fn, args, kwargs)
    memo: dict = {}
    with torch.no_grad():
        for tensor in found.tensors.values():
            memo[id(tensor)] = _copy(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                memo[id(tensor)].grad = tensor.grad.detach().cpu().clone()
    twins = [(fn_, _empty(fn_, memo)) for fn_ in _own(found)]
    memo.update({id(old): new for old, new in twins})
    for old, new in twins:
        new.__globals__.update({name: _moved(value, memo) for name, value in used_globals(old).items()})
        for cell, twin in zip(old.__closure__ or (), new.__closure__ or (), strict=True):
            try:
                twin.cell_contents = _moved(cell.cell_contents, memo)
            except ValueError:  # a name that is not bound
                continue
        new.__defaults__ = copy.deepcopy(old.__defaults__, memo)
        new.__kwdefaults__ = copy.deepcopy(old.__kwdefaults__, memo)
    return _moved(fn, memo), copy.deepcopy(args, memo), copy.deepcopy(kwargs, memo)


def _own(found: Found) -> list[types.FunctionType]:
    """Functions that reach a tensor through their names: the user's, and wrappers around the user's."""
    return [fn for fn in found.functions if fn.__closure__ or used_globals(fn)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().cpu().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(value, tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def _empty(fn: types.FunctionType, memo: dict) -> types.FunctionType:
    """The same code around its own globals and new, empty cells; a cell that two functions share stays shared."""
    cells = []
    for cell in fn.__closure__ or ():
        if id(cell) not in memo:
            memo[id(cell)] = types.CellType()
        cells.append(memo[id(cell)])
    scope = memo.setdefault(id(fn.__globals__), dict(fn.__globals__))
    twin = types.FunctionType(fn.__code__, scope, fn.__name__, closure=tuple(cells) or None)
    twin.__dict__.update({k: v for k, v in fn.__dict__.items() if k != "__wrapped__"})
    return twin


def _moved(value, memo: dict):
    if id(value) in memo:  # before deepcopy, for which a function is no thing to copy
        return memo[id(value)]
    return value if isinstance(value, (types.ModuleType, type)) else copy.deepcopy(value, memo)
