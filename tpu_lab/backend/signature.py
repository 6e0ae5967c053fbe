"""A signature: one ATen call up to its values. Built once, interned by dispatch.py, run by every mode.

It holds the pure function from base arrays to base arrays: read the windows, call the lowering, put results into
memory order or write them back through a window. PyTorch's meta kernel is the truth for shapes, dtypes and strides,
and it raises PyTorch's own errors (meta.py).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Callable

import jax
import jax.numpy as jnp
import torch

from tpu_lab.backend import (
    bounds,
    dtypes,
    flops,
    lowering,
    meta,
    overlap,
    precision,
    registry,
    rng,
    room,
    storage,
    where,
)
from tpu_lab.backend.meta import tensors_in
from tpu_lab.backend.window import Base, Window, contiguous_strides, is_contiguous

HALVES = (torch.float16, torch.bfloat16)


class Slot:
    """A place in the argument template that is filled at run time: tensor `index`, float or int `index`."""

    __slots__ = ("index", "kind")

    def __init__(self, kind: str, index: int):
        self.kind, self.index = kind, index


@dataclass(frozen=True)
class Fresh:
    """One new output: its base, the permutation to memory order (None: the base spans gaps), and torch's view of it."""

    base: Base
    order: tuple[int, ...] | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def store(self, value):
        """value: size -> base.shape."""
        if self.order is None:
            empty = jnp.zeros(self.base.shape, self.base.jdtype)
            return Window(self.base, self.size, self.stride, 0, self.dtype, -1).write(empty, value)
        if any(i != d for i, d in enumerate(self.order)):
            value = value.transpose(self.order)
        return value.reshape(self.base.shape)


class Signature:
    """See the module's docstring. `fn(values, floats, ints) -> [fresh bases..., written bases...]`."""

    __slots__ = (
        "bounds", "call", "fn", "flops", "fresh", "id", "inputs", "jit", "name", "names", "nbytes", "odd_out", "options", "out_text", "plain", "precision", "program", "record",
        "resize", "result",
        "rng", "static", "windows", "writes",
    )  # fmt: skip

    def argument(self, index: int) -> str:
        """The schema's name of tensor argument `index`: "self", "mat2"."""
        return self.names[index]


_ids = itertools.count()


def build(record, args, kwargs, windows: list[Window], alias, options) -> Signature:
    """The signature of calling `record.overload(*args, **kwargs)`, whose tensors have these windows (in order).

    Raises what PyTorch raises for wrong shapes and dtypes.
    """
    sig = Signature()
    sig.program, sig.options = None, options
    sig.precision = precision.chosen if record.multiplies else None
    sig.id, sig.record, sig.name, sig.windows = next(_ids), record, record.name, tuple(windows)
    metas, kmetas, declared, computed = meta.call(record, args, kwargs)
    template, ktemplate = _template(record, args, kwargs)
    sig.rng = record.lowering is not None and record.lowering.rng
    given, wmetas = meta.by_name(record, args, kwargs), meta.by_name(record, metas, kmetas)
    sig.writes, sig.resize = meta.written(record, [*args, *kwargs.values()], given, wmetas, computed)
    overlap.check(record, windows, sig.writes, alias)
    fresh, sig.result = _results(record, given, declared)
    fresh = meta.kept_strides(record, args, kwargs, fresh)
    sig.fresh = [_fresh(m) for m in fresh]
    room.check_op(record.name, sig.fresh, where.site)
    want = None if computed is None else tuple((tuple(m.shape), m.dtype) for m in tensors_in(computed, []))
    sig.odd_out = bool(sig.resize) or any(windows[i].dtype != d for i, (_, d) in zip(sig.writes, want or ()))
    compute = None
    if record.lowering is not None:
        compute = lowering.promoted(record.lowering, metas, kmetas)
    run = _compute(record, sig, template, ktemplate, want, compute)
    sig.bounds = _bounds(record, sig, template, ktemplate)
    if declared is None and record.meta is False:
        _infer(sig, record, run)
    sig.fn = _function(sig, run, alias)
    sig.call, sig.jit = _callables(sig)
    plain = sig.result == [("fresh", 0)] and len(sig.fresh) == 1 and not (sig.writes or sig.resize or sig.rng)
    sig.plain = sig.fresh[0] if plain else None
    sig.names = _names(record, args, kwargs)
    sig.inputs = tuple(repr(w) for w in windows)
    sig.out_text = tuple(dtypes.aval(f.size, f.dtype) for f in sig.fresh) or tuple(repr(windows[i]) for i in sig.writes)
    sig.static = tuple(_static(record, args, kwargs))
    sig.nbytes = _nbytes(record, sig)
    out = computed if computed is not None else declared
    sig.flops = flops.count(record.flop_formula, metas, kmetas, tuple(out) if isinstance(out, list) else out)
    return sig


