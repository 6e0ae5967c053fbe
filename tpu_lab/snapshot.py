"""What a step can change, found from the function itself, saved and put back.

A training step reads its model from a closure, a global or its arguments. `find` walks these as a reader would:
cells, the globals that the code names, bound objects, containers; down to tensors, optimizers and what has a
state_dict. `save` copies them and gives the function that puts everything back in place, so that whoever holds the
same objects sees them as they were. What it cannot wind back is an iterator: those are counted, to be told.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator

import numpy as np
import torch

# Their objects are no state of the user's, and walking them would never end.
LIBRARIES = sys.stdlib_module_names | {"torch", "torchvision", "numpy", "jax", "jaxlib", "pandas", "matplotlib", "tpu_lab", "marimo", "IPython"}
MANY = 10_000  # elements of a container that are looked at


class Found:
    """What a walk came across, each object once, in order."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.stateful: list = []  # schedulers, gradient scalers: what has state_dict and load_state_dict
        self.generators: list[torch.Generator] = []
        self.containers: list = []  # lists, sets, dicts, and the __dict__ of the user's objects
        self.functions: list[types.FunctionType] = []
        self.cells: list[types.CellType] = []
        self.iterators: list = []
        self._seen: dict[int, object] = {}  # keeps them alive, so that no id is used twice

    def visit(self, value) -> None:
        """Walk from one value."""
        todo = [value]
        while todo:
            value = todo.pop()
            if id(value) in self._seen or isinstance(value, (str, bytes, int, float, type, types.ModuleType)):
                continue
            self._seen[id(value)] = value
            todo += reversed(list(self._children(value)))

    def _children(self, value) -> list:
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            return []
        if isinstance(value, torch.nn.Module):
            self.modules.append(value)
            return [*value.parameters(), *value.buffers()]
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
            held = [v for group in value.param_groups for v in (*group["params"], *group.values())]
            return [v for v in (*held, *_values(value.state)) if isinstance(v, torch.Tensor)]
        if isinstance(value, torch.Generator):
            self.generators.append(value)
            return []
        if isinstance(value, types.FunctionType):
            self.functions.append(value)
            self.cells += value.__closure__ or ()
            return [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *used_globals(value).values()]
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, (list, set, dict)):
            self.containers.append(value)
            return list(value.values() if isinstance(value, dict) else value)[:MANY]
        if isinstance(value, (tuple, frozenset)):
            return list(value)[:MANY]
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            self.stateful.append(value)
            return []
        if isinstance(value, Iterator):
            self.iterators.append(value)
            return []
        if type(value).__module__.split(".")[0] not in LIBRARIES and isinstance(getattr(value, "__dict__", None), dict):
            self.containers.append(vars(value))
            return list(vars(value).values())
        return []


def find(*roots) -> Found:
    """What can be reached from functions, modules, optimizers, tensors and containers of them."""
    found = Found()
    for root in roots:
        found.visit(root)
    return found


def used_globals(fn: types.FunctionType) -> dict:
    """The globals that a user's function names, nested functions included; {} for a library's function."""
    if str(fn.__globals__.get("__name__", "")).split(".")[0] in LIBRARIES:
        return {}
    names, codes = set(), [fn.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return {name: fn.__globals__[name] for name in sorted(names) if name in fn.__globals__}


def save(found: Found) -> Callable[[], None]:
    """Copies of everything found and of the random states; the function that puts them back, as often as it is called."""
    from tpu_lab.backend import rng, state

    with torch.no_grad(), state.mode_scope("strict"):  # a copy is a copy now, not when somebody asks for it
        tensors = [(t, _copied(t), t.grad if t.is_leaf else None) for t in found.tensors.values() if _writable(t)]
        grads = [(t.grad, _copied(t.grad)) for t, _, _ in tensors if t.is_leaf and t.grad is not None]
    optimizers = [(o, [dict(g) for g in o.param_groups], {p: (s, dict(s)) for p, s in o.state.items()}) for o in found.optimizers]
    stateful = [(s, copy.deepcopy(s.state_dict())) for s in found.stateful]
    containers = [(c, copy.copy(c)) for c in found.containers]
    names = [(fn.__globals__, used_globals(fn)) for fn in found.functions]
    cells = [(cell, cell.cell_contents) for cell in found.cells if _full(cell)]
    training = [(m, m.training) for top in found.modules for m in top.modules()]
    generators = [(g, g.get_state()) for g in found.generators]
    drawn = (torch.get_rng_state(), rng.get_state(), random.getstate(), np.random.get_state())

    def restore() -> None:
        for container, content in containers:
            _refill(container, content)
        for scope, values in names:
            for name, value in values.items():
                if scope.get(name) is not value:
                    scope[name] = value
        for cell, value in cells:
            cell.cell_contents = value
        for optimizer, groups, states in optimizers:
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                _refill(group, values)
            optimizer.state.clear()
            for parameter, (own, values) in states.items():
                _refill(own, values)
                optimizer.state[parameter] = own
        with torch.no_grad(), state.mode_scope("strict"):
            for tensor, value, grad in tensors:
                tensor.data.copy_(value)  # through .data: autograd's version counters do not move
                if tensor.is_leaf:
                    tensor.grad = grad
            for grad, value in grads:
                grad.data.copy_(value)
        for owner, values in stateful:
            owner.load_state_dict(copy.deepcopy(values))
        for module, flag in training:
            module.training = flag
        for generator, value in generators:
            generator.set_state(value)
        torch.set_rng_state(drawn[0])
        rng.set_state(drawn[1])
        random.setstate(drawn[2])
        np.random.set_state(drawn[3])

    return restore


def _values(states: dict) -> list:
    return [v for own in states.values() for v in (own.values() if isinstance(own, dict) else [own])]


def _full(cell: types.CellType) -> bool:
    return cell != types.CellType()  # an empty one is a name that was not bound yet


def _cells(fn: types.FunctionType) -> list:
    return [cell.cell_contents for cell in fn.__closure__ or () if _full(cell)]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """On the host: a copy on the device would count as the step's memory."""
    value = tensor.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()


def _writable(tensor: torch.Tensor) -> bool:
    """Not so for an expanded tensor, whose elements share memory: no step can write to it, either."""
    return not any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _refill(container, content) -> None:
    """The old content, in the same object; an unchanged container is left alone."""
    if isinstance(container, list):
        if len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
            container[:] = content
    elif isinstance(container, dict):
        if list(container) != list(content) or any(container[k] is not v for k, v in content.items()):
            container.clear()
            container.update(content)
    elif container != content:
        container.clear()
        container.update(content)
