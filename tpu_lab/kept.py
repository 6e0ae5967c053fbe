"""What a rehearsal of a training step must leave as it was: gradients, optimizer state, counters on the CPU.

Values on "tpu" come back by themselves (backend/rehearsal.py). What PyTorch keeps beside them is found from the
function: its arguments, what it closes over, the globals it names, and every optimizer that steps inside.
"""

from __future__ import annotations

import contextlib
import inspect

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

DEPTH = 4  # containers and objects to look into


@contextlib.contextmanager
def kept(fn, args, kwargs):
    """Gradients and optimizer state that fn can reach, and its own optimizers', are the same after the block."""
    found = _Found()
    for root in (*_roots(fn), *args, *kwargs.values()):
        found.look(root, DEPTH)
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: found.optimizer(optimizer))
    try:
        yield
    finally:
        handle.remove()
        found.restore()


class _Found:
    """What was met, with what it held at that moment."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._grads: list[tuple] = []
        self._optimizers: list[tuple] = []
        self._modules: list[tuple] = []
        self._cpu: list[tuple] = []

    def look(self, value, depth: int) -> None:
        """Remember what is reachable from a value."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.nn.Module):
            self._module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizer(value)
        elif depth > 0 and isinstance(value, dict):
            for item in list(value.values()):
                self.look(item, depth - 1)
        elif depth > 0 and isinstance(value, (list, tuple, set)):
            for item in list(value):
                self.look(item, depth - 1)
        elif depth > 0 and inspect.isfunction(value):
            for root in _roots(value):
                self.look(root, depth - 1)
        elif depth > 0 and type(value).__module__ not in ("builtins", "torch") and hasattr(value, "__dict__"):
            if not inspect.ismodule(value) and not inspect.isclass(value):
                for item in list(vars(value).values()):
                    self.look(item, depth - 1)

    def optimizer(self, optimizer) -> None:
        """Remember an optimizer's state, once, and its parameters."""
        if any(known is optimizer for known, *_ in self._optimizers):
            return
        self._seen.add(id(optimizer))
        state = {
            p: {k: v.clone() if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v for k, v in s.items()}
            for p, s in optimizer.state.items()
        }
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self._optimizers.append((optimizer, state, groups))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.look(parameter, 0)

    def _module(self, module) -> None:
        self._modules.extend((m, m.training) for m in module.modules())
        for tensor in (*module.parameters(), *module.buffers()):
            self.look(tensor, 0)

    def _tensor(self, tensor) -> None:
        if tensor.is_leaf and tensor.requires_grad:
            self._grads.append((tensor, tensor.grad))
        if tensor.device.type == "cpu" and tensor.numel() < 1 << 20 and not tensor.requires_grad:
            self._cpu.append((tensor, tensor.clone()))  # a step count, a running loss

    def restore(self) -> None:
        """Put all back."""
        with torch.no_grad():
            for tensor, grad in self._grads:
                tensor.grad = grad
            for tensor, value in self._cpu:
                tensor.copy_(value)
            for optimizer, state, groups in self._optimizers:
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, values in zip(optimizer.param_groups, groups, strict=False):
                    group.update(values)
            for module, training in self._modules:
                module.training = training


def _roots(fn) -> list:
    """What a function can reach besides its arguments."""
    out = [getattr(fn, "__self__", None)]
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    if not inspect.isfunction(fn):
        return [*out, fn]
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            out.append(cell.cell_contents)
    out += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    names, codes = set(), [fn.__code__]
    while codes:  # functions inside name globals, too
        code = codes.pop()
        names |= set(code.co_names)
        codes += [c for c in code.co_consts if inspect.iscode(c)]
    return out + [fn.__globals__[n] for n in names if n in fn.__globals__]
