"""Which function serves which ATen overload at PrivateUse1: views, memory, host-bound ops; the door for all the rest.

Ops with a CompositeImplicitAutograd kernel are never taken: they must decompose above autograd, or their gradient is
lost. What is registered nowhere comes to `catch_all`: PyTorch's decomposition inside the jit trace, else the CPU.
"""

from __future__ import annotations

import functools
import time

import torch

from tpu_lab import errors, trace
from tpu_lab.backend import (
    bits,
    dispatch,
    fallback,
    host,
    host_bound,
    recorder,
    refusals,
    registry,
    resize,
    signature,
    state,
    storage,
)
from tpu_lab.backend import ops as _ops  # noqa: F401  registers the lowerings
from tpu_lab.backend.storage import NotOnDevice, make

aten = torch.ops.aten
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# PyTorch lets these take index tensors from the CPU.
TAKES_CPU_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# Views that torch's meta kernels make: they share our storage and know strides.
VIEWS = "view as_strided _reshape_alias view_as_real view_as_complex view.dtype _conj".split()
# Views that C++ makes by `as_strided`: they only give it the name that a record shows.
NAMED = (
    "t transpose.int permute select.int slice.Tensor expand unsqueeze squeeze squeeze.dim squeeze.dims split.Tensor "
    "split_with_sizes unbind.int diagonal unfold".split()
)


def door(overload):
    """The function torch calls for an overload that has a lowering."""
    record = dispatch.record_of(overload)

    def kernel(*args, **kwargs):
        try:
            return dispatch.call(record, args, kwargs)
        except NotOnDevice as error:
            args, kwargs = _moved(record, args, kwargs, error)
            return dispatch.call(record, args, kwargs)
        except OverflowError:
            args, kwargs = refusals.within_int64(record, args, kwargs)
            return dispatch.call(record, args, kwargs)

    return refusals.refusing(record, kernel)


def catch_all(overload, *args, **kwargs):
    """An overload nobody registered: its decomposition as one node, else the CPU, never silently.

    A call that cannot be traced goes to the CPU from then on, and no other call of the op: it may depend on shapes and dtypes.
    """
    record = dispatch.record_of(overload)
    if record.lowering is not None:
        return door(overload)(*args, **kwargs)
    if record.decompose is not None and fallback.said(record, args, kwargs) not in fallback.untraced:
        try:
            return door(overload)(*args, **kwargs)
        except (NotOnDevice, KeyboardInterrupt):
            raise
        except Exception as error:
            if not untraceable(error):
                raise
            fallback.remember(record, args, kwargs)
    return fallback.run(record, args, kwargs, "unsupported")


def untraceable(error) -> bool:
    """A decomposition that wants values, or an inner op that cannot be traced: not the user's fault."""
    import jax

    return isinstance(error, (NotImplementedError, jax.errors.ConcretizationTypeError)) or "being traced" in errors.text(error)


def _moved(record, args, kwargs, error):
    """Move what PyTorch would: 0-dim CPU tensors, and CPU index tensors of indexing ops. RuntimeError for the rest."""
    index = record.schema.name.split("::")[1] in TAKES_CPU_INDEX

    def move(value, inside):
        if isinstance(value, torch.Tensor) and value.device.type != "tpu":
            if value.device.type == "cpu" and (value.dim() == 0 or inside):
                return host.to_tpu(value)
            error.args = (f"{error} ({_places(record, args, kwargs)})",)
            raise error
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return [move(v, index) for v in value]
        return value

    return [move(a, False) for a in args], {k: move(v, False) for k, v in kwargs.items()}


def _places(record, args, kwargs) -> str:
    """`aten.mm.default: self on tpu:0, mat2 on cpu`."""
    said = []
    for name, value in [*zip(record.names, args, strict=False), *kwargs.items()]:
        devices = sorted({str(t.device) for t in signature.tensors_in(value, [])})
        if devices:
            said.append(f"{name} on {' and '.join(devices)}")
    return f"{record.name}: {', '.join(said)}"


# --- views: metadata only ------------------------------------------------------------------------------------------


def _view_kernel(overload):
    redispatch = overload._handle.redispatch_boxed
    keys = _CPU if overload is aten.as_strided.default else _META  # the CPU's as_strided checks the bounds of the storage
    name = f"{overload._schema.name.replace('::', '.')}.{overload._overloadname}"

    def kernel(*args):
        out = redispatch(keys, *args)
        if trace.active is not None and state.thread.tracing is None:
            given, made = (args[0].shape, args[0].dtype), (out.shape, out.dtype)
            recorder.write(state.thread.view or name, given, made, (), "view", time.perf_counter_ns())
        return out

    return kernel


