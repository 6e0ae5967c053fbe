"""The door: every ATen call on "tpu" comes in here. Call -> signature -> node or launch -> tensors.

`kernel(overload)` makes the function that torch calls. It collects the arguments into a key (op, window of each tensor,
static arguments), finds the interned signature, hands the cells to the executor and wraps what comes back.
"""

from __future__ import annotations

from time import perf_counter_ns as _now

import torch

from tpu_lab import trace
from tpu_lab.backend import (
    decomp,
    executor,
    flops,
    interrupts,
    native,
    owners,
    precision,
    registry,
    rng,
    signature,
    state,
    storage,
)
from tpu_lab.backend.recorder import RETURNED, begin
from tpu_lab.backend.storage import Cell
from tpu_lab.backend.window import window

Tensor, Parameter = torch.Tensor, torch.nn.Parameter
OF_SHAPES = (TypeError, ValueError, ZeroDivisionError, AssertionError)  # what jax says of shapes that no meta kernel refused
LIMIT = 20_000  # signatures kept
_FLOAT, _INT = "a runtime float", "a runtime int"  # what stands in the key for a value that is not part of it
_float32, _WRAP = torch.float32, 1 << 63


class Record:
    """What is known of an overload before it is called."""

    def __init__(self, overload):
        self.overload, self.schema = overload, overload._schema
        self.name = f"{overload._schema.name.replace('::', '.')}.{overload._overloadname}"
        self.base = overload._schema.name.removeprefix("aten::")
        self.functional = registry.functional(overload)
        direct = registry.find(overload)
        twin = registry.find(self.functional) if self.functional is not None else None
        self.lowering = direct or twin
        self.names = {a.name: i for i, a in enumerate(self.schema.arguments)}
        self.written = registry.writes(overload)
        self.direct_write = bool(self.written) and direct is not None
        if self.direct_write:
            self.functional = None
        if self.lowering is not None:
            self.written += self.lowering.mutates
        self.outs = {a.name for a in self.schema.arguments if a.is_out}
        self.dropped = registry.NEVER_PASSED | self.outs
        self.kinds = [self._kind(a) for a in self.schema.arguments]
        self.kwkinds = {a.name: k for a, k in zip(self.schema.arguments, self.kinds, strict=True)}
        self.meta = True  # False where PyTorch's meta kernel could not tell the shapes of the call that was built last
        names = getattr(self.lowering.fn, "__globals__", ()) if self.lowering is not None else ()
        self.multiplies = self.lowering is None or "precision" in names or "matmul" in names  # float32 products, maybe
        self.kind = self.lowering.kind if self.lowering is not None else "elementwise"
        self.rng = self.lowering is not None and self.lowering.rng
        self.multi = len(self.written) > 1 or any("[]" in str(a.type) for a in self.schema.arguments if a.alias_info)
        self.multi = self.multi or (bool(self.written) and "List[Tensor]" in str(self.schema.arguments[0].type))
        twin = self.functional or overload
        self.flop_formula = flops.formula(twin.overloadpacket)
        self.decompose = None if self.lowering is not None else decomp.find(self.functional)
        self.device_kw = any(a.name == "device" for a in self.schema.arguments)

    def _kind(self, argument) -> int:
        """0: static. 1: floats are runtime inputs. 2: floats and ints are."""
        if self.lowering is None:
            return 0
        text = str(argument.type)
        if argument.name in self.lowering.static:
            return 0
        if argument.name in self.lowering.runtime:
            return 1
        if "Tensor" in text:
            return 2 if self.lowering.runtime_ints else 1
        return 1 if "number" in text or "Scalar" in text else 0


_signatures: dict[tuple, signature.Signature] = {}
_twins: dict[tuple, signature.Signature] = {}  # see _share
_records: dict = {}


def record_of(overload) -> Record:
    """The interned record of an overload."""
    found = _records.get(overload)
    if found is None:
        found = _records[overload] = Record(overload)
    return found


