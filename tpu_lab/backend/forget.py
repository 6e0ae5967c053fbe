"""A function that torch.compile can forget: what Dynamo keeps of a compiled function is not let go with it.

Seen in torch 2.13: what it made stays under names of its own in the function's globals until the new code dies. The new
code hangs on guards, the guards on the stacks they were made on and on finalizers of what they looked at, `len` among
it, and the stacks on the new code. Only what is certainly done with goes: entries of the copy, and of dead objects.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref


def copy(fn):
    """A plain function or a method with a code object of its own; anything else as it is."""
    if "torch._dynamo" in sys.modules:
        _sweep()
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, types.FunctionType):
        return types.MethodType(copy(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    made = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__, made.__qualname__, made.__module__ = fn.__kwdefaults__, fn.__qualname__, fn.__module__
    made.__dict__.update(fn.__dict__)
    return made


def forget(made) -> None:
    """Take away what Dynamo keeps of a function that `copy` made, and that nobody calls any more."""
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.resume_execution import ContinueExecutionCache
    from torch._dynamo.utils import CleanupManager, get_metrics_context

    codes = [getattr(made, "__func__", made).__code__]
    for code in codes:  # and what goes on after a graph break, and after the next
        codes += ContinueExecutionCache.cache.get(code, {}).values()
    entries = [entry for code in codes for entry in _entries(code)]
    guards = [entry.guard_manager for entry in entries]
    for end in list(weakref.finalize._registry):
        manager = _guards(end)
        if _dead(manager) or any(manager is of for of in guards):
            end.detach()
    kept = CleanupManager.instance
    for number in {id(entry.code) for entry in entries} & set(kept.values):
        kept._remove_id(number)  # its names go
    for code in codes:
        reset_code(code)
        for table in (ContinueExecutionCache.cache, ContinueExecutionCache.generated_code_metadata):
            table._remove_id(id(code))
    metrics = get_metrics_context()
    if not metrics.in_progress():
        metrics._edits.clear()  # the stacks of every compile that there ever was, for an error within that compile


def _sweep() -> None:
    """Code that was compiled for objects that are all gone, such as an optimizer's step."""
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.convert_frame import input_codes

    for code in filter(None, [ref() for ref in input_codes.seen]):
        entries = _entries(code)
        if entries and all(_dead(entry.guard_manager) for entry in entries):
            reset_code(code)


def _entries(code) -> list:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return _debug_get_cache_entry_list(code)


def _dead(manager) -> bool:
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    return isinstance(manager, DeletedGuardManagerWrapper)


def _guards(end: weakref.finalize):
    """The guards that a finalizer would make invalid; None for other finalizers."""
    call = end.peek()
    what = call[1] if call is not None else None
    return getattr(getattr(what.func, "__self__", None), "guard_manager", None) if isinstance(what, functools.partial) else None