def _named_kernel(overload):
    redispatch = overload._handle.redispatch_boxed
    name = f"{overload._schema.name.replace('::', '.')}.{overload._overloadname}"

    def kernel(*args):
        thread = state.thread
        if trace.active is None or thread.view is not None:  # a split is made of slices: it is a split
            return redispatch(_META, *args)
        thread.view = name
        try:
            return redispatch(_META, *args)
        finally:
            thread.view = None

    return kernel


# --- memory --------------------------------------------------------------------------------------------------------


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """Uninitialised memory: no launch, the value is made when somebody reads it."""
    storage.check_device(device)
    meta = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    where, _ = storage.layout(tuple(meta.shape), meta.stride(), meta.dtype)
    return make(None, where, meta.shape, meta.stride(), meta.dtype)


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    """As `empty`, with the caller's strides."""
    storage.check_device(device)
    meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    where, _ = storage.layout(tuple(meta.shape), meta.stride(), meta.dtype)
    return make(None, where, meta.shape, meta.stride(), meta.dtype)


def empty_permuted(size, physical_layout, dtype=None, layout=None, device=None, pin_memory=None):
    """As `empty`, with the dimensions in another order in memory: what `torch.empty_like` and `Module.to_empty` call."""
    meta = torch.empty_permuted(size, physical_layout, dtype=dtype, device="meta")
    return empty_strided(tuple(meta.shape), meta.stride(), dtype=meta.dtype, device=device)


def copy_(self, src, non_blocking=False):
    """Device to device is the lowering of aten.copy; the others cross over."""
    if self is src:
        return self
    if self.device.type == "tpu" and src.device.type == "tpu":
        return _copy(self, src)
    if self.device.type == "tpu":
        host.write(self, src.to(self.dtype).expand(self.shape))
    else:
        self.copy_(host.to_cpu(src))
    return self


def _copy_from(self, dst, non_blocking=False):
    return copy_(dst, self, non_blocking)


def to_copy(self, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    """To the CPU: a host copy. On the device: a cast or a clone."""
    target = torch.device(device) if device is not None else None
    storage.check_device(target)
    if self.device.type != "tpu" or (target is not None and target.type not in ("tpu", "cpu")):
        out = torch.empty_like(self, dtype=dtype, device=target, memory_format=memory_format)
        return out.copy_(self if self.device.type != "tpu" else host.to_cpu(self))
    if target is not None and target.type == "cpu":
        return host.to_cpu(self).to(dtype=dtype or self.dtype, memory_format=memory_format or torch.preserve_format)
    given = {"dtype": dtype, "memory_format": memory_format}
    return _cast(self, **{k: v for k, v in given.items() if v is not None})


# --- indices that are masks ----------------------------------------------------------------------------------------


def _is_mask(t) -> bool:
    return isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8)


def _long_indices(self, indices):
    """Replace each mask by the positions where it is true. Its count is data: the host must know it."""
    out, dim = [], 0
    for t in indices:
        if not _is_mask(t):
            out.append(t)
            dim += 1
            continue
        for d, n in enumerate(t.shape):
            if n != self.shape[dim + d]:
                raise IndexError(
                    f"The shape of the mask {list(t.shape)} at index {d} does not match the shape of the indexed "
                    f"tensor {list(self.shape)} at index {dim + d}"
                )
        out.extend(torch.nonzero(t).unbind(1))
        dim += t.dim()
    return out


def _masked_fill_form(self, indices, values, accumulate):
    """The mask broadcast to self if `self[mask] = scalar` is all that is asked, else None."""
    masks = [i for i, t in enumerate(indices) if t is not None]
    if accumulate or values.numel() != 1 or len(masks) != 1 or not _is_mask(indices[masks[0]]):
        return None
    at, mask = masks[0], indices[masks[0]]
    if tuple(mask.shape) != tuple(self.shape[at : at + mask.dim()]):
        return None
    shape = (1,) * at + tuple(mask.shape) + (1,) * (self.dim() - at - mask.dim())
    return (mask if mask.dtype == torch.bool else mask != 0).reshape(shape)


def _on_device(indices, device):
    return [t.to(device) if isinstance(t, torch.Tensor) and t.device != device else t for t in indices]


def index(self, indices):
    """x[...]: masks become positions first."""
    indices = _on_device(indices, self.device)
    return _index(self, _long_indices(self, indices) if any(map(_is_mask, indices)) else indices)


def _index_put_kernel(inner):
    def kernel(self, indices, values, accumulate=False, unsafe=False):
        indices = _on_device(indices, self.device)
        if values.device != self.device:
            values = values.to(self.device)
        if any(map(_is_mask, indices)):
            mask = _masked_fill_form(self, indices, values, accumulate)
            if mask is not None:
                return self.masked_fill_(mask, values.reshape(()).to(self.dtype))
            indices = _long_indices(self, indices)
        return inner(self, indices, values, accumulate)

    return kernel


