"""Control flow inside a compiled graph: torch.cond and torch.while_loop as lax.cond and lax.while_loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_lab.backend import bounds, decomp, fxgraph, state

Tensor = torch.Tensor


def cond(pred, true_module, false_module, operands):
    """torch.cond: both branches are in the program, one runs. pred: a bool or a one-element tensor."""
    if not isinstance(pred, Tensor):
        return tuple(fxgraph.execute(true_module if pred else false_module, list(operands)))
    others: list = []
    inputs = _arrays(operands)
    checks = [_checks_in(module, lambda arrays: _wrapped(operands, arrays), inputs) for module in (true_module, false_module)]

    def branch(module, before, after):
        def run(arrays):
            outputs, wrong = _execute(module, _wrapped(operands, arrays))
            others[:] = [None if isinstance(o, Tensor) else (o,) for o in outputs]
            return [decomp.unwrap(o) for o in outputs if isinstance(o, Tensor)], jnp.concatenate(
                [_fine(before), *wrong, _fine(after)]  # the other branch's indices are in range: nobody used them
            )

        return run

    yes, no = branch(true_module, [], checks[1]), branch(false_module, checks[0], [])
    out, wrong = lax.cond(decomp.unwrap(pred).reshape(()) != 0, yes, no, inputs)
    _tell([*checks[0], *checks[1]], wrong)
    arrays = iter(out)
    return tuple(decomp.wrap(next(arrays)) if other is None else other[0] for other in others)


def while_loop(cond_module, body_module, carried, additional, **_):
    """torch.while_loop over tensors of fixed shapes. NotImplementedError for carried numbers and for random ops inside."""
    if not all(isinstance(t, Tensor) for t in carried):
        raise NotImplementedError(
            "torch.while_loop on 'tpu' carries tensors only: make a counter a tensor (torch.tensor(0, device='tpu'))"
        )
    drawn = state.thread.tracing.used

    def given(arrays):
        return [*_wrapped(carried, arrays), *additional]

    def run(module, arrays):
        outputs, wrong = _execute(module, given(arrays))
        if state.thread.tracing.used != drawn:
            raise NotImplementedError(
                "random numbers inside torch.while_loop on 'tpu' would repeat in each turn: draw them before the loop"
            )
        return [decomp.unwrap(o) for o in outputs], wrong

    def ask(arrays):
        (goes_on,), wrong = run(cond_module, arrays)
        return goes_on.reshape(()) != 0, wrong

    def turn(loop):
        arrays, found, _ = loop
        arrays, wrong = run(body_module, arrays)
        goes_on, asked = ask(arrays) if looks else (None, [])
        return arrays, jnp.where(found == bounds.FINE, jnp.concatenate([_fine([]), *asked, *wrong]), found), goes_on  # the first wrong one

    inputs = _arrays(carried)
    looks, checks = _checks_in(cond_module, given, inputs), _checks_in(body_module, given, inputs)
    # a condition gives a bool and nothing else: one with indices is asked in the turns, with the first time before them
    goes_on, asked = ask(inputs) if looks else (None, [])
    start = inputs, jnp.concatenate([*asked, _fine(checks)]), goes_on
    out, found, _ = lax.while_loop(lambda loop: loop[2] if looks else ask(loop[0])[0], turn, start)
    _tell([*looks, *checks], found)
    return tuple(decomp.wrap(a, t.dtype) for a, t in zip(out, carried, strict=True))


def _execute(module, inputs) -> tuple[list, list]:
    """(results, the checks of its indices) of a branch or a body. The checks' values do not exist outside: it gives them."""
    context = state.thread.tracing
    node, outer, context.checks = context.node, context.checks, []
    try:
        return fxgraph.execute(module, inputs), [wrong for _, _, wrong in context.checks]
    finally:
        context.node, context.checks = node, outer


def _checks_in(module, wrapped, arrays) -> list:
    """The signatures of the ops with indices in a branch or a body, in order. It is traced for that, and once more later."""
    context, found = state.thread.tracing, []
    node, outer, used, context.checks = context.node, context.checks, context.used, []

    def run(arrays):
        fxgraph.execute(module, wrapped(arrays))
        found.extend(sig for _, sig, _ in context.checks)
        return ()

    try:
        jax.eval_shape(run, arrays)
    finally:
        context.node, context.checks, context.used = node, outer, used
    return found


def _fine(checks):
    """What `bounds.worst` gives of right indices, for each check."""
    return jnp.full(sum(len(sig.bounds.texts) for sig in checks), bounds.FINE, jnp.int64)


def _tell(checks, wrong) -> None:
    """The checks from inside are checks of the node that holds the branches; their line is its line."""
    at = 0
    for sig in checks:
        n = len(sig.bounds.texts)
        state.thread.tracing.checks.append((state.thread.tracing.node, sig, wrong[at : at + n]))
        at += n


def _arrays(values) -> list:
    return [decomp.unwrap(v) for v in values if isinstance(v, Tensor)]


def _wrapped(values, arrays) -> list:
    """The values again, tensors over new arrays and with their own strides."""
    arrays = iter(arrays)
    return [fxgraph.restrided(decomp.wrap(next(arrays), v.dtype), v) if isinstance(v, Tensor) else v for v in values]


fxgraph.higher_order.update({"cond": cond, "while_loop": while_loop})
