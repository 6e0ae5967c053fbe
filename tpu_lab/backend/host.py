"""Between host and device: copies in and out, `item()`. Each wait is recorded with the user's line."""

from __future__ import annotations

import dataclasses
import time

import jax
import ml_dtypes
import numpy as np
import torch

from tpu_lab import trace
from tpu_lab.backend import asked, bounds, executor, interrupts, layouts, live, owners, state, storage, where
from tpu_lab.backend.window import bitcast, contiguous_strides

_VIEWS = {torch.bfloat16: (torch.int16, ml_dtypes.bfloat16), torch.float8_e4m3fn: (torch.int8, ml_dtypes.float8_e4m3fn),
          torch.float8_e5m2: (torch.int8, ml_dtypes.float8_e5m2)}  # fmt: skip  (numpy has no such dtypes)
_now = time.perf_counter_ns


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor's memory as numpy (bf16 as ml_dtypes' type); not a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _VIEWS:
        integer, kind = _VIEWS[tensor.dtype]
        return tensor.view(integer).numpy().view(kind)
    return tensor.numpy()


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor that owns a copy of `array`."""
    array = np.array(array, copy=True, order="C")
    if dtype in _VIEWS:
        return torch.from_numpy(array.view(np.dtype(f"i{dtype.itemsize}"))).view(dtype)
    out = torch.from_numpy(array)
    return out.as_strided(out.shape, contiguous_strides(out.shape))  # numpy has other strides where a size is 0 or 1


def put(tensor: torch.Tensor) -> jax.Array:
    """A CPU tensor's values as a device array, C order. The array never shares the tensor's memory."""
    interrupts.ensure()
    return jax.device_put(np.array(to_numpy(tensor), copy=True))


def to_tpu(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh "tpu" tensor with the shape, strides and values of a CPU tensor."""
    layouts.check(tensor)
    start = _now()
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    where_to, order = storage.layout(size, stride, tensor.dtype)
    if order is None:
        stride = contiguous_strides(size)
        where_to, order = storage.layout(size, stride, tensor.dtype)
    ordered = tensor.detach().permute(order)
    value = put(ordered).reshape(where_to.shape)
    live.came(value)
    result = storage.make(value, where_to, size, stride, tensor.dtype)
    _record("to tpu", start, start, tensor.nbytes)
    return result


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """target (on "tpu") takes the values of a CPU tensor of the same shape."""
    found = storage.cell(target)
    window = storage.window_of(target, found.base)
    start = _now()
    if window.identity and source.dtype == target.dtype:
        found.value = put(source)
        live.came(found.value)
        owners.wrote(found)
        _record("to tpu", start, start, source.nbytes)
    else:
        torch.ops.aten.copy_(target, to_tpu(source.to(target.dtype)))


def to_cpu(tensor: torch.Tensor, what: str = "cpu") -> torch.Tensor:
    """The values on the CPU, with the tensor's own size and strides where it is dense."""
    if state.thread.tracing is not None:
        raise RuntimeError(f"a value is needed while a program is being traced ({what}): it does not exist yet")
    with state.lock, executor.waiting(what):
        found = storage.cell(tensor)
        start = _now()
        array = executor.resolve(found)
        host = np.asarray(array)
        waited = _now()
        base = from_numpy(host, found.base.dtype).reshape(-1)
        if found.base.dtype != tensor.dtype:
            raw, size = base.view(torch.uint8), tensor.dtype.itemsize
            base = raw[: raw.numel() // size * size].view(tensor.dtype) if raw.numel() else base.to(tensor.dtype)
        out = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if out.numel() != base.numel():
            out = out.clone(memory_format=torch.preserve_format)
        out = torch._conj(out) if tensor.is_conj() else out
        out = torch._neg_view(out) if tensor.is_neg() else out
        _record(what, start, waited, tensor.numel() * tensor.dtype.itemsize)
        bounds.look()
        return out


def item(tensor: torch.Tensor):
    """The Python number of a one-element tensor."""
    if state.thread.tracing is not None:
        raise RuntimeError("a value is needed while a program is being traced (item): it does not exist yet")
    with state.lock:
        found = storage.cell(tensor)
        what = "item" if trace.active is None else asked.value(where.PACKAGE)
        if found.base.numel > 1:  # one element of something bigger: cut it out on the device
            with executor.waiting(what):
                tensor = torch.ops.aten.clone(tensor.detach())
                found = storage.cell(tensor)
        start = _now()
        with executor.waiting(what):
            array = executor.resolve(found)
        value = np.asarray(array)
        _record(what, start, _now(), tensor.dtype.itemsize)
        bounds.look()
        if found.base.dtype != tensor.dtype:
            value = np.asarray(bitcast(value.reshape(-1), found.base.dtype, tensor.dtype))
        return value.reshape(-1)[0].item() if tensor.dtype not in _VIEWS else float(value.reshape(-1)[0])


def synchronize() -> None:
    """Run what is deferred and wait for the device."""
    with state.lock:
        start = _now()
        executor.flush("synchronize")
        for array in jax.live_arrays():
            array.block_until_ready()
        _record("synchronize", start, _now(), 0)
        bounds.look(wait=True)


def _record(what, start, waited, nbytes) -> None:
    active = trace.active
    if active is None:
        return
    end, site = _now(), where.site(3)
    active.add(
        "waits",
        trace.WaitRecord(what, site.file, site.line, site.code, start, waited - start, end - waited, nbytes),
    )


def waits() -> int:
    """How many waits the trace holds."""
    return 0 if trace.active is None else len(trace.active.waits)


def waits_of(op: str, since: int) -> None:
    """An op that runs on the host made the waits since then: nobody asked for these copies by name."""
    noted = trace.active.waits
    noted[since:] = [dataclasses.replace(w, what=op) for w in noted[since:]]
