"""What torch.compile keeps of compiled functions that are gone, taken away: Dynamo itself never lets it go.

Seen in torch 2.13: what it made stays under names of its own in the function's globals until the new code dies. The new
code hangs on guards, the guards on the stacks they were made on and on finalizers of what they looked at, `len` among
it, and the stacks on the new code. Only what cannot run again goes.
"""

from __future__ import annotations

import functools
import weakref

import torch

EDITS = 30  # stacks that one compile may need for an error of its own
_ended: set[int] = set()  # regions of torch.compile(isolate_recompiles=True) whose function is gone


def compiled(fn):
    """torch.compile(fn) that is forgotten when it is gone, and that shares no limit with others: Dynamo counts by lines of
    code, and the ninth model of a class, or the ninth comparison of one function, would run op by op.
    """
    made = torch.compile(fn, isolate_recompiles=True)
    if _region(made) >= 0:  # with TORCHDYNAMO_DISABLE=1 it is fn itself
        weakref.finalize(made, _ended.add, _region(made)).atexit = False
    return made


def forget(made) -> None:
    """Nobody will call it again: now rather than when the last reference goes."""
    from torch._dynamo.convert_frame import compile_lock

    _ended.add(_region(made))
    with compile_lock:
        sweep()


def _region(made) -> int:
    return getattr(getattr(made, "dynamo_ctx", made), "_isolate_recompiles_id", -1)


def sweep() -> None:
    """Make every entry of the ended regions invalid, as Dynamo does when a guarded object dies, and let go what hangs on it.

    Before each compile, while Dynamo's lock is held.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.guards import DeletedGuardManagerWrapper
    from torch._dynamo.utils import get_metrics_context

    metrics, ended, gone = get_metrics_context(), _ended - {-1}, []
    compiling = metrics.in_progress()  # what is just being compiled must stay
    for code in filter(None, [ref() for ref in input_codes.seen]):
        entries = _debug_get_cache_entry_list(code)
        for entry in entries:
            guards = entry.guard_manager
            if entry.isolate_recompiles_id in ended and not isinstance(guards, DeletedGuardManagerWrapper):
                guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper("its function is gone"))
                gone.append(guards)
        if entries and not compiling and all(isinstance(entry.guard_manager, DeletedGuardManagerWrapper) for entry in entries):
            reset_code(code)
    _ended.difference_update(ended)
    for end in list(weakref.finalize._registry):
        guards = _guards(end)
        if isinstance(guards, DeletedGuardManagerWrapper) or any(guards is one for one in gone):
            end.detach()
    del metrics._edits[: -EDITS if compiling else None]  # the stacks of every compile that there ever was


def _guards(end: weakref.finalize):
    """The guards that a finalizer would make invalid; None for other finalizers."""
    call = end.peek()
    what = call[1] if call is not None else None
    return getattr(getattr(what.func, "__self__", None), "guard_manager", None) if isinstance(what, functools.partial) else None