def _template(record, args, kwargs):
    """args and kwargs with a Slot for each tensor, runtime float and runtime int, numbered as dispatch.py collects them."""
    counts = {"tensor": 0, "float": 0, "int": 0}

    def slot(kind):
        counts[kind] += 1
        return Slot(kind, counts[kind] - 1)

    def visit(value, kind):
        if isinstance(value, torch.Tensor):
            return slot("tensor")
        if kind and type(value) is float:
            return slot("float")
        if kind == 2 and type(value) is int:
            return slot("int")
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return [visit(v, kind) for v in value]
        return value

    template = [visit(a, record.kinds[i]) for i, a in enumerate(args)]
    return template, {k: visit(v, record.kwkinds.get(k, 0)) for k, v in kwargs.items()}


def _fill(value, tensors, floats, ints):
    if type(value) is Slot:
        if value.kind == "tensor":
            return tensors[value.index]
        if value.kind == "float":
            return jnp.asarray(floats[value.index], jnp.float64)
        return jnp.asarray(ints[value.index], jnp.int64)
    if type(value) is list:
        return [_fill(v, tensors, floats, ints) for v in value]
    return value


def _results(record, given, declared):
    """Fresh output metas, and how to give the call's result: ("fresh", i) | ("arg", name) | ("none",) | ("list", [...])."""
    fresh: list[torch.Tensor] = []
    count = len(record.schema.returns)
    values = declared if isinstance(declared, (tuple, list)) and count != 1 else (declared,) * count
    result = []
    for ret, value in zip(record.schema.returns, values, strict=False):
        if ret.alias_info is not None and ret.alias_info.is_write:
            name = next(
                a.name
                for a in record.schema.arguments
                if a.alias_info is not None and a.alias_info.before_set == ret.alias_info.before_set
            )
            result.append(("arg", name))
        elif isinstance(value, (list, tuple)):
            items = []
            for v in value:
                items.append(("fresh", len(fresh)))
                fresh.append(v)
            result.append(("list", items))
        elif value is None:
            result.append(("none",))
        else:
            result.append(("fresh", len(fresh)))
            fresh.append(value)
    return fresh, result


def _fresh(like: torch.Tensor) -> Fresh:
    size, stride = tuple(like.shape), tuple(like.stride())
    where, order = storage.layout(size, stride, like.dtype)
    return Fresh(where, order, size, stride, like.dtype)


def _compute(record, sig, template, ktemplate, want, compute):
    """The pure function from base arrays to the lowering's results, before they are stored."""
    passed = [v for v, a in zip(template, record.schema.arguments, strict=False) if a.name not in record.dropped]
    kpassed = {k: v for k, v in ktemplate.items() if k not in record.dropped}

    mutates = record.lowering is not None and record.lowering.mutates
    nothing = bool(want) and not mutates and all(0 in shape for shape, _ in want)

    def run(values, floats, ints):
        if precision.chosen == sig.precision or not record.multiplies:
            return compute_it(values, floats, ints)
        with precision.scope(sig.precision):  # a graph is traced when it runs, maybe after the block that chose
            return compute_it(values, floats, ints)

    def compute_it(values, floats, ints):
        if nothing:  # no element to compute: a lowering need not know how to compute none
            return [jnp.zeros(shape, dtypes.to_jax(dtype)) for shape, dtype in want]
        tensors = [w.read(v) for w, v in zip(sig.windows, values, strict=True)]
        args = [_fill(v, tensors, floats, ints) for v in passed]
        kwargs = {name: _fill(v, tensors, floats, ints) for name, v in kpassed.items()}
        if record.lowering is None:
            return record.decompose(args, kwargs, want)
        if record.lowering.contiguous:
            kwargs["contiguous"] = tuple(is_contiguous(w.size, w.stride) for w in sig.windows)
        key = rng.of(ints) if sig.rng else None
        return lowering.call(record.lowering, args, kwargs, want, compute, key)

    return run


