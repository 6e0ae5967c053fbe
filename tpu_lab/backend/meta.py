"""A call on meta tensors: PyTorch's own shapes, dtypes and strides of what it returns, writes and resizes, and its errors."""

from __future__ import annotations

import functools

import torch
import torch._meta_registrations  # noqa: F401  Python meta kernels: shapes for ops that have none in C++
from torch.utils._python_dispatch import _disable_current_modes

from tpu_lab.backend import native, storage

_own: dict = {}


def own(overload):
    """Register the decorated function in place of PyTorch's meta kernel, where that one holds the limits of another device.

    It is given the overload's arguments, tensors on meta or fake, and returns what the overload returns.
    """

    def register(fn):
        _own[overload] = fn
        return fn

    return register


def tell_fake_tensors() -> None:
    """The same rules for the fake tensors of torch.compile and torch.export that stand for tensors on "tpu"."""
    from torch._subclasses import fake_impls

    for overload, fn in _own.items():
        if overload not in fake_impls.op_implementations_dict:
            fake_impls.register_op_impl(overload)(functools.partial(_fake, fn))


def _fake(fn, mode, overload, *args, **kwargs):
    if not any(t.device.type == "tpu" for t in tensors_in([*args, *kwargs.values()], [])):
        return NotImplemented
    with mode:
        return fn(*args, **kwargs)


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _map(value, f):
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [_map(v, f) for v in value]
    return value


def tensors_in(value, found: list) -> list:
    """All tensors of a nested list, in order."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for v in value:
            tensors_in(v, found)
    return found


def call(record, args, kwargs):
    """The call on meta tensors: its arguments, and what it and its functional twin return."""
    with _disable_current_modes(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        metas = [_map(a, meta_of) for a in args]
        kmetas = {k: _map(v, meta_of) for k, v in kwargs.items() if k != "generator"}
        if kmetas.get("device") is not None:
            storage.check_device(kmetas["device"])
            kmetas["device"] = torch.device("meta")
        if kmetas.get("pin_memory"):
            kmetas["pin_memory"] = False
        try:
            declared, computed = _shapes(record, metas, kmetas)
        except RuntimeError:  # some meta kernels refuse what the CPU takes, as the shift of a boolean
            found = native.answer(record, args, kwargs) if record.functional is record.overload else None
            if found is None:
                raise
            declared = computed = _map(found, meta_of)
    mask = _mask(record, args, kwargs)
    if mask is not None:  # some meta kernels make what nobody asked for
        declared, computed = (_asked(values, mask) for values in (declared, computed))
    return metas, kmetas, declared, computed


def by_name(record, args, kwargs) -> dict:
    """The arguments by their names in the schema."""
    return dict(zip([a.name for a in record.schema.arguments], args, strict=False)) | kwargs


def written(record, values, given, metas, computed):
    """(positions of the tensors that are written, [(position, shape, strides)] of those that must be resized first)."""
    order = {id(t): i for i, t in enumerate(tensors_in(values, []))}
    written = [t for name in record.written for t in tensors_in(given.get(name), [])]
    metas = [t for name in record.written for t in tensors_in(metas.get(name), [])]
    writes = [order[id(t)] for t in written]
    like = tensors_in(computed, [])  # a resized `out=` gets the strides that a new result would have
    like = like if len(like) == len(metas) else metas
    resize = [
        (i, tuple(m.shape), n.stride() if n.shape == m.shape else m.stride())
        for i, t, m, n in zip(writes, written, metas, like, strict=True)
        if t.shape != m.shape
    ]
    return writes, resize


def kept_strides(record, args, kwargs, fresh):
    """`empty_like` and its kind keep a dense tensor's strides, which meta may simplify."""
    if not record.name.split(".")[1].endswith("_like") or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return fresh
    model = args[0]
    if storage.layout(model.shape, model.stride(), model.dtype)[1] is None:
        return fresh
    return [torch.empty_strided(model.shape, model.stride(), dtype=fresh[0].dtype, device="meta")]


def _shapes(record, metas, kmetas):
    """(what the overload itself returns, what its functional twin returns) on meta; None where meta cannot tell."""
    record.meta = True
    try:
        return _of_meta(record, metas, kmetas)
    except NotImplementedError:
        record.meta = False
        return None, None
    except (TypeError, ZeroDivisionError) as error:  # of an empty batch, or of one value: the CPU's kernel tells the shapes
        if type(error) is TypeError and all(t.numel() for t in tensors_in([*metas, *kmetas.values()], [])):
            raise
        lift = functools.partial(torch.zeros_like, device="cpu")
        found = _of_meta(record, [_map(a, lift) for a in metas], {k: _map(v, lift) for k, v in kmetas.items()})
        return tuple(_map(values, meta_of) for values in found)


def _of_meta(record, metas, kmetas):
    if record.overload in _own:
        found = _own[record.overload](*metas, **kmetas)
        return found, found
    declared = record.overload(*metas, **kmetas, **_unsaid(record, record.overload, metas, kmetas))
    if record.functional is None or record.functional is record.overload:
        computed = declared
        if record.direct_write and not record.lowering.out:
            computed = None  # a lowering on the mutating overload returns the written arguments themselves
    else:
        outs = {a.name for a in record.schema.arguments if a.is_out}
        kmetas = {k: v for k, v in kmetas.items() if k not in outs}
        computed = record.functional(*metas, **kmetas, **_unsaid(record, record.functional, metas, kmetas))
    return declared, computed


def _mask(record, args, kwargs) -> list[bool] | None:
    """Which results are wanted: the `output_mask` of a backward op; the weights of an attention by `need_weights`."""
    given = by_name(record, args, kwargs)
    return [True, False] if given.get("need_weights") is False else given.get("output_mask")


def _asked(values, mask):
    """Shapes by meta with None where the mask says no."""
    if not isinstance(values, (tuple, list)) or len(values) != len(mask):
        return values
    return tuple(v if wanted else None for v, wanted in zip(values, mask, strict=True))


def _unsaid(record, overload, metas, kmetas) -> dict:
    """Arguments that `overload` must be given and the call did not pass: the generator, and defaults of the called form
    (`bernoulli_(p=0.5)` against `bernoulli(p)`)."""
    given = {a.name for a, _ in zip(record.schema.arguments, metas, strict=False)} | kmetas.keys()
    default = {a.name: a.default_value for a in record.schema.arguments}
    return {
        a.name: default.get(a.name)
        for a in overload._schema.arguments
        if a.name not in given and not a.has_default_value()
    }
