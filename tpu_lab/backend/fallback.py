"""What no lowering can do on the device: data-dependent shapes, and ops that nobody has lowered. They run on the CPU.

Never silently: an op without a lowering warns once and shows in the trace with its cost; `TPU_LAB_FALLBACK=error`
turns it into an error that names the user's line.
"""

from __future__ import annotations

import functools
import os
import re
import time
import warnings

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpu_lab import errors, trace
from tpu_lab.backend import dispatch, executor, host, overlap, recorder, signature, state, storage, where

HALVES = frozenset({torch.float16, torch.bfloat16})
LACKS_HALF = re.compile("not implemented for '(Half|BFloat16)'")  # what the dispatch macros of C++ kernels say
policy = os.environ.get("TPU_LAB_FALLBACK", "warn")  # "warn" | "error"
_warned: set[str] = set()
untraced: set[tuple] = set()  # calls whose decomposition cannot be traced, as `said` tells them apart


class FallbackWarning(UserWarning):
    """An op ran on the CPU because device "tpu" has no lowering for it."""


def unsupported(name: str, site: where.Site) -> str:
    """The sentence for an op with no kernel: the user's call, the line, the way out."""
    at = f" at {site.file}:{site.line}: {site.code}" if site.file else ""
    return (
        f"{name.replace('aten.', 'aten::')} has no TPU lowering{at}\n"
        "Ways out: move the inputs to the CPU for this call (x.cpu()), write it with other ops, or add a lowering "
        "(one function with @op, see CONTRIBUTING.md)"
    )


def called(record) -> str:
    """The op as the user called it: a structured op without a kernel arrives as its `.out` overload."""
    twin = record.functional or record.overload
    return f"{twin._schema.name}.{twin._overloadname}".removesuffix(".default").removesuffix(".")


def said(record, args, kwargs) -> tuple:
    """The signature of a call of an op without a lowering: its tensors' windows and all its numbers."""
    key: list = [record, *kwargs]
    given = [*args, *kwargs.values()]
    try:
        dispatch.collect(given, (0,) * len(given), key, [], [], [])
    except storage.NotOnDevice:  # a number that lies on the host: rare enough to try each time
        key.append(object())
    return tuple(key)


def remember(record, args, kwargs) -> None:
    """This call cannot be traced: its like run on the CPU from now on."""
    if len(untraced) >= dispatch.LIMIT:
        untraced.clear()
    untraced.add(said(record, args, kwargs))


def run(record, args, kwargs, reason: str):
    """Run one overload on the CPU and bring everything it wrote or made back.

    reason: "unsupported" (warns once an op, or raises by policy) or "data-dependent".
    """
    with state.lock:
        site = where.site(2)
        if state.thread.tracing is not None:
            raise NotImplementedError(unsupported(called(record), site))
        if reason == "unsupported":
            if policy == "error":
                raise NotImplementedError(unsupported(called(record), site))
            if record.name not in _warned:
                _warned.add(record.name)
                warnings.warn(
                    f"{called(record)} has no TPU lowering: it runs on the CPU ({site.file}:{site.line}: {site.code}). "
                    "Each call copies its inputs and results",
                    FallbackWarning,
                    stacklevel=3,
                )
        start, waited = time.perf_counter_ns(), host.waits()
        with executor.waiting(reason), _disable_current_modes(), torch.no_grad():
            moved: dict[int, torch.Tensor] = {}
            wide = False  # halves as float32

            def to_cpu(value):
                if isinstance(value, torch.Tensor):
                    if value.device.type != "tpu":
                        return value
                    if id(value) not in moved:  # a clone: a numpy array's memory cannot be resized, `out=` may have to be
                        dtype = torch.float32 if wide and value.dtype in HALVES else value.dtype
                        moved[id(value)] = host.to_cpu(value).to(dtype, copy=True)
                    return moved[id(value)]
                if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
                    return [to_cpu(v) for v in value]
                if isinstance(value, torch.device) and value.type == "tpu":
                    return torch.device("cpu")
                return value

            try:
                result = record.overload(*map(to_cpu, args), **{k: to_cpu(v) for k, v in kwargs.items()})
            except RuntimeError as error:
                narrow = None if record.schema.name.startswith("aten::") else _halves(args, kwargs, error)
                if narrow is None:
                    raise
                wide = True
                moved.clear()
                result = record.overload(*map(to_cpu, args), **{k: to_cpu(v) for k, v in kwargs.items()})
            given = dict(zip(record.names, args, strict=False)) | kwargs
            _refuse_overlap(record, args, kwargs, given)
            for name in record.written:
                for tensor in signature.tensors_in(given.get(name), []):
                    back = moved[id(tensor)]
                    if back.shape != tensor.shape:
                        torch.ops.aten.resize_(tensor, back.shape)
                    host.write(tensor, back.to(tensor.dtype))
            back_to = {id(c): t for t in signature.tensors_in([*args, *kwargs.values()], []) if (c := moved.get(id(t))) is not None}

            def to_tpu(value):
                if isinstance(value, torch.Tensor):
                    if id(value) in back_to:
                        return back_to[id(value)]
                    return host.to_tpu(value.to(narrow) if wide and value.dtype is torch.float32 else value)
                return type(value)(to_tpu(v) for v in value) if isinstance(value, (list, tuple)) else value

            out = to_tpu(result)
        if trace.active is not None:
            host.waits_of(record.name, waited)
            tensors = signature.tensors_in([*args, *kwargs.values()], [])
            outs = signature.tensors_in(out, [])
            recorder.write(
                record.name, tuple(map(_aval, tensors)), tuple(map(_aval, outs)), (), "host", start,
                fallback=reason == "unsupported",
            )  # fmt: skip
        return out


def _halves(args, kwargs, error) -> torch.dtype | None:
    """Has the CPU kernel of another library no halves, or a mixture of them under autocast? Then the dtype that a float32
    result of float32 operands is rounded to, else None.

    PyTorch's CPU kernels say which dtypes an ATen op has. A library writes its own for float32 and float64, halves being for
    its GPU's.
    """
    found = {t.dtype for t in signature.tensors_in([*args, *kwargs.values()], []) if t.is_floating_point()}
    if not found & HALVES or not (LACKS_HALF.search(errors.text(error)) or torch.is_autocast_enabled("tpu")):
        return None
    return functools.reduce(torch.promote_types, found)


def _refuse_overlap(record, args, kwargs, given) -> None:
    """The CPU saw copies: two tensors on one storage were apart there."""
    written = {id(t) for name in record.written for t in signature.tensors_in(given.get(name), [])}
    tensors = [t for t in signature.tensors_in([*args, *kwargs.values()], []) if t.device.type == "tpu"]
    cells = [storage.cell(t) for t in tensors]
    if written and len(set(map(id, cells))) < len(cells):
        windows = [storage.window_of(t, c.base) for t, c in zip(tensors, cells, strict=True)]
        first = [next(i for i, c in enumerate(cells) if c is mine) for mine in cells]
        overlap.check(record, windows, [i for i, t in enumerate(tensors) if id(t) in written], first)


def _aval(tensor) -> str:
    from tpu_lab.backend import dtypes

    return dtypes.aval(tensor.shape, tensor.dtype)