@dataclass(frozen=True)
class Bounds:
    """The indices of a call that must lie in range: what to say of each, and their check on base arrays."""

    texts: tuple[str, ...]
    worst: Callable  # (base arrays) -> int64 array, one element a text


def _bounds(record, sig, template, ktemplate) -> Bounds | None:
    """None for an op without indices."""
    if record.lowering is None or record.lowering.bounds is None:
        return None
    passed = [v for v, a in zip(template, record.schema.arguments, strict=False) if a.name not in record.dropped]
    kpassed = {k: v for k, v in ktemplate.items() if k not in record.dropped}

    def found(tensors):
        args = [_placed(v, tensors) for v in passed]
        return bounds.real(record.lowering.bounds(*args, **{k: _placed(v, tensors) for k, v in kpassed.items()}))

    seen = []
    jax.eval_shape(lambda *tensors: seen.extend(found(tensors)), *[jax.ShapeDtypeStruct(w.size, w.jdtype) for w in sig.windows])
    texts = tuple(b.text for b in seen)

    def worst(values):
        tensors = [w.read(v) for w, v in zip(sig.windows, values, strict=True)]
        return jnp.stack([bounds.worst(b) for b in found(tensors)])

    return Bounds(texts, worst) if texts else None


NUMBER = {"float": float, "int": int}


def _placed(value, tensors):
    """The template with its tensors in place; of runtime numbers only the type is known, and stands there."""
    if type(value) is Slot:
        return tensors[value.index] if value.kind == "tensor" else NUMBER[value.kind]
    return [_placed(v, tensors) for v in value] if type(value) is list else value


def _function(sig, run, alias):
    """run's results stored: fresh outputs in memory order, written tensors through their windows.

    alias[i] is the first tensor on the same storage as tensor i: several writes to one storage follow each other.
    """

    def fn(values, floats, ints):
        results = run(values, floats, ints)
        made, new = len(sig.fresh), len(sig.writes)
        if len(results) != made + new:  # one left out would shift all that follow in a fused graph
            raise RuntimeError(f"the lowering of {sig.name} gives {len(results)} arrays where PyTorch's op gives {made + new}")
        # (a lowering that also writes was not told the dtypes of what it makes)
        out = [f.store(lowering.cast(r, dtypes.to_jax(f.dtype))) for f, r in zip(sig.fresh, results[:made], strict=True)]
        current = {}
        for i, value in zip(sig.writes, results[made:], strict=True):
            w = sig.windows[i]
            value = jnp.broadcast_to(lowering.cast(value, w.jdtype), w.size)
            current[alias[i]] = w.write(current.get(alias[i], values[i]), value)
            out.append(current[alias[i]])
        return out

    return fn


def check_traceable(sig, n_floats: int, n_ints: int) -> None:
    """Trace the signature on shapes alone. Raises what its lowering raises, at the user's call and not at a later flush."""
    values = [jax.ShapeDtypeStruct(w.base.shape, w.base.jdtype) for w in sig.windows]
    floats = [jax.ShapeDtypeStruct((), jnp.float64)] * n_floats
    ints = [jax.ShapeDtypeStruct((), jnp.int64)] * (n_ints + 2 * sig.rng)
    own = sig.record.lowering
    if own is not None and "linalg" in own.fn.__module__ and any(w.dtype in HALVES for w in sig.windows):
        sig.jit.lower(values, floats, ints)  # XLA may have no factorisation for them, and says so when it makes the program
    else:
        jax.eval_shape(sig.jit, values, floats, ints)


