"""What tracing a compiled graph finds out (the recipe), and how a call uses it.

Inside jax.jit the graph's arguments are tensors with their true windows whose storages hold tracers, so views, writes
and aliases mean what they mean in eager mode. Afterwards each result is one of: a fresh array, an argument itself, a
view of an argument's storage, or a view of another result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpu_lab.backend import bits, control, executor, fxgraph, host, lowering, rng, state, storage  # noqa: F401  (control: cond)
from tpu_lab.backend.storage import Cell
from tpu_lab.backend.window import Window

Tensor = torch.Tensor


@dataclass(slots=True)
class Recipe:
    """What tracing found out; kept with the program (Program.extra)."""

    used: int = 0  # random numbers drawn
    written: tuple[int, ...] = ()  # array arguments that the graph writes
    results: list[tuple] = field(default_factory=list)  # see _results
    made: list = field(default_factory=list)  # for each array that comes out the position of its op in the graph, or None
    checks: list[tuple] = field(default_factory=list)  # (op's index in the graph, signature) for each op with indices


@dataclass(slots=True, eq=False)
class Plan:
    """Everything a call with one geometry needs."""

    local: tuple
    windows: list[Window | None]  # None: not a tensor
    first: tuple[int, ...]  # for each array argument of the program: the call's argument it is read from
    array_of: list[int]  # for each argument of the call: the program's array argument, -1 if it is no tensor
    donate: tuple[int, ...]  # array arguments whose memory the program may take
    programs: list = field(default_factory=lambda: [None, None])  # without donation, with it


def trace(module, on_cpu: list[bool], plan: Plan, recipe: Recipe, static: list, seed, arrays):
    """Inside jax.jit: the graph over tensors that hold tracers. Fills the recipe; gives the arrays to keep.

    static: the arguments that are no tensors, None for the others. on_cpu: which results belong on the CPU.
    """
    cells = [Cell(array, plan.windows[i].base) for i, array in zip(plan.first, arrays, strict=True)]
    draws = fxgraph.draws(module)
    keys = rng.keys(jnp.stack([jnp.broadcast_to(seed[0], draws), seed[1] + jnp.arange(draws)], 1)) if draws else ()
    context = state.Tracing(seed[0], seed[1], [*keys])
    below = torch._C._AutoDispatchBelowAutograd
    with _disable_current_modes(), state.tracing(context), torch.no_grad(), below():
        storages: dict[int, object] = {}
        inputs = []
        for a, w, n in zip(static, plan.windows, plan.array_of, strict=True):
            if w is None:
                inputs.append(a)
                continue
            if n not in storages:
                storages[n] = storage.new_storage(w.base.nbytes)
                storages[n]._tpu = cells[n]
            inputs.append(storage.carrier(storages[n], w))
        outputs = [bits.resolved(t) if bits.lazy(t) else t for t in fxgraph.execute(module, inputs)]
        written = {plan.array_of[i] for i in fxgraph.written(module)}  # their memory may be taken: all of them are given back,
        changed = [n for n, array in enumerate(arrays) if cells[n].value is not array or n in written]  # x.copy_(x), too
        out = [executor.traced(cells[n]) for n in changed]
        recipe.written, recipe.used = tuple(changed), context.used
        recipe.results = _results(outputs, on_cpu, inputs, cells, out)
        makers, recipe.made = fxgraph.makers(module), [None] * len(out)
        for position, result in enumerate(recipe.results):
            if result[0] in ("new", "cpu"):
                recipe.made[result[1]] = makers[position]
        recipe.checks = [(node, sig) for node, sig, _ in context.checks]
        worst = [w for _, _, w in context.checks]
        done = jnp.concatenate(worst) if worst else jnp.zeros((), jnp.uint8)
    return out, done  # the second is ready when the program is: nobody else holds it


def _results(outputs, on_cpu, inputs, cells, out) -> list[tuple]:
    """How to make each result. Appends to `out` the arrays it needs.

    ("new", array, base, size, stride, offset, dtype), ("arg", argument), ("same", result), ("const", value),
    ("cpu", array, dtype), ("view of arg", array argument, size, stride, offset, dtype), ("view of out", result, ...)
    """
    results: list[tuple] = []
    argument = {id(t): i for i, t in enumerate(inputs) if isinstance(t, Tensor)}
    source = {id(c): i for i, c in enumerate(cells)}
    seen: dict[int, int] = {}  # a cell of the trace -> the output that carries it
    for position, (t, to_cpu) in enumerate(zip(outputs, on_cpu, strict=True)):
        if not isinstance(t, Tensor):
            results.append(("const", t))
            continue
        if id(t) in argument:
            results.append(("arg", argument[id(t)]))
            continue
        cell = storage.cell(t)
        geometry = tuple(t.shape), tuple(t.stride()), t.storage_offset()
        if to_cpu:
            results.append(("cpu", len(out), t.dtype))
            out.append(storage.window_of(t, cell.base).read(executor.traced(cell)))
        elif id(cell) in source:
            results.append(("view of arg", source[id(cell)], *geometry, t.dtype))
        elif id(cell) in seen:
            other = seen[id(cell)]
            same = outputs[other] is t
            results.append(("same", other) if same else ("view of out", other, *geometry, t.dtype))
        else:
            seen[id(cell)] = position
            results.append(("new", len(out), cell.base, *geometry, t.dtype))
            out.append(lowering.cast(executor.traced(cell), cell.base.jdtype))
    return results


def write_back(plan: Plan, recipe: Recipe, args, cells, out) -> None:
    """New values of written arguments into their cells; to the CPU for an argument there (an optimizer's step count)."""
    for n, array in zip(recipe.written, out, strict=False):
        i = plan.first[n]
        if cells[i].__class__ is Cell:
            cells[i].value = array
        else:
            with torch.no_grad():
                args[i].copy_(host.from_numpy(np.asarray(array), args[i].dtype))


def results(plan: Plan, recipe: Recipe, args, out) -> list:
    """The results of one call from the program's arrays."""
    made: list = []
    for r in recipe.results:
        what = r[0]
        if what == "new":
            made.append(storage.make(out[r[1]], r[2], r[3], r[4], r[6], r[5]))
        elif what == "arg":
            made.append(args[r[1]])
        elif what == "same":
            made.append(made[r[1]])
        elif what == "const":
            made.append(r[1])
        elif what == "cpu":
            made.append(host.from_numpy(np.asarray(out[r[1]]), r[2]))
        else:
            owner = args[plan.first[r[1]]] if what == "view of arg" else made[r[1]]
            made.append(_view(owner, *r[2:]))
    return made


def _view(owner, size, stride, offset, dtype):
    """A view that shares the owner's version counter, so that autograd sees writes to what it saved."""
    with torch.no_grad():
        if owner.dtype == dtype:
            return torch.as_strided(owner, size, stride, offset)
    out = storage._create((), dtype)
    storage.set_metadata(out, owner.untyped_storage(), offset, size, stride)
    return out
