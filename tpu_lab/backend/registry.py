"""`@op(aten.x)`: one jax function per ATen op; in-place and `out=` forms follow from the schema.

A lowering is a plain function over jax arrays with the schema's argument names and defaults:

    @op(aten.addmm, kind="matmul")
    def addmm(bias, a, b, beta=1, alpha=1):
        return beta * bias + alpha * (a @ b)

What it gets: arrays for tensors (None where absent), lists of arrays for tensor lists, Python ints,
bools, strings, torch dtypes and `float`-typed arguments as they are (static, part of the cache key);
floats in `Scalar` or `Tensor` slots as 0-d float64 arrays (runtime inputs: a new learning rate is not
a new program). Only arguments that the caller gave are passed. `device`, `layout`, `pin_memory`,
`memory_format`, `non_blocking` and `generator` never are.
What it returns: one array, or a tuple/list in the schema's order. The result is cast to the dtype that
PyTorch's meta kernel gives, so a lowering need not care about its output dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

KINDS = ("matmul", "elementwise", "reduce", "movement", "random", "host")
NEVER_PASSED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})


@dataclass(frozen=True)
class Lowering:
    """How one functional ATen overload becomes jax.

    fn: the jax function.
    kind: the kind of work, for pictures (one of KINDS).
    promote: None | "result" | "float": cast array and scalar operands to their common dtype first
        (PyTorch's promotion, with 0-dim and Python-number rules); "float" also takes ints to the default dtype.
        Half dtypes are computed in float32 (opmath) and rounded by the output cast, as PyTorch does.
    rng: fn gets a keyword `key`, a jax PRNG key that differs at each call and repeats with the seed.
    out: fn gets a keyword `out`, a tuple of (shape, torch dtype) pairs, PyTorch's own answer for the outputs.
    contiguous: fn gets a keyword `contiguous`, for each tensor argument whether it is contiguous: the LU that `det`
        keeps for its derivative is of A or of its transpose, as PyTorch's formula expects from A's strides.
    runtime: names of `float`-typed arguments that are runtime inputs all the same (a learning rate).
    static: names of `Scalar` arguments that stay Python numbers, part of the program (the order of a norm).
    runtime_ints: Python ints in Tensor slots are runtime inputs, too (`x * step`).
    bounds: a function of the same arguments that gives a list of bounds.Bound: which indices must lie where. It sees
        shapes and dtypes only.
    mutates: names of arguments that are written though the schema does not say so (batch norm's running
        stats); fn returns their new values after its outputs.
    """

    fn: Callable
    kind: str = "elementwise"
    promote: str | None = None
    rng: bool = False
    out: bool = False
    contiguous: bool = False
    runtime: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    runtime_ints: bool = False
    mutates: tuple[str, ...] = ()
    bounds: Callable | None = None


_table: dict[torch._ops.OpOverload, Lowering] = {}
_explicit: set[torch._ops.OpOverload] = set()  # registered by overload: beats registration by packet
late: list[Callable] = []  # called with each overload that gets a lowering when the device is there: kernels.py serves it


def op(*targets, **options):
    """Register the decorated jax function as the lowering of each target (an `aten.x` packet or an `aten.x.overload`).

    A packet stands for all its overloads that write nothing, and, if it has no such overload
    (`_fused_adamw_`), for those that do: then fn returns the new values of the written arguments, in schema order.
    Ops of other libraries are lowered in the same way (`@op(torch.ops.torchvision.roi_align)`), at any time.
    """
    assert options.get("kind", "elementwise") in KINDS, options

    def register(fn):
        lowering = Lowering(fn, **options)
        for target in targets:
            if isinstance(target, torch._ops.OpOverload):
                _explicit.add(target)
                serve(target, lowering)
                continue
            overloads = [o for o in (getattr(target, name) for name in target.overloads()) if of_tensors(o)]
            for overload in [o for o in overloads if not writes(o)] or overloads:
                if overload not in _explicit:
                    serve(overload, lowering)
        return fn

    def serve(overload, lowering):
        _table[overload] = lowering
        for tell in late:
            tell(overload)

    return register


def of_tensors(overload) -> bool:
    """False for TorchScript's number forms, such as `exp.int`, which never reach a device."""
    return bool(writes(overload)) or any("Tensor" in str(r.type) for r in overload._schema.returns)


def writes(overload) -> tuple[str, ...]:
    """Names of the arguments that the schema says are written: `("self",)` for `add_`, `("out",)` for `add.out`."""
    return tuple(a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


_OVERWRITES = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ _foreach_copy_ "
    "_foreach_zero_".split()
)


def overwrites(overload) -> bool:
    """Does it write its first argument without reading what was there?"""
    return isinstance(overload, torch._ops.OpOverload) and overload._schema.name.rpartition("::")[2] in _OVERWRITES


def find(overload) -> Lowering | None:
    """The lowering registered for exactly this overload."""
    return _table.get(overload)


def table() -> dict:
    """All registered lowerings, by overload (a copy)."""
    return dict(_table)


def functional(overload):
    """The overload that computes the same and writes nothing: `add_.Tensor` and `add.out` -> `add.Tensor`; None if there is none."""
    written = writes(overload)
    if not written:
        return overload
    name = overload._schema.name.removeprefix("aten::")
    outs = {a.name for a in overload._schema.arguments if a.is_out}
    base = name if outs else name.removesuffix("_")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or (not outs and base == name):
        return None
    want = _arguments(overload, outs)
    for candidate in (getattr(packet, n) for n in packet.overloads()):
        if not writes(candidate) and _arguments(candidate, ()) == want:
            return candidate
    return None


def _arguments(overload, without) -> list[tuple[str, str]]:
    """(name, type) of each argument that can matter to the value."""
    return [
        (a.name, str(a.type)) for a in overload._schema.arguments if a.name not in without and a.name not in NEVER_PASSED
    ]
