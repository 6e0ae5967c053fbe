"""An FX graph of AOTAutograd as ours: run it node by node on "tpu" tensors, and what the records say of each node."""

from __future__ import annotations

import functools
import linecache
import math
import operator
import re
from dataclasses import dataclass

import jax
import torch
from torch.fx import Node

from tpu_lab.backend import dispatch, dtypes, flops, registry, state, storage

_aten = torch.ops.aten
_SIZES = {
    _aten.sym_size.int: lambda t, d: int(t.shape[d]),
    _aten.sym_stride.int: lambda t, d: int(t.stride(d)),
    _aten.sym_numel.default: lambda t: int(t.numel()),
    _aten.sym_storage_offset.default: lambda t: int(t.storage_offset()),
}
_FRAME = re.compile(r'File "(.+)", line (\d+)')
higher_order: dict[str, object] = {}  # torch.cond and the like, by name: filled by control.py
VIEWS = frozenset(
    "t transpose permute view _unsafe_view expand squeeze unsqueeze slice select split unbind as_strided alias detach "
    "diagonal unfold split_with_sizes reshape".split()
)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is known of one node before it runs: the fields of an OpRecord that no launch changes."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    static: tuple[str, ...]
    kind: str
    module: str
    file: str
    line: int
    code: str
    seq: int  # autograd sequence number, the same for an op and its backward; -1 if unknown
    flops: int
    nbytes: int
    again: bool = False  # a forward op that the partitioner put into the backward graph, too, rather than keep its result


def execute(module: torch.fx.GraphModule, inputs: list) -> list:
    """Run the graph on tensors whose storages hold tracers (the caller is inside `state.tracing`); its outputs."""
    values: dict[Node, object] = {}
    fill = functools.partial(torch.fx.node.map_arg, fn=values.__getitem__)
    given = iter(inputs)
    index = 0
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = functools.reduce(getattr, node.target.split("."), module)
        elif node.op == "output":
            outputs = fill(node.args[0])
            return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        else:
            args, kwargs = fill(node.args), fill(node.kwargs)
            if state.thread.tracing is not None:
                state.thread.tracing.node = index
            with jax.named_scope(f"{index}:{name_of(node.target)}") if is_op(node) else _NOTHING:
                values[node] = _call(node, args, kwargs)
            index += is_op(node)
    raise AssertionError("an FX graph without an output node")


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


_NOTHING = _Nothing()


def _call(node, args, kwargs):
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ in higher_order:
        return _as_traced(higher_order[target.__name__](*args, **kwargs), node.meta.get("val"))
    if target in _SIZES:
        return _SIZES[target](*args)
    if isinstance(kwargs.get("device"), torch.device):
        # what the user made on the CPU is computed in the program too, and copied to the CPU at the end
        kwargs = {**kwargs, "device": storage.DEVICE}
    if target is torch.ops.prims.device_put.default:
        return args[0]
    return target(*args, **kwargs)


def _as_traced(outputs, vals):
    """The outputs with the strides that AOTAutograd saw."""
    if not isinstance(vals, (tuple, list)):
        return outputs
    return tuple(restrided(o, v) if isinstance(v, torch.Tensor) else o for o, v in zip(outputs, vals, strict=True))


def restrided(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, copied into the strides of `like` where these differ (`like` may have symbolic sizes: then as it is)."""
    stride = like.stride()
    if tensor.stride() == stride or not all(type(n) is int for n in (*stride, *like.shape)):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def is_op(node: Node) -> bool:
    """Does the node compute (or view) tensors? Not: list access, sizes, Python arithmetic on them."""
    return (
        node.op == "call_function"
        and isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
        and node.target not in _SIZES
    )


def name_of(target) -> str:
    """aten.addmm.default: as in eager records."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name.replace('::', '.')}.{target._overloadname}"
    return getattr(target, "__name__", str(target))


def describe(module: torch.fx.GraphModule) -> list[OpInfo]:
    """One OpInfo for each computing node, in order (the index is that of the node's named_scope)."""
    return [_info(node) for node in module.graph.nodes if is_op(node)]


def makers(module: torch.fx.GraphModule) -> list[int | None]:
    """For each result of the graph the index of the op (as in `describe`) that made it; None for an argument."""
    index = {node: i for i, node in enumerate(n for n in module.graph.nodes if is_op(n))}
    results = next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0]
    out = []
    for node in results if isinstance(results, (list, tuple)) else [results]:
        while isinstance(node, Node) and node not in index:  # an element of a list of results
            node = node.args[0] if node.op == "call_function" and node.args else None
        out.append(index.get(node))
    return out


def viewed(node: Node) -> Node:
    """The node whose memory the value has: itself, or what it is a view of, an argument maybe."""
    while True:
        source = node.args[0] if node.target is operator.getitem else node
        if not isinstance(source.target, torch._ops.OpOverload) or _kind(source.target) != "view":
            return node
        node = source.args[0]


def _info(node: Node) -> OpInfo:
    operands = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    outputs = _tensors(node.meta.get("val"))
    unread = node.args[:1] if registry.overwrites(node.target) else ()  # the target of a copy_
    nbytes = sum(map(_nbytes, outputs)) + sum(_nbytes(n.meta["val"]) for n in operands if n not in unread)
    origin = _origin(node).meta
    stack = origin.get("nn_module_stack") or origin.get("fwd_nn_module_stack") or {}
    file, line = _frame(origin.get("stack_trace") or origin.get("fwd_stack_trace") or "")
    kind, static, flops = "elementwise", (), 0
    if isinstance(node.target, torch._ops.OpOverload):
        kind, static, flops = _kind(node.target), tuple(_static(node)), _flops(node)
    return OpInfo(
        name_of(node.target), tuple(_aval(n.meta["val"]) for n in operands), tuple(map(_aval, outputs)), static, kind,
        _module(stack), file, line, linecache.getline(file, line).strip() if file else "", origin.get("seq_nr", -1),
        flops, nbytes, node.meta.get("partitioner_tag") == "is_forward",
    )  # fmt: skip


