"""Look at every op as it runs, or run none at all: for the tools that search and count.

Both exchange the functions of executor.py and fallback.py that ops go through, for the time of a block, so that nothing
is paid outside. Compiled graphs run op by op inside (`executor.watched`). The blocks hold for the whole process:
take a turn before, `state.alone`.
"""

from __future__ import annotations

import contextlib

import numpy as np

from tpu_lab.backend import executor, fallback, signature, state


class ValueNeeded(RuntimeError):
    """Inside `dry` something asked for a value that was not computed."""


class _Dry:
    """The value of what `dry` did not compute."""


_DRY = _Dry()


@contextlib.contextmanager
def each_op(look):
    """In the block every op runs at once, and then `look(name, inputs, outputs, numbers)` is called.

    name: "aten.exp.default". inputs, outputs: [(the schema's name or "result", the jax.Array that holds it or None, its
    elements as numpy)]; on a CPU these are views of the device's memory: do not keep them. numbers: those among the
    arguments. Called with the lock held, on whatever thread runs the op.
    """
    original_fallback = fallback.run

    def run(sig, cells, floats, ints, note=None):
        if executor.graph.nodes:
            executor.flush("strict")
        values = [executor.resolve(c) for c in cells]
        out = executor._launch(sig, values, floats, ints, state.EagerMode.DEFER_NEVER, note)
        inputs = [(n, v, _read(w, v)) for n, w, v in zip(sig.names, sig.windows, values, strict=True)]
        fresh = [("result", v, np.asarray(v)) for v in out[: len(sig.fresh)]]
        written = [
            (sig.names[i], v, _read(sig.windows[i], v)) for i, v in zip(sig.writes, out[len(sig.fresh) :], strict=True)
        ]
        look(sig.name, inputs, fresh + written, (*floats, *ints))
        return out

    def run_on_cpu(record, args, kwargs, reason):
        out = original_fallback(record, args, kwargs, reason)
        given = [("input", None, _host(t)) for t in signature.tensors_in([*args, *kwargs.values()], [])]
        look(record.name, given, [("result", None, _host(t)) for t in signature.tensors_in(out, [])], ())
        return out

    with _exchanged(run, executor.resolve, run_on_cpu):
        yield


@contextlib.contextmanager
def dry():
    """In the block ops are recorded and no op runs: results have shapes and no values. ValueNeeded when one is read."""
    original = executor.resolve

    def run(sig, cells, floats, ints, note=None):
        return [_DRY] * (len(sig.fresh) + len(sig.writes))

    def resolve(cell):
        if cell.value is _DRY:
            raise ValueNeeded("a value is read that a dry run does not compute")
        return original(cell)

    with _exchanged(run, resolve, fallback.run):
        yield


@contextlib.contextmanager
def _exchanged(run, resolve, run_on_cpu):
    with state.lock:
        before = executor.run, executor.resolve, fallback.run
        executor.flush("strict")
        executor.run, executor.resolve, fallback.run, executor.watched = run, resolve, run_on_cpu, True
    try:
        yield
    finally:
        with state.lock:
            executor.run, executor.resolve, fallback.run = before
            executor.watched = False


def _read(window, value) -> np.ndarray:
    """The elements of a tensor: its window over the base array. Another dtype's view of it: the whole base."""
    base = np.asarray(value)
    if window.identity or window.dtype != window.base.dtype or not window.numel:
        return base if window.numel else base.reshape(-1)[:0]
    flat, size = base.reshape(-1), base.dtype.itemsize
    return np.lib.stride_tricks.as_strided(
        flat[window.offset :], window.size, [s * size for s in window.stride], writeable=False
    )


def _host(tensor) -> np.ndarray:
    """A tensor on either side, as numpy; the wait is not recorded as the user's."""
    from tpu_lab.backend import host, storage

    if tensor.device.type != "tpu":
        return host.to_numpy(tensor)
    cell = storage.cell(tensor)
    return _read(storage.window_of(tensor, cell.base), executor.resolve(cell))