def collect(args, kinds, key: list, cells: list, floats: list, ints: list) -> None:
    """Sort arguments into the key and the runtime inputs."""
    for a, kind in zip(args, kinds, strict=False):
        c = a.__class__
        if c is Tensor or c is Parameter or isinstance(a, Tensor):
            try:
                cell = a.untyped_storage()._tpu
            except AttributeError:
                cell = storage.cell(a)
            cells.append(cell)
            key.append((cell.base, a.shape, a.stride(), a.storage_offset(), a.dtype))
        elif c is float:
            if kind:
                floats.append(a)
                key.append(_FLOAT)
            else:
                key.append((c, a) if a == a else "nan")
        elif kind == 2 and c is int:
            if not -_WRAP <= a < _WRAP:
                raise OverflowError(f"{a} does not fit int64")  # the door knows what to do
            ints.append(a)
            key.append(_INT)
        elif c is bool:  # True == 1 == 1.0 in a key: say which
            key.append((c, a))
        elif c is list or c is tuple:
            key.append(len(a))
            collect(a, (kind,) * len(a), key, cells, floats, ints)
        elif c is complex:
            key.append((c, repr(a)))
        else:
            key.append(a)


def call(record: Record, args, kwargs):
    """Run one ATen call. Tensors must be on "tpu" (see `prepare`)."""
    with state.lock:
        start = _now() if trace.active is not None else 0
        key: list = [record]
        cells: list[Cell] = []
        floats: list[float] = []
        ints: list[int] = []
        collect(args, record.kinds, key, cells, floats, ints)
        if kwargs:
            for name, value in kwargs.items():
                if name != "generator":
                    key.append(name)
                    collect((value,), (record.kwkinds[name],), key, cells, floats, ints)
        if record.multiplies and precision.chosen is not None:
            key.append(precision.chosen)
        if torch.get_default_dtype() is not _float32:
            key.append(torch.get_default_dtype())
        if state.compiler_options:
            key.append(state.compiler_options)
        if record.multi:
            alias = aliases(cells)
            key.append(alias)
        elif record.written and len(cells) > 1 and len(set(cells)) < len(cells):  # it reads what it writes
            alias = aliases(cells)
            key.append(alias)
        else:
            alias = None
        key = tuple(key)
        sig = _signatures.get(key)
        if sig is None:
            sig = _build(record, args, kwargs, cells, key, alias, len(floats), len(ints))
        if sig.plain and state.thread.tracing is None:  # the common case, without the general one's cost
            f = sig.plain
            note = begin(sig, start) if start else None
            try:
                value = executor.run(sig, cells, tuple(floats), tuple(ints), note)[0]
            except OF_SHAPES as found:
                raise native.error(record, args, kwargs) or found from None
            out = storage.make(value, f.base, f.size, f.stride, f.dtype)
            if note is not None:
                note[RETURNED] = _now()
            return out
        if sig.resize:
            return _resized(record, sig, args, kwargs)
        if sig.rng:
            if state.thread.tracing is not None:
                ints.extend(state.thread.tracing.next())
            else:
                ints.extend(rng.from_generator(kwargs.get("generator")))
        note = None
        if state.thread.tracing is not None:
            values = [executor.traced(c) for c in cells]
            out = sig.fn(values, floats, ints)
            if sig.bounds is not None:
                state.thread.tracing.check(sig, values)
        else:
            note = begin(sig, start) if start else None
            try:
                out = executor.run(sig, cells, tuple(floats), tuple(ints), note)
            except OF_SHAPES as found:
                raise native.error(record, args, kwargs) or found from None
        return deliver(sig, args, kwargs, cells, out, note)


def deliver(sig, args, kwargs, cells, out, note=None):
    """Put new values into written cells, wrap fresh ones, give what the schema returns."""
    n = len(sig.fresh)
    for i, value in zip(sig.writes, out[n:], strict=True):
        cells[i].value = value
        if note is not None:
            owners.wrote(cells[i])
    tensors = [
        storage.make(v, f.base, f.size, f.stride, f.dtype) for v, f in zip(out[:n], sig.fresh, strict=True)
    ]  # fmt: skip
    result = [_one(r, tensors, sig, args, kwargs) for r in sig.result]
    if note is not None:
        note[RETURNED] = _now()
    if not result:
        return None
    return result[0] if len(result) == 1 else tuple(result)


def _one(spec, tensors, sig, args, kwargs):
    if spec[0] == "fresh":
        return tensors[spec[1]]
    if spec[0] == "arg":
        position = sig.record.names.get(spec[1])
        return args[position] if position is not None and position < len(args) else kwargs[spec[1]]
    if spec[0] == "list":
        return [tensors[i] for _, i in spec[1]]
    return None


