"""`nn.Module.to("tpu")` keeps its Parameters: the same objects, so optimizers made before and tied weights go on working.

On CUDA torch sets `param.data`. It refuses to between the CPU and a PrivateUse1 device and makes new Parameters instead:
weights tied across modules come untied, and an optimizer goes on training the old ones. Here the new tensor is swapped
into the old object (torch.utils.swap_tensors, torch's own way for such types). Where that is not allowed (somebody holds
a weak reference, or a live autograd graph) the new Parameter stays, once for all modules that share it.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._pytree import tree_map

_Module = torch.nn.Module


class _Ties(threading.local):
    """id of an old Parameter -> (it, its replacement), while one outermost `_apply` runs."""

    known = None


_ties = _Ties()


def apply() -> None:
    """Install it."""
    original = _Module._apply

    @functools.wraps(original)
    def _apply(self, fn, recurse=True):
        outermost, before = _ties.known is None, dict(self._parameters)
        if outermost:
            _ties.known = {}
        try:
            result = original(self, fn, recurse)
            for key, old in before.items():
                new = self._parameters[key]
                if new is not old and new is not None and "tpu" in (old.device.type, new.device.type):
                    self._parameters[key] = _same(old, new)
            return result
        finally:
            if outermost:
                _ties.known = None

    _Module._apply = _apply
    _data_parallel()


def _data_parallel() -> None:
    """`nn.DataParallel` over the one device: inputs go there whole (torch's own scatter is CUDA code)."""
    original = torch.nn.DataParallel.scatter

    @functools.wraps(original)
    def scatter(self, inputs, kwargs, device_ids):
        device = self.src_device_obj
        if device.type != "tpu":
            return original(self, inputs, kwargs, device_ids)
        move = functools.partial(tree_map, lambda x: x.to(device) if isinstance(x, torch.Tensor) else x)
        return (move(tuple(inputs)),), (move(kwargs or {}),)

    torch.nn.DataParallel.scatter = scatter


def _same(old, new):
    """The object that stands for `old` from now on: `old` itself with the new tensor inside, if that can be."""
    if id(old) in _ties.known:
        return _ties.known[id(old)][1]
    if torch.__future__.get_overwrite_module_params_on_conversion():
        keep = new
    else:
        attributes, kind = dict(old.__dict__), type(old)
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError:
            keep = new
        else:
            keep = old
            keep.__dict__.update(attributes)
            if issubclass(kind, UninitializedTensorMixin):  # torch has made it a plain one
                keep.__class__ = kind
            return keep  # a second module that holds it finds it moved already
    _ties.known[id(old)] = (old, keep)
    return keep
