"""Ops without a lowering of ours: PyTorch's own decomposition, run inside the jit trace as one node.

The decomposition is Python over torch tensors; it gets "tpu" tensors whose storages hold tracers, and the door runs
each inner op's lowering at once (`state.tracing`). Every argument of such an op is static and in its key.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import torch

from tpu_lab.backend import lowering, state, storage
from tpu_lab.backend.window import contiguous_strides

_running: list = []  # decompositions being traced, outermost first


@functools.cache
def _table() -> dict:
    import torch._decomp
    import torch._refs  # registers the reference implementations as decompositions, too

    return torch._decomp.decomposition_table


def find(overload):
    """A function (args, kwargs, outputs) -> list of arrays for this functional overload, or None."""
    if overload is None:
        return None
    decomposition = _table().get(overload)
    if decomposition is None:
        return None
    return functools.partial(_run, decomposition)


def wrap(array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous "tpu" tensor whose storage holds this array or tracer."""
    from tpu_lab.backend import dtypes

    shape = tuple(array.shape)
    strides = contiguous_strides(shape)
    where, _ = storage.layout(shape, strides, dtype or dtypes.to_torch(array.dtype))
    return storage.make(array, where, shape, strides, where.dtype)


def unwrap(tensor: torch.Tensor):
    """The values of a "tpu" tensor as a traced array of its shape."""
    from tpu_lab.backend import executor

    found = storage.cell(tensor)
    return storage.window_of(tensor, found.base).read(executor.traced(found))


def _run(decomposition, args, kwargs, outputs):
    def lift(value):
        if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, torch.Tensor):
            return wrap(value)
        return [lift(v) for v in value] if isinstance(value, list) else value

    if decomposition in _running:  # PyTorch's reference calls the op it stands for
        raise NotImplementedError(f"the decomposition {decomposition.__name__} needs itself")
    context = state.thread.tracing or state.Tracing(jnp.int64(0), jnp.int64(0))
    _running.append(decomposition)
    try:
        with state.tracing(context), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            result = decomposition(*[lift(a) for a in args], **{k: lift(v) for k, v in kwargs.items()})
            arrays = [unwrap(t) for t in lowering.flat(result, [])]
    finally:
        _running.pop()
    if outputs is not None:
        from tpu_lab.backend import dtypes

        arrays = [lowering.cast(a, dtypes.to_jax(dtype)) for a, (_, dtype) in zip(arrays, outputs, strict=True)]
    return arrays