def aliases(cells) -> tuple[int, ...]:
    """For each tensor, the first one on the same storage."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(c), i) for i, c in enumerate(cells)])


def _share(sig, key) -> None:
    """Strides of dimensions of size 1 say nothing about memory: signatures that differ in them alone are one program.

    `ids[:, -16:]` of a growing text has shape (1, 16) and strides (24, 1), (25, 1), ...: without this each is a miss.
    """
    if sig.resize:
        return
    same = tuple(
        [_normal(k) if k.__class__ is tuple and len(k) == 5 and isinstance(k[4], torch.dtype) else k for k in key]
    )
    twin = _twins.setdefault((same, tuple([(f.base, f.order) for f in sig.fresh])), sig)
    sig.id, sig.jit = twin.id, twin.jit


def _normal(geometry):
    """A tensor's part of the key without the strides of its dimensions of size 1."""
    where, size, stride, offset, dtype = geometry
    return where, size, tuple([s if n != 1 else 0 for n, s in zip(size, stride, strict=True)]), offset, dtype


def _build(record, args, kwargs, cells, key, alias, n_floats, n_ints):
    tensors = signature.tensors_in([*args, *kwargs.values()], [])
    windows = [
        window(c.base, t.shape, t.stride(), t.storage_offset(), t.dtype) for c, t in zip(cells, tensors, strict=True)
    ]
    if record.lowering is not None and any(not w.numel for w in windows):
        wrong = native.about_nothing(record, args, kwargs)
        if wrong is not None:
            raise wrong
    try:
        with interrupts.hold():
            sig = signature.build(record, args, kwargs, windows, alias or tuple(range(len(cells))), state.compiler_options)
            if not sig.resize and state.thread.tracing is None:
                signature.check_traceable(sig, n_floats, n_ints)
    except torch.OutOfMemoryError:
        raise
    except Exception as found:
        raise native.error(record, args, kwargs) or found from None
    if sig.odd_out:  # meta kernels cast and resize what is written more than the CPU's do
        wrong = native.error(record, args, kwargs)
        if wrong is not None and native.ABOUT_OUT.search(str(wrong)):
            raise wrong
    elif record.base in native.ASKED:
        wrong = native.error(record, args, kwargs)
        if wrong is not None and not native.ABOUT_VALUES.search(str(wrong)):
            raise wrong
    elif _doubtful(record, tensors, args, kwargs):
        wrong = native.error(record, args, kwargs)
        if wrong is not None and (native.ABOUT_KIND.search(str(wrong)) or native.NO_KERNEL.search(str(wrong))):
            if not native.ABOUT_VALUES.search(str(wrong)):
                raise wrong
    if len(_signatures) >= LIMIT:
        for old in list(_signatures)[: LIMIT // 4]:
            del _signatures[old]
        _twins.clear()
    _share(sig, key)
    _signatures[key] = sig
    return sig


def _doubtful(record, tensors, args, kwargs) -> bool:
    """Might the CPU refuse what the meta kernel let through: operands of two dtypes, a dimension that is not there?"""
    if record.lowering is None or "backward" in record.base:  # nobody calls these by hand, and what our forward op saved
        return False  # may have another dtype than the CPU's: statistics of halves are float32
    if not record.lowering.promote and len({t.dtype for t in tensors}) > 1:
        return True
    if any(t.is_complex() or t.dtype is torch.bool for t in tensors) or any(map(_odd, [*args, *kwargs.values()])):
        return True
    index = record.names.get("index")
    if index is not None and index < len(args) and isinstance(args[index], torch.Tensor) and args[index].is_floating_point():
        return True
    at = record.names.get("dim")
    dim = kwargs.get("dim") if at is None or at >= len(args) else args[at]
    return type(dim) is int and bool(tensors) and not -max(tensors[0].dim(), 1) <= dim < max(tensors[0].dim(), 1)


def _odd(number) -> bool:
    """A complex number, or a constant integer that int8 cannot hold: not every kernel takes it."""
    return type(number) is complex or (type(number) is int and not -129 < number < 128)


def _resized(record, sig, args, kwargs):
    """`out=` of another shape: resize it as PyTorch does, then run."""
    tensors = signature.tensors_in([*args, *kwargs.values()], [])
    for i, shape, stride in sig.resize:
        torch.ops.aten.resize_(tensors[i], shape)
        storage.set_metadata(tensors[i], tensors[i].untyped_storage(), tensors[i].storage_offset(), shape, stride)
    return call(record, args, kwargs)


def renew(packet) -> None:
    """Work out anew what is known of an op and forget its programs: it has another lowering. In place, as torch's kernels hold
    the records."""
    with state.lock:
        known = [r for overload, r in _records.items() if overload.overloadpacket is packet]
        if known:
            clear()
        for record in known:
            record.__init__(record.overload)


def clear() -> None:
    """Forget all signatures."""
    _signatures.clear()
    _twins.clear()
    executor.forget()
