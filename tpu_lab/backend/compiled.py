"""A compiled graph at work: FX graph -> one jax.jit program per geometry of its arguments, and a cheap call of it.

A *plan* belongs to one set of windows (base, size, stride, offset of each argument) and holds the program and the
recipe of the results: which are fresh arrays, which are arguments themselves or views of their storage, which
arguments the graph writes. AOTAutograd has made the graph functional up to `copy_` into its arguments at the end, so
a write is a new value in the argument's cell. Calls with equal windows only collect arrays, launch and wrap.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpu_lab import errors, trace
from tpu_lab.backend import (
    bits,
    bounds,
    causes,
    compiled_records,
    compiled_trace,
    executor,
    fallback,
    fxgraph,
    host,
    interrupts,
    kernels,
    owners,
    precision,
    rng,
    room,
    state,
    storage,
    where,
)
from tpu_lab.backend.cache import Program, cache, digest
from tpu_lab.backend.compiled_trace import Plan, Recipe
from tpu_lab.backend.storage import Cell
from tpu_lab.backend.window import contiguous_strides, window

Tensor = torch.Tensor
_graph_ids = itertools.count()
_geometry: dict[tuple, int] = {}  # what a plan is made for -> a small number that stands for it in the cache key
_no_random = None  # a resident array for programs that draw nothing


class CompiledGraph:
    """A boxed callable over a graph's arguments. phase: "forward" | "backward" | "inference"."""

    def __init__(self, module, phase: str, name: str = "", donatable=(), *, link):
        self.module, self.phase, self.name = module, phase, name
        self.exchanged = fxgraph.take_exchanges(module)
        self.text = fxgraph.structure(module)
        self.id = digest((self.text,)) if self.text is not None else f"graph{next(_graph_ids)}"
        self.placeholders = [link.input_name(n) for n in module.graph.nodes if n.op == "placeholder"]
        outputs = next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0]
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        self.on_cpu = [_device(n) == "cpu" for n in outputs]
        made = dict.fromkeys(fxgraph.viewed(n) for n in outputs if isinstance(n, torch.fx.Node))
        self.output_bases = list(filter(None, (_base(n) for n in made if n.op != "placeholder")))
        self.written = fxgraph.written(module)
        self.donatable = tuple(donatable)
        self.link = link  # compiled_records.Link: the forward call that a backward belongs to
        self.infos = self.places = None
        self.untraceable = False
        self.plans: dict[tuple, Plan] = {}
        self.last: Plan | None = None

    def boxed(self):
        """A plain function for AOTAutograd, which may empty the list of arguments."""

        def call(args: list) -> list:
            given = [args[i] for i in self.exchanged]
            lazy = [(i, a) for i, a in enumerate(args) if bits.lazy(a)]
            for i, a in lazy:  # a program knows memory, and no bit that says what it means
                args[i] = bits.resolved(a)
            written = [(a, args[i]) for i, a in lazy if i in self.written]
            results = self(args)
            for a, plain in written:
                a.copy_(plain)
            for n, tensor in enumerate(given, len(results) - len(given)):
                torch.ops.aten.set_.source_Tensor(tensor, results[n])
            return results[: len(results) - len(given)] if given else results

        call._boxed_call = True
        return call

    def __call__(self, args: list) -> list:
        """Run on real arguments; `args` is emptied, so that what nobody else holds may be reused."""
        with state.lock:
            if self.untraceable or executor.watched:
                return self._op_by_op(args)
            active = trace.active
            start = time.perf_counter_ns() if active is not None else 0
            if executor.graph.nodes:
                executor.flush("compiled")
            key, cells = self._geometry(args)
            plan = self.last
            if plan is None or plan.local != key:
                plan = self.last = self.plans.get(key) or self._plan(key, args, cells)
            arrays = [executor.resolve(cells[i]) if cells[i].__class__ is Cell else cells[i] for i in plan.first]
            try:
                program, made = self._program(plan, arrays, args)
            except Exception as error:
                if not kernels.untraceable(error):
                    raise
                self._give_up(error)
                return self._op_by_op(args)
            room.check_program(program, where.site)
            recipe = program.extra
            checks = self._checks(recipe) if recipe.checks else None
            seed = _next_seed(recipe.used)
            before = time.perf_counter_ns() if active is not None else 0
            if recipe.written:
                with interrupts.hold():
                    out, token = program.call(seed, *arrays)
                    compiled_trace.write_back(plan, recipe, args, cells, out)
            else:
                out, token = program.call(seed, *arrays)
            if active is not None:
                after, donated = time.perf_counter_ns(), len(plan.donate) if program is plan.programs[1] else 0
                counts = len(arrays), len(out), donated
                taken = [arrays[n] for n in plan.donate] if donated else ()
                compiled_records.write(self, active, program, made, start, before, after, counts, token, arrays, out, taken)
                for n in recipe.written:
                    owners.wrote(cells[plan.first[n]])
            if checks:
                bounds.watch(token, checks)
            if state.mode() is state.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING:
                jax.block_until_ready(token)
                bounds.look(wait=True)
            results = compiled_trace.results(plan, recipe, args, out)
            args.clear()
            return results

    def _give_up(self, error) -> None:
        """An op in the graph has no lowering, or its result's shape is data: say so, and run the graph as eager mode does."""
        self.untraceable = True
        warnings.warn(
            f"torch.compile: {'an' if self.phase == 'inference' else 'a'} {self.phase} graph of {len(self.describe())} ops runs op by op on 'tpu', because one of them "
            f"cannot be part of a program: {(errors.text(error).splitlines() or [type(error).__name__])[0]}",
            fallback.FallbackWarning,
            stacklevel=3,
        )

    def _op_by_op(self, args: list) -> list:
        with torch.no_grad():
            outputs = fxgraph.execute(self.module, args)
        args.clear()
        return [o.cpu() if to_cpu and isinstance(o, Tensor) else o for o, to_cpu in zip(outputs, self.on_cpu, strict=True)]

    def _checks(self, recipe) -> list:
        """What to say when an index in the graph is out of range, with the lines of the graph's ops."""
        infos = self.describe()
        lines = [(where.Site(infos[n].file, infos[n].line, infos[n].code), sig) for n, sig in recipe.checks]
        return [bounds.Check(text, sig.name, site, threading.get_ident()) for site, sig in lines for text in sig.bounds.texts]

    def _geometry(self, args):
        """(the key that a plan is found by, for each argument its Cell, numpy value, or None)."""
        key: list = []
        cells: list = []
        for a in args:
            if isinstance(a, Tensor):
                try:
                    cell = a.untyped_storage()._tpu
                except AttributeError:
                    if a.device.type == "tpu":
                        cell = storage.cell(a)
                    else:
                        key.append((a.shape, a.dtype))
                        cells.append(np.array(host.to_numpy(a), copy=True))
                        continue
                cells.append(cell)
                key.append((cell.base, a.shape, a.stride(), a.storage_offset(), a.dtype))
            else:
                cells.append(None)
                key.append((a.__class__, a))
        if len(set(map(id, cells))) != len(cells):
            key.append(_aliases(cells))
        key.append((precision.chosen, state.compiler_options, torch.get_default_dtype()))
        return tuple(key), cells

    # --- making a plan -------------------------------------------------------------------------------------------

    def _plan(self, key, args, cells) -> Plan:
        windows, first, number, array_of = [], [], {}, []
        for i, (a, cell) in enumerate(zip(args, cells, strict=True)):
            if cell is None:
                windows.append(None)
                array_of.append(-1)
                continue
            if cell.__class__ is Cell:
                windows.append(storage.window_of(a, cell.base))
            else:
                shape, stride = tuple(a.shape), contiguous_strides(a.shape)
                windows.append(window(storage.layout(shape, stride, a.dtype)[0], shape, stride, 0, a.dtype))
            if id(cell) not in number:
                number[id(cell)] = len(first)
                first.append(i)
            array_of.append(number[id(cell)])
        plan = self.plans[key] = Plan(key, windows, tuple(first), array_of, ())
        plan.donate = self._donations(plan, cells)
        return plan

    def _donations(self, plan: Plan, cells) -> tuple[int, ...]:
        """Array arguments whose memory a result can take: those written, and dying activations where a result of
        equal shape and dtype waits."""
        room: dict = {}
        for base in self.output_bases:
            room[base] = room.get(base, 0) + 1
        donated = {plan.array_of[i] for i in self.written if cells[i].__class__ is Cell}
        for i in self.donatable:
            base = plan.windows[i].base if plan.windows[i] is not None else None
            if cells[i].__class__ is Cell and plan.array_of[i] not in donated and room.get(base, 0) > 0:
                room[base] -= 1
                donated.add(plan.array_of[i])
        return tuple(sorted(donated))

    def _program(self, plan: Plan, arrays, args):
        """(the program to launch, the same if it was made now else None)."""
        donate = plan.donate
        if donate and self.phase == "backward" and torch._C._autograd._get_current_graph_task_keep_graph():
            donate = ()  # retain_graph=True: the activations will be read again
        for n in donate:
            if sys.getrefcount(arrays[n]) > _HELD:
                donate = ()
                break
        program = plan.programs[bool(donate)]
        if program is not None and program.key in cache.programs:
            cache.hits += 1
            cache.clock = program.used = cache.clock + 1
            return program, None
        key = ("compiled", self.id, _geometry.setdefault(plan.local, len(_geometry)), donate, state.compiler_options)
        found, made = cache.get(key), None
        if found is None:
            found = made = self._make(key, plan, arrays, args, donate)
        plan.programs[bool(donate)] = found
        return found, made

    def _make(self, key, plan: Plan, arrays, args, donate) -> Program:
        recipe = Recipe()

        static = [a if w is None else None for a, w in zip(args, plan.windows, strict=True)]
        module, on_cpu = self.module, self.on_cpu

        def run(seed, *arrays):
            return compiled_trace.trace(module, on_cpu, plan, recipe, static, seed, arrays)

        run.__name__ = self.name or f"torch_compile_{self.phase}"
        options = dict(state.compiler_options) or None
        jitted = jax.jit(run, donate_argnums=tuple(1 + n for n in donate), compiler_options=options)
        infos, site = self.describe(), self.link.site_of(self.phase)
        leaves = tuple((n, repr(w)) for n, w in zip(self.placeholders, plan.windows, strict=True) if w is not None)
        ops = tuple((i.name, i.inputs, i.static) for i in infos)
        options = (*state.compiler_options, *precision.options([precision.chosen]))
        layouts = tuple((n, w.layout()) for n, w in zip(self.placeholders, plan.windows, strict=True) if w is not None)
        retraced = self.link.retraced if len(self.plans) == 1 else ""  # later programs of this graph are not Dynamo's doing
        view = causes.View(
            "compiled", (site.file, site.line), ops, leaves, (), donate, options, layouts, retraced
        )  # fmt: skip
        flops, nbytes = sum(i.flops for i in infos), sum(a.nbytes for a in arrays)
        program = cache.add(key, jitted, (_next_seed(0), *arrays), view, flops, nbytes, site)
        program.extra = recipe
        return program

    def describe(self) -> list[fxgraph.OpInfo]:
        """What the records say of each op, worked out once."""
        if self.infos is None:
            self.infos = fxgraph.describe(self.module)
        return self.infos

    def positions(self) -> dict:
        """compiled_records.positions of its ops, worked out once."""
        if self.places is None:
            self.places = compiled_records.positions(self.describe())
        return self.places


def _next_seed(used: int):
    """(seed, counter) for a program that draws `used` random numbers, and take them."""
    global _no_random
    if not used:
        if _no_random is None:
            _no_random = jnp.zeros((2,), jnp.int64)
        return _no_random
    return np.array(rng.default.take(used), np.int64)


def _aliases(cells) -> tuple[int, ...]:
    """For each argument the first one on the same storage; -1 for what is no tensor."""
    first: dict[int, int] = {}
    return tuple(-1 if c is None else first.setdefault(id(c), i) for i, c in enumerate(cells))


def _device(node) -> str:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.device.type if isinstance(value, Tensor) else ""


def _base(node):
    """The base that a result of these strides gets; None for symbolic sizes."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(type(n) is int for n in (*value.shape, *value.stride())):
        return None
    return storage.layout(tuple(value.shape), tuple(value.stride()), value.dtype)[0]


def _calibrate() -> int:
    """What getrefcount says of an array that only a cell and the call's list hold."""
    cell = Cell(jnp.zeros(()), None)
    arrays = [executor.resolve(c) for c in [cell]]
    return sys.getrefcount(arrays[0])


_HELD = _calibrate()
