"""Which ATen ops does a model need, how does TPU Lab do each, and has the real TorchTPU it? `coverage(model, *inputs)`.

The lists of TorchTPU's ops in data/ are facts about torch_tpu 0.2.0: what it registers, and what the CPU has and it
lacks, where its own answer is "operator 'aten::x' is not implemented for TPU". What is in neither is PyTorch's own,
built from other ops.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.resources

import torch

from tpu_lab import coverage_facts
from tpu_lab import trace as _trace
from tpu_lab.viz import coverage as view

PHASES = ("forward", "backward", "optimizer")


def coverage(model, *inputs, backward: bool = True, optimizer=None, **kwargs):
    """The ATen ops that model(*inputs) needs on "tpu": how TPU Lab does each, and whether TorchTPU has it.

    model: an nn.Module or a function; it and the inputs are copied to the device first. backward: also of the gradient
    of its output. optimizer: a class such as torch.optim.AdamW; one step of it, too. No op is run as long as none of
    its values is read: a big model takes about a second. Returns a view; its rows name module and line of each op.
    """
    from tpu_lab.backend import state, watch

    run = functools.partial(_recorded, model, inputs, kwargs, backward, optimizer)
    with state.alone("coverage"):
        try:
            with watch.dry():
                trace = run()
        except watch.ValueNeeded:  # control flow on data: it must have the data
            with state.mode_scope("fused"):
                trace = run()
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "a function")
    return view.draw(view.Covered(name, tuple(_needs(trace)), backward, getattr(optimizer, "__name__", "")))


def table(names=()):
    """The same for ops by name ("mm", "aten.mm", "aten.mm.out"); without names for all of TorchTPU's two lists.

    KeyError for an op that PyTorch does not have.
    """
    if not names:
        return view.draw_lists([_need(o) for o in registered()], [_need(o) for o in missing()])
    found = [_need(full) for name in names for full in _overloads(name)]
    return view.draw(view.Covered("", tuple(found), False, ""))


def page() -> str:
    """The table of TorchTPU's two lists as Markdown."""
    return view.markdown(table(), [_need(o) for o in (*registered(), *missing())])


def of_factory(text: str, backward: bool = True):
    """`coverage` of what "module:factory" gives: a model whose forward needs nothing, or (model, input, ...).

    ValueError when the text or what the factory gives is of another kind; errors of the import go through.
    """
    module, _, factory = text.partition(":")
    if not module or not factory:
        raise ValueError(
            f"--model {text}: write module:factory, such as mymodel:build; build() gives (model, input, ...)"
        )
    made = getattr(importlib.import_module(module), factory)
    if not isinstance(made, torch.nn.Module):
        made = made()
    made = made if isinstance(made, (tuple, list)) else (made,)
    if not made or not callable(made[0]):
        raise ValueError(f"--model {text}: it gave {type(made[0]).__name__}, not a model or (model, input, ...)")
    return coverage(*made, backward=backward)


# --- what TorchTPU has -------------------------------------------------------------------------------------------------


@functools.cache
def registered() -> tuple[str, ...]:
    """The `aten` overloads that TorchTPU registers, as "aten.add.out"."""
    return tuple(sorted(_dotted(line) for line in _lines("torch_tpu_ops.txt") if line.startswith("aten::")))


@functools.cache
def missing() -> tuple[str, ...]:
    """The `aten` overloads that the CPU has and TorchTPU lacks."""
    return tuple(sorted(_dotted(line.split("\t")[0]) for line in _lines("torch_tpu_missing_ops.txt")))


def _lines(file: str) -> list[str]:
    text = (importlib.resources.files("tpu_lab") / "data" / file).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def _dotted(name: str) -> str:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return f"aten.{base}.{overload or 'default'}"


@functools.cache
def _families() -> frozenset:
    """The functional overloads that some registered overload computes: `mm.out` serves `mm`."""
    from tpu_lab.backend import registry

    found = (_overload(name) for name in registered())
    return frozenset(registry.functional(o) for o in found if o is not None) - {None}


def torch_tpu(name: str) -> str:
    """How TorchTPU has it: "registered" (this form or its out= form), "missing", or "PyTorch's": built from other ops."""
    from tpu_lab.backend import registry

    if name in missing():
        return "missing"
    overload = _overload(name)
    same = overload is not None and registry.functional(overload) in _families()
    return "registered" if same or name in registered() else "PyTorch\u2019s"


# --- what TPU Lab does -------------------------------------------------------------------------------------------------


