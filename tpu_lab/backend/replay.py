"""How long each kernel of a program really takes: the program is run again under jax's own profiler.

XLA:CPU reports every kernel ("thunk") to jax's profiler with the name of its HLO instruction. A replay runs on zeros of
the right shapes, as the arguments of the recorded launch are gone; the arithmetic is the same for any finite values.
"""

from __future__ import annotations

import glob
import os
import statistics
import tempfile

import jax
import jax.numpy as jnp


def kernel_times(program, runs: int = 5) -> dict[str, float]:
    """ns by HLO instruction: the median over `runs` runs, each from the kernel's start until its result was complete.

    Kernels that run side by side each count in full. RuntimeError when jax's profiler is busy, or on a platform other
    than the CPU.
    """
    platform = jax.default_backend()
    if platform != "cpu":
        raise RuntimeError(f"kernel times are read from XLA:CPU's report, and this runs on {platform}")
    batches = [_zeros(program.avals) for _ in range(runs + 1)]
    jax.block_until_ready(batches)
    jax.block_until_ready(program.compiled(*batches.pop()))  # the first run pays for pages and caches
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as busy:
            raise RuntimeError("jax's profiler is running: end its trace before fusions_measured()") from busy
        try:
            while batches:
                jax.block_until_ready(program.compiled(*batches.pop()))
        finally:
            jax.profiler.stop_trace()
        (file,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        data = jax.profiler.ProfileData.from_file(file)
    return _medians(data, runs)


def _zeros(avals):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype) if hasattr(a, "dtype") else a, avals)


def _medians(data, runs: int) -> dict[str, float]:
    begun: dict[str, list[tuple[float, float]]] = {}
    ended: dict[str, list[float]] = {}
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith("end: "):  # the result is complete: for kernels on other threads only now
                    ended.setdefault(event.name[5:], []).append(event.start_ns)
                elif dict(event.stats).get("hlo_op") == event.name:
                    begun.setdefault(event.name, []).append((event.start_ns, event.duration_ns))
    out = {}
    for name, starts in begun.items():
        if len(starts) != runs:  # inside a loop, or not reported each time
            continue
        starts.sort()
        ends = sorted(ended.get(name, ()))
        if len(ends) == runs:
            out[name] = statistics.median(end - start for (start, _), end in zip(starts, ends))
        else:
            out[name] = statistics.median(duration for _, duration in starts)
    return out
