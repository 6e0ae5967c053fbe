"""Storages as torch's Python code uses them: made by size, copied, written to files. torch.save, torch.load, deepcopy, pickle.

torch's own methods take the address of a device storage for real memory. Ours is a number that nobody may read, so each
method that would read it is replaced for "tpu" storages; those of other devices go to the original.
A storage that was made from bytes has `_raw` (uint8 numpy, or None for no value yet) until its first tensor tells the dtype.
"""

from __future__ import annotations

import numpy as np
import torch

from tpu_lab.backend import executor, state, storage

_Base = torch._C.StorageBase
NO_SHARING = (
    "a 'tpu' tensor cannot be sent to another process: its values live on this process's device. "
    "Send a CPU copy (x.cpu()) and move it there"
)
NO_DLPACK = (
    "a 'tpu' tensor has no memory of its own to lend through DLPack. Use x.cpu() for a host copy, or "
    "torch.tpu.pallas.jax_op to run a JAX function on tpu tensors"
)


def apply() -> None:
    """Install the replacements."""
    cls = torch.UntypedStorage
    cls.__new__ = staticmethod(_new)
    cls.copy_ = _copy_
    cls._write_file = _write_file
    cls._set_from_file = _set_from_file
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(cls, name, _refusing(getattr(cls, name)))
    _dlpack()


def _on_tpu(s) -> bool:
    return s.device.type == "tpu"


def _new(cls, *args, **kwargs):
    """torch would call the device's allocator, and PrivateUse1 has none: a segmentation fault (deepcopy, torch.load)."""
    device = kwargs.get("device")
    device = torch.device(device) if device is not None else None
    if device is None or device.type != "tpu":
        return _Base.__new__(cls, *args, **kwargs)
    storage.check_device(device)
    if args and not isinstance(args[0], int):  # a sequence of bytes
        return cls(len(args[0]), device=device).copy_(_Base.__new__(cls, *args))
    made = storage.new_storage(int(args[0] if args else kwargs.get("size", 0)))
    made._raw = None
    return made


def raw_bytes(s) -> np.ndarray:
    """The bytes of a storage on any device, as a fresh uint8 array."""
    if not _on_tpu(s):
        return torch.tensor([], dtype=torch.uint8).set_(s).numpy().copy()
    cell = getattr(s, "_tpu", None)
    if cell is None:
        held = getattr(s, "_raw", None)
        return np.zeros(s.nbytes(), np.uint8) if held is None else held.copy()
    with state.lock, executor.waiting("cpu"):
        value = np.ascontiguousarray(np.asarray(executor.resolve(cell)))
    held = value.reshape(-1).view(np.uint8)
    return np.concatenate([held, np.zeros(s.nbytes() - held.size, np.uint8)])


def _hold(s, raw) -> None:
    """The storage's bytes are `raw` (None: no value yet); the next tensor on it tells the dtype."""
    s.__dict__.pop("_tpu", None)
    s._raw = raw


def _copy_(self, source, non_blocking=None):
    """Values never change in place, so a copy on the device shares them: deepcopy costs nothing."""
    if not (_on_tpu(self) or _on_tpu(source)):
        return _Base.copy_(self, source, non_blocking)
    if self.nbytes() != source.nbytes():
        raise RuntimeError(f"size does not match, self was {self.nbytes()} bytes but src was {source.nbytes()} bytes")
    if not _on_tpu(self):
        torch.tensor([], dtype=torch.uint8).set_(self).copy_(torch.from_numpy(raw_bytes(source)))
        return self
    cell = getattr(source, "_tpu", None)
    mine = getattr(self, "_tpu", None)
    if cell is not None:
        self.__dict__.pop("_raw", None)
        with state.lock:
            if mine is None:
                self._tpu = storage.Cell(cell.value, cell.base)
            else:
                mine.value, mine.base = cell.value, cell.base
        return self
    _hold(self, raw_bytes(source))
    return self


def _write_file(self, *args):
    """The old file format, and pickle: torch would read the address."""
    return _Base._write_file(self.cpu() if _on_tpu(self) else self, *args)


def _set_from_file(self, *args):
    """The old file format, and pickle: torch would write to the address."""
    if not _on_tpu(self):
        return _Base._set_from_file(self, *args)
    host = torch.UntypedStorage(self.nbytes())
    _Base._set_from_file(host, *args)
    return self.copy_(host)


def _refusing(original):
    def share(self, *args, **kwargs):
        if _on_tpu(self):
            raise RuntimeError(NO_SHARING)
        return original(self, *args, **kwargs)

    return share


def _dlpack() -> None:
    """to_dlpack would hand out the address as a pointer."""
    export, of_tensor, place = torch._C._to_dlpack, torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__

    def to_dlpack(tensor):
        """A DLPack capsule of a tensor. BufferError for a "tpu" tensor."""
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "tpu":
            raise BufferError(NO_DLPACK)
        return export(tensor)

    def __dlpack__(self, *args, **kwargs):  # noqa: N807
        if self.device.type == "tpu":
            raise BufferError(NO_DLPACK)
        return of_tensor(self, *args, **kwargs)

    def __dlpack_device__(self):  # noqa: N807
        if self.device.type == "tpu":
            raise BufferError(NO_DLPACK)
        return place(self)

    torch.to_dlpack = torch.utils.dlpack.to_dlpack = to_dlpack
    torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__ = __dlpack__, __dlpack_device__
