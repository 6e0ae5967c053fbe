"""Control flow inside a compiled graph: torch.cond and torch.while_loop as lax.cond and lax.while_loop."""

from __future__ import annotations

import torch
from jax import lax

from tpu_lab.backend import decomp, fxgraph, state

Tensor = torch.Tensor


def cond(pred, true_module, false_module, operands):
    """torch.cond: both branches are in the program, one runs. pred: a bool or a one-element tensor."""
    if not isinstance(pred, Tensor):
        return tuple(fxgraph.execute(true_module if pred else false_module, list(operands)))
    others: list = []

    def branch(module):
        def run(arrays):
            outputs = _execute(module, _wrapped(operands, arrays))
            others[:] = [None if isinstance(o, Tensor) else (o,) for o in outputs]
            return [decomp.unwrap(o) for o in outputs if isinstance(o, Tensor)]

        return run

    out = lax.cond(decomp.unwrap(pred).reshape(()) != 0, branch(true_module), branch(false_module), _arrays(operands))
    arrays = iter(out)
    return tuple(decomp.wrap(next(arrays)) if other is None else other[0] for other in others)


def while_loop(cond_module, body_module, carried, additional, **_):
    """torch.while_loop over tensors of fixed shapes. NotImplementedError for carried numbers and for random ops inside."""
    if not all(isinstance(t, Tensor) for t in carried):
        raise NotImplementedError(
            "torch.while_loop on 'tpu' carries tensors only: make a counter a tensor (torch.tensor(0, device='tpu'))"
        )
    drawn = state.thread.tracing.used

    def run(module, arrays):
        outputs = _execute(module, [*_wrapped(carried, arrays), *additional])
        if state.thread.tracing.used != drawn:
            raise NotImplementedError(
                "random numbers inside torch.while_loop on 'tpu' would repeat in each turn: draw them before the loop"
            )
        return [decomp.unwrap(o) for o in outputs]

    out = lax.while_loop(
        lambda arrays: run(cond_module, arrays)[0].reshape(()) != 0, lambda arrays: run(body_module, arrays), _arrays(carried)
    )
    return tuple(decomp.wrap(a, t.dtype) for a, t in zip(out, carried, strict=True))


def _execute(module, inputs) -> list:
    """A branch or a body. The checks of its indices stay inside: their values do not exist outside."""
    context = state.thread.tracing
    node, outer, context.checks = context.node, context.checks, []
    try:
        return fxgraph.execute(module, inputs)
    finally:
        context.node, context.checks = node, outer


def _arrays(values) -> list:
    return [decomp.unwrap(v) for v in values if isinstance(v, Tensor)]


def _wrapped(values, arrays) -> list:
    """The values again, tensors over new arrays and with their own strides."""
    arrays = iter(arrays)
    return [fxgraph.restrided(decomp.wrap(next(arrays), v.dtype), v) if isinstance(v, Tensor) else v for v in values]


fxgraph.higher_order.update({"cond": cond, "while_loop": while_loop})
