"""Measured times for the fusions view: the programs of the drawn step run again under jax's profiler."""

from __future__ import annotations

from tpu_lab import fusions
from tpu_lab.metrics import Metrics


def fusions_view(m: Metrics, runs: int):
    """The fusions view of a trace with each group's median over `runs` replays (tpu_lab/backend/replay.py).

    LookupError for a profile that was read from a file, which holds no program that runs.
    """
    from tpu_lab.backend import replay
    from tpu_lab.viz import fusions as view

    times: dict[tuple[int, str], float] = {}
    found: dict[str, dict[str, float]] = {}
    for launch in m.launches_in(m.span):
        program = m.trace.programs.get(launch.key)
        if program is not None and not hasattr(program, "compiled"):
            raise LookupError("this profile was read from a file, which holds texts of programs and none that runs: record it again to measure its fusions")
        if program is not None and launch.key not in found:
            found[launch.key] = replay.kernel_times(program, runs)
        times.update({(launch.index, name): ns for name, ns in found.get(launch.key, {}).items()})
    return view.draw(m, groups=fusions.measured(fusions.of(m), times))
