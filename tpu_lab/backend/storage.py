"""The carrier: a plain torch.Tensor on "tpu" whose storage holds one immutable value.

The value is a `jax.Array` or a `Pending` (a result of the deferred graph that has not run). It sits in a `Cell`,
a Python attribute of the C++ storage, so it lives exactly as long as the storage: through detach, saved tensors,
`nn.Parameter` and every view. Storages have their true size and a unique address that nobody ever dereferences, so
`data_ptr()`, tied weights and `torch.save` with aliases work.
"""

from __future__ import annotations

import math

import torch

from tpu_lab.backend.window import Base, Window, base, memory_order, window

_create = torch._C._acc.create_empty_tensor
_storage = torch._C._construct_storage_from_data_pointer
_set = torch.ops.aten.set_.source_Storage_storage_offset._handle.redispatch_boxed
_KERNEL_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # set_ only edits metadata: the CPU kernel serves
DEVICE = None  # torch.device("tpu:0"), set by device.py once the name exists


class Cell:
    """What a storage holds: `value` (jax.Array or Pending) of the shape and dtype that `base` says."""

    __slots__ = ("__weakref__", "base", "value")

    def __init__(self, value, base: Base):
        self.value = value
        self.base = base


class Pending:
    """A value of the deferred graph: output `index` of `graph`, until the flush puts `array` in place."""

    __slots__ = ("__weakref__", "array", "graph", "index")

    def __init__(self, graph, index: int):
        self.graph = graph
        self.index = index
        self.array = None


class NotOnDevice(RuntimeError):
    """An argument lies on another device. The door moves what PyTorch would move, and reports the rest."""

    def __init__(self, tensor):
        super().__init__(
            f"Expected all tensors to be on the same device, but found at least two devices, tpu:0 and {tensor.device}!"
        )


def check_device(device) -> None:
    """RuntimeError for an index that does not exist: a process has tpu:0 only."""
    if device is not None and device.type == "tpu" and device.index not in (None, 0):
        raise RuntimeError(f"there is no {device}: a process has one TPU device, tpu:0")


_next_address = 1 << 44


def new_storage(nbytes: int):
    """An UntypedStorage of this size on "tpu" with a fresh address and no cell yet."""
    global _next_address
    address = _next_address
    _next_address = address + ((nbytes + 511) & ~255)
    return _storage(address, DEVICE, nbytes)


def make(value, where: Base, size, stride, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A fresh tensor over a fresh storage that holds `value`.

    value: jax.Array or Pending of `where.shape`; size, stride, offset in elements of `dtype`.
    """
    tensor = _create(size, dtype)
    storage = tensor.untyped_storage()
    storage._swap_data_ptr_(new_storage(where.nbytes))  # its own is empty
    storage._tpu = Cell(value, where)
    if offset or tensor.stride() != stride:  # not contiguous; set_ costs more than all the rest
        _set(_KERNEL_KEYS, tensor, storage, offset, size, stride)
    return tensor


def layout(size, stride, dtype: torch.dtype) -> tuple[Base, tuple[int, ...] | None]:
    """The base for a fresh tensor of these strides, and the permutation that brings its values to memory order.

    A tensor with gaps (`empty_strided`) gets a flat base that spans them, and no permutation.
    """
    size = tuple(size)
    order = memory_order(size, stride)
    if order is None:
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if math.prod(size) else 0
        return base((span,), dtype), None
    return base(tuple(size[d] for d in order), dtype), order


def cell(tensor: torch.Tensor) -> Cell:
    """The cell of a tensor on "tpu". RuntimeError if its storage was made behind the backend's back."""
    if tensor.device.type != "tpu":
        raise NotOnDevice(tensor)
    storage = tensor.untyped_storage()
    try:
        return storage._tpu
    except AttributeError:
        pass
    if storage.nbytes() == 0 or hasattr(storage, "_raw"):  # torch made an empty one itself, or serial.py made it
        return adopt(storage, tensor)
    raise RuntimeError(
        f"this tensor of shape {tuple(tensor.shape)} lies on a 'tpu' storage that no tpu_lab call made: "
        "it was built from a raw data pointer. Copy the values instead: source.to('tpu')"
    )


def adopt(storage, tensor: torch.Tensor) -> Cell:
    """Give a storage without a cell one that fits its first tensor: the bytes that `_raw` holds, else no value yet."""
    where, order = layout(tensor.shape, tensor.stride(), tensor.dtype)
    if order is None or tensor.storage_offset() or where.nbytes != storage.nbytes():
        where = base((storage.nbytes() // tensor.dtype.itemsize,), tensor.dtype)
    raw, value = storage.__dict__.pop("_raw", None), None
    if raw is not None:
        import jax

        from tpu_lab.backend import live

        value = jax.device_put(raw[: where.nbytes].view(where.jdtype).reshape(where.shape))
        live.came(value)
    storage._tpu = found = Cell(value, where)
    return found


def window_of(tensor: torch.Tensor, where: Base) -> Window:
    """The window of a tensor over its base."""
    return window(where, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)


def set_metadata(tensor: torch.Tensor, where, offset: int, size, stride) -> None:
    """Point a tensor at a storage with this geometry."""
    _set(_KERNEL_KEYS, tensor, where, offset, size, stride)


def carrier(where, w: Window) -> torch.Tensor:
    """A tensor over an existing storage with the geometry of a window."""
    tensor = _create((), w.dtype)
    _set(_KERNEL_KEYS, tensor, where, w.offset, w.size, w.stride)
    return tensor


def view_of(tensor: torch.Tensor, offset: int, size, stride) -> torch.Tensor:
    """A new tensor object over the same storage, outside autograd."""
    out = _create((), tensor.dtype)
    _set(_KERNEL_KEYS, out, tensor.untyped_storage(), offset, size, stride)
    return out
