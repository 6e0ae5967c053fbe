"""The deferred graph of fused mode: what will run. Nodes hold no values but their leaves, and weak references to results.

One `list.append` records an op, so an interrupt between two bytecodes leaves a whole graph. Everything else (leaf
numbers, who is alive, what may be donated) is worked out at the flush.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_lab.backend import causes, precision, rng
from tpu_lab.backend.storage import Pending

SIZE_LIMIT = 4000  # ops; a longer graph is flushed
LOOP_CHECK = 1000  # ops; from here on a graph is looked at for a loop that never reads a value
MANY = 6  # tensors that a turn reads and no other: a layer's weights rather than a batch
_HELD = 2  # references to a leaf that are ours in `_donated`: the list of leaves, getrefcount's argument


class Node(NamedTuple):
    """One recorded op. inputs: a jax.Array for a leaf, an int for a value of this graph."""

    sig: object
    inputs: tuple
    start: int  # number of its first result
    results: tuple  # weak references to its Pending values
    floats: tuple
    ints: tuple
    checks: tuple = ()  # bounds.Check of each of its indices


class Plan(NamedTuple):
    """A graph ready to be looked up: the structured key, the runtime arguments, the values to deliver."""

    key: tuple
    leaves: list
    floats: np.ndarray
    ints: np.ndarray
    alive: list  # Pending, strong
    positions: tuple  # their numbers
    donated: tuple
    checks: list  # bounds.Check of each index in it, in order


def period(ids: list[int]) -> int:
    """The length of the run of ops that the list ends with at least three times; 0 if there is none.

    The failure function of Knuth, Morris and Pratt on the reversed list: a tail of length n repeats with n - fail(n).
    """
    ids = ids[::-1]
    fail, k = [0], 0
    best = 0
    for i in range(1, len(ids)):
        while k and ids[i] != ids[k]:
            k = fail[k - 1]
        k += ids[i] == ids[k]
        fail.append(k)
        p = i + 1 - k
        if p * 3 <= i + 1 and i + 1 >= len(ids) // 2:  # most of the graph is the loop
            best = p
    return best


def returns(ids: list[int]) -> int:
    """After how many ops the list begins once more and goes on like that to its end; 0 if only a few ops are alike."""
    fail, k = [0], 0
    for i in range(1, len(ids)):
        while k and ids[i] != ids[k]:
            k = fail[k - 1]
        k += ids[i] == ids[k]
        fail.append(k)
    return len(ids) - k if k * 64 >= SIZE_LIMIT else 0


def _turn(graphs: list[list[int]], own: bool) -> tuple[int, int]:
    """(ops of a loop's turn, ops of these graphs without the last since one began); (0, 0) if it cannot be told.

    own: a turn may have begun with the last graph, too.
    """
    for n in range(len(graphs) - (not own)):
        ids = [i for part in graphs[n:] for i in part]
        if turn := returns(ids):
            return turn, len(ids) - len(graphs[-1])
    return 0, 0


def layers(nodes: list[Node], period: int) -> bool:
    """Is it the layers of a model that repeat, and no loop? Each layer reads weights of its own, as many as no batch has
    tensors (MANY), or, in backward, in the reverse order. A loop reads the same ones each time, or has written them."""
    first: dict[int, int] = {}  # leaf -> the node that first reads it
    for n, node in enumerate(nodes):
        for v in node.inputs:
            if v.__class__ is not int:
                first.setdefault(id(v), n)
    last, before, third = nodes[-period:], nodes[-2 * period : -period], nodes[-3 * period : -2 * period]
    same = sum(bool(node.sig.writes) for node in last)
    other = back = 0
    for nodes_of in zip(last, before, third, strict=True):
        for a, b, c in zip(*[node.inputs for node in nodes_of], strict=True):
            if int not in (a.__class__, b.__class__, c.__class__):
                same += a is b
                other += a is not b
                back += first[id(a)] < first[id(b)] < first[id(c)]
    return other > same and (other >= MANY or back > 0)


class Graph:
    """Ops recorded and not yet run."""

    def __init__(self):
        self.nodes: list[Node] = []
        self.flush_at = LOOP_CHECK  # ask `full` at this length
        self.end = 0  # the length to be cut at, once it is known
        self.past: list[list[int]] = []  # the ops of the graphs just before it that were cut in the middle of a turn
        self.missing: int | None = None  # ops to the end of a loop's turn when it is cut, if that is known
        self.failed = False  # its compile failed once
        self.closed = False  # it has run, or was given up
        self.before: dict = {}  # id of a cell written in place -> (weak cell, weak array that it held)

    def full(self) -> str | None:
        """Why to flush now: "loop", "size limit", or None (then `flush_at` has moved on).

        A loop that reads nothing would be cut somewhere in its body, each time elsewhere, and compile each time. So
        once the recorded ops repeat, the cut is at a multiple of the period: equal graphs from then on. The layers of a
        model repeat, too: cut there, a step would be two programs that hand each other their activations.
        """
        length = len(self.nodes)
        if self.end:
            return "loop"
        big, ids = length >= SIZE_LIMIT, [node.sig.id for node in self.nodes]
        if big or self.past:
            turn, before = _turn([*self.past, ids], own=big)
            rest = -(before + length) % turn if turn else SIZE_LIMIT
            if turn and before and before % turn == 0 and length <= len(self.past[-1]):
                rest = len(self.past[-1]) - length  # that one was whole turns: once more the same
            if rest * 4 <= SIZE_LIMIT or rest + length <= SIZE_LIMIT:
                self.missing = 0
                return self._at(length + rest)
            if big and turn:
                self.missing = rest
                return "size limit"
        turn = period(ids)
        if turn and (big or not layers(self.nodes, turn)):
            return self._at(length + -length % turn)
        if big:
            return "size limit"
        self.flush_at = length + LOOP_CHECK
        return None

    def _at(self, length: int) -> str | None:
        """Cut there: now, or when `full` is asked again."""
        self.end = self.flush_at = length
        return "loop" if len(self.nodes) == length else None

    def after(self) -> tuple[list, int]:
        """What `follow` tells the graph that comes after this one, which `full` cuts."""
        if self.missing is None:
            return [*self.past[-3:], [node.sig.id for node in self.nodes]], 0
        return [], self.missing

    def follow(self, past: list, missing: int) -> None:
        """The graph before was cut. Where a turn of a loop is too long to be seen three times in one graph, or has layers
        that repeat, this one ends with the turn: the next begins as the earlier one did, and is the same program."""
        self.past = past
        if missing:
            self.missing = 0
            self._at(missing)

    def add(self, sig, values, floats, ints, checks=()) -> list[Pending] | None:
        """Record one op over values (jax.Array or Pending of this graph); its results as pending values.

        None if a finalizer or the handler of a signal has recorded or run something just now: then values and numbers
        are out of date.
        """
        nodes = self.nodes
        count = len(nodes)
        start = nodes[-1].start + len(nodes[-1].results) if nodes else 0
        pending = [Pending(self, start + i) for i in range(len(sig.fresh) + len(sig.writes))]
        inputs = tuple([v.index if v.__class__ is Pending else v for v in values])
        node = Node(sig, inputs, start, tuple([weakref.ref(p) for p in pending]), floats, ints, checks)
        append = nodes.append
        if nodes[count:] or self.closed:  # no call from here to the next: nothing comes in between
            return None
        append(node)
        return pending

    def close(self) -> None:
        """No op comes to it any more."""
        self.closed, self.nodes = True, []

    def writes(self, cell) -> None:
        """An op of this graph writes into a cell: remember what it held, without keeping that alive."""
        if cell.value.__class__ is not Pending and cell.value is not None:
            self.before[id(cell)] = weakref.ref(cell), weakref.ref(cell.value)

    def undo(self) -> None:
        """Give cells that this graph wrote into what they held before; that is gone where the graph did not read it."""
        for cell, array in self.before.values():
            if (found := cell()) is not None and (value := array()) is not None:
                found.value = value

    def plan(self, options: tuple) -> Plan | None:
        """The key and arguments of running all that is recorded; None if no result is alive."""
        code, floats, ints, leaves, number, uses = [], [], [], [], {}, []
        alive, positions, checks = [], [], []
        v = None
        for sig, inputs, start, results, f, i, c in self.nodes:
            code.append(sig.id)
            if c:
                checks.extend(c)
            for v in inputs:
                if v.__class__ is int:
                    code.append(v)
                    continue
                n = number.get(id(v))
                if n is None:
                    n = number[id(v)] = len(leaves)
                    leaves.append(v)
                    uses.append(0)
                uses[n] += 1
                code.append(-1 - n)
            floats.extend(f)
            ints.extend(i)
            for k, r in enumerate(results):
                p = r()
                if p is not None:
                    alive.append(p)
                    positions.append(start + k)
        if not alive:
            return None
        del v  # it would count as a reference to the last leaf
        donated = self._donated(leaves, uses, positions)
        key = ("fused", tuple(code), tuple(positions), donated, options)
        packed = np.array(floats, np.float64), np.array(ints, np.int64)
        return Plan(key, leaves, *packed, alive, tuple(positions), donated, checks)

    def _donated(self, leaves, uses, positions) -> tuple[int, ...]:
        """Leaves that nobody else holds and whose memory a live result of equal shape and dtype can take."""
        shapes = self.bases()
        room: dict = {}
        for p in positions:
            room[shapes[p]] = room.get(shapes[p], 0) + 1
        donated = []
        for n in range(len(leaves)):  # no enumerate, no loop variable: each would hold a reference
            if sys.getrefcount(leaves[n]) - uses[n] <= _HELD:
                shape = (leaves[n].shape, leaves[n].dtype)
                if room.get(shape, 0) > 0:
                    room[shape] -= 1
                    donated.append(n)
        return tuple(donated)

    def made(self, positions: tuple, recorded: int) -> list:
        """For each of these values the position of its op among the last `recorded` nodes; None before them."""
        starts = [node.start for node in self.nodes]
        earlier = len(starts) - recorded  # nodes from before the profile
        at = (bisect.bisect_right(starts, p) - 1 - earlier for p in positions)
        return [n if n >= 0 else None for n in at]

    def dead(self, positions: tuple) -> tuple[int, ...]:
        """Numbers of the nodes that none of these values needs: XLA leaves them out of the program."""
        needed, out = set(positions), []
        for n in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[n]
            if needed.isdisjoint(range(node.start, node.start + len(node.results))):
                out.append(n)
            else:
                needed.update([v for v in node.inputs if v.__class__ is int])
        return tuple(reversed(out))

    def bases(self) -> list:
        """(shape, dtype) of each value of the graph."""
        out = []
        for node in self.nodes:
            out.extend((f.base.shape, f.base.jdtype) for f in node.sig.fresh)
            out.extend((node.sig.windows[w].base.shape, node.sig.windows[w].base.jdtype) for w in node.sig.writes)
        return out

    def program(self, plan: Plan):
        """(jitted function of (floats, ints, *leaves) -> (*live values, done), and its causes.View without the site)."""
        steps = [(n.sig, n.inputs, len(n.floats), len(n.ints)) for n in self.nodes]
        number = {id(leaf): -1 - i for i, leaf in enumerate(plan.leaves)}
        steps = [(s, tuple(v if type(v) is int else number[id(v)] for v in i), f, k) for s, i, f, k in steps]
        positions = plan.positions
        ends = itertools.accumulate(k for _, _, _, k in steps)
        pairs = [end - 2 for end, (sig, _, _, _) in zip(ends, steps, strict=True) if sig.rng]  # of (seed, counter)

        def run(floats, ints, *leaves):
            values: list = []
            worst: list = []
            at_float = at_int = 0
            draws = iter(rng.keys(jnp.concatenate([ints[p : p + 2] for p in pairs]).reshape(-1, 2)) if pairs else ())
            for index, (sig, inputs, n_floats, n_ints) in enumerate(steps):
                arrays = [values[v] if v >= 0 else leaves[-1 - v] for v in inputs]
                f = [floats[at_float + k] for k in range(n_floats)]
                i = [ints[at_int + k] for k in range(n_ints)]
                at_float, at_int = at_float + n_floats, at_int + n_ints
                if sig.rng:
                    i[-2:] = [next(draws)]
                with jax.named_scope(f"{index}:{sig.name}"):  # index local to the graph: equal graphs, equal text
                    out = (sig.call if sig.options else sig.jit)(arrays, f, i)  # a nested jit takes no options
                    if sig.bounds is not None:
                        worst.append(out[-1])
                        out = out[:-1]
                    values.extend(out)
            # `done` is ready when the program is: a profile can wait for it without holding a real result
            done = jnp.concatenate(worst) if worst else jnp.zeros((), jnp.uint8)
            return [values[p] for p in positions], done

        donate = tuple(2 + n for n in plan.donated)
        jitted = jax.jit(run, donate_argnums=donate, compiler_options=dict(plan.key[4]) or None)
        names: dict[int, tuple[str, str]] = {}
        ops: list[tuple] = []
        layouts, results = [], []
        for sig, inputs, _, _ in steps:
            ops.append((sig.name, sig.inputs, sig.static))
            for k, v in enumerate(inputs):
                if v < 0 and v not in names:
                    names[v] = (f"{sig.argument(k)} of {sig.name}", repr(sig.windows[k]))
                layouts.append((f"{sig.argument(k)} of {sig.name}", sig.windows[k].layout()))
            results.extend([sig.name] * (len(sig.fresh) + len(sig.writes)))
        leaves = tuple(names[-1 - i] for i in range(len(plan.leaves)))
        live = tuple((p, results[p]) for p in plan.positions)
        options = (*plan.key[4], *precision.options([s.precision for s, _, _, _ in steps]))
        view = causes.View("fused", ("", 0), tuple(ops), leaves, live, plan.donated, options, tuple(layouts))
        return jitted, view