def _origin(node: Node) -> Node:
    """The node whose forward op is this one's, too: itself, but for a sum of two gradients of one value.

    Autograd's engine adds them between its nodes, so AOTAutograd notes the sequence number of whatever ran last. The value
    was made by the forward op of the node that reads the sum; a weight or an input was made by none: then it is the
    later use, the last operand's.
    """
    while node.meta.get("is_gradient_acc"):
        readers = [user for user in node.users if is_op(user)]
        operands = [n for n in node.all_input_nodes if n.op != "placeholder"]
        if not (readers or operands):
            break
        node = readers[0] if readers else operands[-1]
    return node


def _kind(target) -> str:
    if target._schema.name.split("::")[1] in VIEWS:
        return "view"  # inside a program it is free, or part of what reads it
    return dispatch.record_of(target).kind


def _tensors(value) -> list:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _concrete(shape) -> tuple[int, ...]:
    """Sizes as ints; a symbolic one as the value it was traced with."""
    return tuple(n if isinstance(n, int) else n.node.hint if n.node.has_hint() else 0 for n in shape)


def _aval(tensor) -> str:
    return dtypes.aval(_concrete(tensor.shape), tensor.dtype)


def _nbytes(tensor) -> int:
    return math.prod(_concrete(tensor.shape)) * tensor.dtype.itemsize


def _static(node: Node):
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if not _has_node(value) and value is not None and not isinstance(value, torch.device):
            yield f"{argument.name}={value}"
    for key, value in node.kwargs.items():
        if not _has_node(value) and value is not None and key not in ("device", "layout", "pin_memory"):
            yield f"{key}={value}"


def _has_node(value) -> bool:
    return isinstance(value, Node) or (isinstance(value, (list, tuple)) and any(map(_has_node, value)))


def _flops(node: Node) -> int:
    """As for eager ops, see flops.py; 0 where there is no formula."""
    formula = dispatch.record_of(node.target).flop_formula
    if formula is None:
        return 0

    def meta(n):
        value = n.meta.get("val")
        if isinstance(value, torch.Tensor):
            return torch.empty(_concrete(value.shape), dtype=value.dtype, device="meta")
        return value

    try:
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), meta)
        value = node.meta["val"]
        out = meta(node) if isinstance(value, torch.Tensor) else tuple(
            torch.empty(_concrete(v.shape), dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v for v in value
        )  # fmt: skip
    except Exception:  # a node without known shapes
        return 0
    return flops.count(formula, args, kwargs, out)


def _module(stack) -> str:
    """The nn.Module path of the innermost module: "h.0.attn" from "L['self'].h[0].attn"."""
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]|^L__\w+?__(?=\w)", "", path)
    path = re.sub(r"(^|\.)_modules\b", "", path)
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    return path.replace("._orig_mod", "").strip(".")


def _frame(trace: str) -> tuple[str, int]:
    """The innermost frame of a stack trace that Dynamo noted."""
    found = _FRAME.findall(trace)
    return (found[-1][0], int(found[-1][1])) if found else ("", 0)


def written(module: torch.fx.GraphModule) -> tuple[int, ...]:
    """Positions of the placeholders that some node writes (AOTAutograd's `copy_` at the end)."""
    placeholders = {n: i for i, n in enumerate(n for n in module.graph.nodes if n.op == "placeholder")}
    found = set()
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            names = [a.name for a in node.target._schema.arguments]
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            for name in registry.writes(node.target):
                value = given.get(name)
                found |= {placeholders[n] for n in (value if isinstance(value, (list, tuple)) else [value]) if n in placeholders}
    return tuple(sorted(found))


def draws(module: torch.fx.GraphModule) -> int:
    """How many of its ops draw random numbers; those inside branches and loops are not counted."""
    return sum(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in module.graph.nodes)


def take_exchanges(module: torch.fx.GraphModule) -> tuple[int, ...]:
    """Make each `set_` of an argument (the user's `x.data = y`) one more result: its new tensor. The arguments' positions.

    A program computes values; whose memory is whose is for the caller to change. AOTAutograd puts these nodes at the end.
    """
    placeholders = {n: i for i, n in enumerate(n for n in module.graph.nodes if n.op == "placeholder")}
    found = [n for n in module.graph.nodes if n.target is _aten.set_.source_Tensor and n.args[0] in placeholders]
    if not found:
        return ()
    output = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    output.args = ((*output.args[0], *(node.args[1] for node in found)),)
    positions = tuple(placeholders[node.args[0]] for node in found)
    for node in found:
        module.graph.erase_node(node)
    module.recompile()
    return positions


def structure(module: torch.fx.GraphModule) -> str | None:
    """A text equal for graphs that compute the same, or None where it holds tensors or graphs of its own."""
    parts = []
    number: dict[Node, int] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            return None
        number[node] = len(number)
        if node.op == "placeholder":
            parts.append("in")
            continue
        args = torch.fx.node.map_arg((node.args, tuple(sorted(node.kwargs.items()))), lambda n: _Number(number[n]))
        target = name_of(node.target) if is_op(node) else _python_name(node.target)
        parts.append(f"{target}{args!r}")
    return "\n".join(parts)


def _python_name(target) -> str:
    return "getitem" if target is operator.getitem else str(target)


class _Number(int):
    def __repr__(self):
        return f"%{int(self)}"