def how(name: str) -> str:
    """ "lowered", "view", "built in" (memory and copies), "decomposed", "composite" (above the device), "CPU", "outside", "unknown"."""
    from tpu_lab.backend import dispatch, host_bound, kernels

    overload = _overload(name)
    if overload is None:
        return "unknown"
    short = name.removeprefix("aten.").removesuffix(".default")
    if short.split(".")[0] in coverage_facts.OUTSIDE:
        return "outside"
    if short in kernels.VIEWS:
        return "view"
    if short in host_bound.REASONS:
        return "CPU"
    if short.split(".")[0] in _MEMORY or short in host_bound.QUESTIONS:
        return "built in"
    if short in host_bound.READ_FIRST:
        return "lowered"
    record = dispatch.Record(overload)  # by the table, whatever happened in this process
    if record.lowering is not None:
        return "lowered"
    if record.decompose is not None:
        return "decomposed"
    if kernels.composite_implicit(overload):
        return "composite"
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeExplicitAutograd"):
        return "composite"
    return "CPU"


_MEMORY = frozenset(
    "empty empty_strided copy_ _copy_from _copy_from_and_resize _to_copy _local_scalar_dense equal resize_ set_".split()
)


def _overload(name: str):
    base, _, which = name.removeprefix("aten.").partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, which, None) if packet is not None and which in packet.overloads() else None


def _overloads(name: str) -> list[str]:
    """The full names that a user's "mm", "aten::mm" or "aten.mm.out" stands for."""
    name = name.replace("::", ".").removeprefix("torch.ops.").removeprefix("aten.")
    base, _, which = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or (which and which not in packet.overloads()):
        raise KeyError(f"PyTorch has no op aten.{name}")
    if which:
        return [f"aten.{base}.{which}"]
    from tpu_lab.backend import registry

    return [f"aten.{base}.{o}" for o in packet.overloads() if registry.of_tensors(getattr(packet, o))]


def _need(name: str, calls=0, phases=(), modules=(), site=("", 0, ""), fallback=False) -> view.Need:
    done = "CPU" if fallback else how(name)
    return view.Need(
        name, done, torch_tpu(name), calls, tuple(phases), tuple(modules), site[0], site[1], site[2],
        why=coverage_facts.why(name), gradient=coverage_facts.gradient(name, done),
        dtypes=coverage_facts.dtypes(name), test=coverage_facts.test(name),
    )  # fmt: skip


# --- what the model needs ----------------------------------------------------------------------------------------------


def _recorded(model, inputs, kwargs, backward, optimizer) -> _trace.Trace:
    """One forward, backward and optimizer step of a copy on the device."""
    from tpu_lab.backend import where

    def move(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to("tpu").requires_grad_(value.requires_grad)

    tree = torch.utils._pytree
    if isinstance(model, torch.nn.Module):
        model = copy.deepcopy(model).to("tpu")
    inputs, kwargs = tree.tree_map(move, (inputs, kwargs))
    trace = _trace.start(limit=10**6)
    try:
        with where.watch_modules():
            with torch.set_grad_enabled(backward):
                out = model(*inputs, **kwargs)
            leaves = [v for v in tree.tree_leaves(out) if isinstance(v, torch.Tensor) and v.requires_grad]
            scalars = [v for v in leaves if v.dim() == 0]
            if backward and leaves:
                if scalars:
                    scalars[0].backward()
                else:
                    torch.autograd.backward(leaves, [torch.ones(v.shape, dtype=v.dtype).to("tpu") for v in leaves])
            if optimizer is not None and isinstance(model, torch.nn.Module):
                optimizer([p for p in model.parameters() if p.requires_grad]).step()
    finally:
        _trace.stop()
    return trace


def _called(record) -> str:
    """The op as the user called it: without a kernel of its own it arrives on the CPU as its `.out` form."""
    from tpu_lab.backend import registry

    overload = _overload(record.name) if record.fallback else None
    twin = registry.functional(overload) if overload is not None else None
    return record.name if twin is None else f"aten.{twin.overloadpacket.__name__}.{twin._overloadname}"


def _needs(trace: _trace.Trace):
    """One Need an op name, in the order of first use."""
    by_name: dict[str, list] = {}
    for record in trace.ops:
        by_name.setdefault(_called(record), []).append(record)
    for name, records in by_name.items():
        first = next((r for r in records if r.file), records[0])
        used = {r.phase for r in records}
        yield _need(
            name, len(records), [p for p in PHASES if p in used], dict.fromkeys(r.module for r in records if r.module),
            (first.file, first.line, first.code), any(r.fallback for r in records),
        )  # fmt: skip