def index_put(self, indices, values, accumulate=False):
    """A new tensor; masks as in place."""
    if any(map(_is_mask, indices)):
        return self.clone().index_put_(indices, values, accumulate)
    return _index_put(self, _on_device(indices, self.device), values.to(self.device), accumulate)


def kron_out(self, other, *, out):
    """PyTorch writes through `_unsafe_view`, which is a copy here."""
    result = torch.kron(self, other)
    if out.shape != result.shape:
        resize.resize_(out, result.shape)
    return out.copy_(result)


def _equal(self, other):
    if self.shape != other.shape or self.dtype != other.dtype:
        return False
    return host.item((self == other).all()) if self.numel() else True


# --- registration ---------------------------------------------------------------------------------------------------

_libraries: list = []
_copy = _cast = _index = _index_put = None


def composite_implicit(overload) -> bool:
    """Does it decompose above autograd (or exist for TorchScript's numbers only)? Then it must not be registered."""
    name = overload.name()
    known = torch._C._dispatch_has_kernel(name)
    return not known or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def register() -> None:
    """Give PrivateUse1 its kernels. Called once, at import."""
    global _copy, _cast, _index, _index_put
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    _copy, _cast, _index = door(aten.copy_.default), door(aten._to_copy.default), door(aten.index.Tensor)
    _index_put = door(aten.index_put.default)
    special = {
        aten.empty.memory_format: empty,
        aten.empty_strided.default: empty_strided,
        aten.empty_permuted.default: empty_permuted,
        aten.copy_.default: copy_,
        aten._copy_from.default: _copy_from,
        aten._to_copy.default: to_copy,
        aten._local_scalar_dense.default: host.item,
        aten.equal.default: _equal,
        aten.kron.out: kron_out,
        aten.resize_.default: resize.resize_,
        aten.set_.source_Storage: resize.set_source,
        aten.set_.source_Storage_storage_offset: resize.set_source,
        aten.set_.source_Tensor: resize.set_source,
        aten.set_.default: resize.set_nothing,
        aten.index.Tensor: index,
        aten.index_put.default: index_put,
        aten.index_put_.default: _index_put_kernel(door(aten.index_put_.default)),
        aten._index_put_impl_.default: _index_put_kernel(door(aten.index_put_.default)),
        **host_bound.kernels(door),
    }
    for name in VIEWS:
        overload = _overload(name)
        special[overload] = _view_kernel(overload)
    for name in NAMED:
        overload = _overload(name)
        special[overload] = _named_kernel(overload)
    for name in host_bound.REASONS:
        overload = _overload(name)
        if overload not in special and not composite_implicit(overload):
            special[overload] = _host_kernel(overload)
    for overload, function in special.items():
        if _lazy_bits(overload):
            function = bits.resolving(overload, function)
        library.impl(overload, function, "PrivateUse1")
    for overload in _lowered():
        if overload not in special and not composite_implicit(overload):
            function = bits.resolving(overload, door(overload)) if _lazy_bits(overload) else door(overload)
            library.impl(overload, function, "PrivateUse1")
    everything = torch.library.Library("_", "IMPL")
    _libraries.append(everything)
    everything.fallback(catch_all, "PrivateUse1")
    registry.late.append(serve)


def serve(overload) -> None:
    """An overload of any library has got a lowering: it counts from now on, also where the library's kernel is for every device
    (`torch.library.custom_op`) and would go first."""
    dispatch.renew(overload.overloadpacket)
    at = [k for k in ("PrivateUse1", "CompositeExplicitAutograd") if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), k)]
    if at == ["CompositeExplicitAutograd"]:
        library = torch.library.Library(overload.namespace, "IMPL")
        library.impl(overload, functools.partial(catch_all, overload), "PrivateUse1")
        _libraries.append(library)


def _lazy_bits(overload) -> bool:
    return overload._schema.name.removeprefix("aten::") in bits.RESOLVED_HERE


def _overload(name):
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")


def _host_kernel(overload):
    record = dispatch.record_of(overload)
    return lambda *args, **kwargs: fallback.run(record, args, kwargs, "data-dependent")


def _lowered():
    """Every overload that a registered lowering serves, in-place and out forms included."""
    seen = {}
    for overload in registry.table():
        packet = overload.overloadpacket
        name = overload._schema.name.removeprefix("aten::")
        for p in {packet, getattr(aten, name + "_", packet), getattr(aten, name.removesuffix("_"), packet)}:
            for which in p.overloads():
                seen[getattr(p, which)] = None
    return [o for o in seen if dispatch.record_of(o).lowering is not None]


