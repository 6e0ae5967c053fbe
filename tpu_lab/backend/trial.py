"""A lowering on trial: an op is lowered by a function of yours inside a block, and as before after it."""

from __future__ import annotations

import contextlib
from typing import Callable

from tpu_lab.backend import dispatch, executor, registry, state


@contextlib.contextmanager
def lowered(target, fn: Callable, **options):
    """Inside the block `target` (an `aten.x` packet or overload) is lowered by `fn`, a function over jax arrays.

    options: those of `registry.op`: kind, promote, ... Nothing of it stays: programs made with `fn` are forgotten.
    """
    with state.lock:
        executor.flush("synchronize")
        table, explicit = dict(registry._table), set(registry._explicit)
        registry._explicit -= {o for o in explicit if o.overloadpacket is target}  # a packet stands for them all here
        registry.op(target, **options)(fn)
    try:
        yield
    finally:
        with state.lock:
            try:
                executor.flush("synchronize")
            finally:
                registry._table.clear()
                registry._table.update(table)
                registry._explicit.clear()
                registry._explicit.update(explicit)
                dispatch.renew(getattr(target, "overloadpacket", target))