def _infer(sig, record, run):
    """No meta kernel: take shapes and dtypes from jax, strides contiguous; an `out=` of another shape is resized."""
    values = [jax.ShapeDtypeStruct(w.base.shape, w.base.jdtype) for w in sig.windows]
    shapes = jax.eval_shape(lambda v: run(v, [0.0] * 64, [0] * 64), values)
    fresh, written = shapes[: len(shapes) - len(sig.writes)], shapes[len(shapes) - len(sig.writes) :]
    sig.resize = [
        (i, tuple(s.shape), contiguous_strides(s.shape))
        for i, s in zip(sig.writes, written, strict=True)
        if record.outs and tuple(s.shape) != sig.windows[i].size
    ]
    sig.fresh = [_fresh(torch.empty(s.shape, dtype=dtypes.to_torch(s.dtype), device="meta")) for s in fresh]
    items = iter([("fresh", i) for i in range(len(sig.fresh))])
    if [str(r.type) for r in record.schema.returns] == ["List[Tensor]"]:
        sig.result = [("list", list(items))]
    else:
        sig.result = [r if r[0] == "arg" else next(items, ("none",)) for r in sig.result]


def _callables(sig):
    """The plain form and the jitted one: fn's arrays, and after them the check of the indices if there are any (see bounds.py).

    `inline`: inside a bigger program its trace is reused, and no call stays.
    """
    fn, checked = sig.fn, sig.bounds

    def call(values, floats, ints):
        out = fn(values, floats, ints)
        return out if checked is None else [*out, checked.worst(values)]

    call.__name__ = sig.name.replace(".", "_")
    return call, jax.jit(call, inline=True, compiler_options=dict(sig.options) or None)


def _names(record, args, kwargs) -> list[str]:
    """For each tensor argument its name in the schema, with a position inside lists: "self", "tensors[3]"."""
    names = []
    given = dict(zip((a.name for a in record.schema.arguments), args, strict=False)) | kwargs
    for name, value in given.items():
        found = tensors_in(value, [])
        names.extend([name] if isinstance(value, torch.Tensor) else [f"{name}[{i}]" for i in range(len(found))])
    return names


def _static(record, args, kwargs):
    """`dim=1`, `keepdim=True`: the static arguments, for people. A number that is an input of the program has no value
    here, as calls with other values share the signature: `other=(float)`."""
    for a, value, kind in zip(record.schema.arguments, args, record.kinds, strict=False):
        if not tensors_in(value, []) and not isinstance(value, torch.device) and value is not None:
            yield f"{a.name}={_at_run_time(value, kind) or value}"
    for name, value in kwargs.items():
        if name not in registry.NEVER_PASSED and not tensors_in(value, []) and value is not None:
            yield f"{name}={_at_run_time(value, record.kwkinds.get(name, 0)) or value}"


def _at_run_time(value, kind: int) -> str:
    """The type of a number that is an input of the program (see dispatch.Record._kind), "" for a constant of it."""
    return f"({type(value).__name__})" if (kind and type(value) is float) or (kind == 2 and type(value) is int) else ""


def _nbytes(record, sig) -> int:
    """Logical bytes that a call reads and writes. What it writes in place it reads first, like the plain form of the op,
    unless it overwrites: `fill_`, `copy_`, `out=`."""
    sizes = [w.numel * w.dtype.itemsize for w in sig.windows]
    unread = sig.writes if registry.overwrites(record.overload) else ()
    outs = [i for i, name in enumerate(sig.names) if name.partition("[")[0] in record.outs]
    read = sum(sizes) - sum(sizes[i] for i in {*unread, *outs})
    return read + sum(sizes[i] for i in sig.writes) + sum(math.prod(f.size) * f.dtype.itemsize for f in sig.fresh)
