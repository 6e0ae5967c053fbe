"""`resize_` and `set_`: a tensor's geometry over its storage, and storages that change their size.

torch's own storages made from an address cannot be resized, but their data can be swapped: with an empty storage first
(ours is then empty), with one of the new size next. The storage object stays, so all tensors on it go on sharing, as on
the CPU: a view sees what is written through a resized base.
"""

from __future__ import annotations

import torch

from tpu_lab.backend import storage
from tpu_lab.backend.window import base, contiguous_strides


def resize_storage(where: torch.UntypedStorage, nbytes: int) -> None:
    """Give a "tpu" storage another size in bytes; what fits of its values stays, new memory is zeros."""
    if nbytes == where.nbytes():
        return
    if hasattr(where, "_raw"):  # bytes that no tensor has claimed yet
        storage.adopt(where, torch.empty((where.nbytes(),), dtype=torch.uint8, device="meta"))
    old, cell = where.nbytes(), getattr(where, "_tpu", None)
    if cell is not None and nbytes and old and cell.value is not None:
        value, to = _resized(cell, nbytes)
    else:
        dtype = torch.uint8 if cell is None or nbytes % cell.base.itemsize else cell.base.dtype
        value, to = None, base((nbytes // dtype.itemsize,), dtype)
    where._swap_data_ptr_(storage.new_storage(0))
    if nbytes:
        where._swap_data_ptr_(storage.new_storage(nbytes))
    if cell is None:
        where._tpu = storage.Cell(value, to)
    else:
        cell.value, cell.base = value, to


def _resized(cell, nbytes: int):
    """(value, base) of `nbytes` bytes that begin as the cell's do."""
    dtype = cell.base.dtype if nbytes % cell.base.itemsize == 0 else torch.uint8
    size, new = cell.base.nbytes // dtype.itemsize, nbytes // dtype.itemsize
    old = storage.make(cell.value, cell.base, cell.base.shape, contiguous_strides(cell.base.shape), cell.base.dtype)
    flat = torch._C._acc.create_empty_tensor((), dtype)
    storage.set_metadata(flat, old.untyped_storage(), 0, (size,), (1,))
    if new <= size:
        fresh = torch.ops.aten.clone(flat[:new])
    else:
        fresh = torch.zeros((new,), dtype=dtype, device=storage.DEVICE)
        fresh[:size].copy_(flat)
    made = storage.cell(fresh)
    return made.value, made.base


def _bytes(tensor: torch.Tensor, offset: int, size, stride) -> int:
    """How far into the storage this geometry reaches."""
    if 0 in size:
        return 0
    return (offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))) * tensor.element_size()


def resize_(self, size, memory_format=None):
    """Metadata only while it fits; a larger size makes the storage grow, for all tensors on it."""
    if tuple(self.shape) == tuple(size) and memory_format in (None, torch.preserve_format):
        return self
    meta = torch.empty(size, dtype=self.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    where = self.untyped_storage()
    need = _bytes(self, self.storage_offset(), meta.shape, meta.stride())
    if need > where.nbytes():
        resize_storage(where, need)
    storage.set_metadata(self, where, self.storage_offset(), meta.shape, meta.stride())
    return self


def set_source(self, source, *rest):
    """`set_` from a storage or a tensor. A storage that is too small grows, as on the CPU; RuntimeError if the tensor
    keeps its shape and strides, because PyTorch then takes the storage as it is.
    """
    if isinstance(source, torch.Tensor):
        where = source.untyped_storage()
        offset, size, stride = rest if rest else (source.storage_offset(), source.shape, source.stride())
    else:
        where = source if isinstance(source, torch.UntypedStorage) else source._untyped_storage
        if len(rest) == 2:  # the default stride is left out: contiguous, and of a 0-dim tensor the only one
            rest = (*rest, contiguous_strides(rest[1]))
        offset, size, stride = rest if rest else (0, (where.nbytes() // self.element_size(),), (1,))
    stride = stride or contiguous_strides(size)
    need = _bytes(self, offset, size, stride)
    if need > where.nbytes() and (tuple(size), tuple(stride)) != (tuple(self.shape), self.stride()):
        resize_storage(where, need)
    elif need > where.nbytes():
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize "
            f"{self.element_size()} requiring a storage size of {need} are out of bounds for storage of size {where.nbytes()}"
        )
    storage.set_metadata(self, where, offset, size, stride)
    return self


def set_nothing(self):
    """`x.set_()`: an empty tensor over a new, empty storage."""
    fresh = torch.empty((0,), dtype=self.dtype, device=self.device)
    storage.set_metadata(self, fresh.untyped_storage(), 0, (0,), (1,))
    return self


def patch_storage_resize() -> None:
    """`storage.resize_(nbytes)` asks C++ hooks that Python cannot give: serve "tpu" storages here."""
    original = torch.UntypedStorage.resize_

    def resize_(self, size: int):
        if self.device.type != "tpu":
            return original(self, size)
        resize_storage(self, int(size))
        return self

    torch.UntypedStorage.resize_ = resize_
