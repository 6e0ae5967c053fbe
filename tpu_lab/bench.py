"""`tpu-lab bench`: what the backend costs beside native PyTorch and plain jax, side by side in one run.

Each figure is a median over interleaved repeats, so a noisy neighbour hits all columns alike; read the ratios.
Small ops: microseconds a call. A minGPT training step: milliseconds, after all compiles.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import torch

from tpu_lab import trace
from tpu_lab.backend import executor, state
from tpu_lab.models import mingpt

MODES = torch.tpu.EagerMode


def interleaved(calls: Mapping[str, Callable[[], object]], repeats: int, each: int) -> dict[str, float]:
    """Median seconds of one call of each, `each` calls at a time, all taking turns `repeats` times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(each):
                call()
            times[name].append((time.perf_counter() - start) / each)
    return {name: statistics.median(t) for name, t in times.items()}


def small_ops(repeats: int = 200) -> dict[str, float]:
    """Seconds of one 8 x 8 float32 addition: native, jax.jit, strict, and recording it in fused mode."""
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    x, y = a.to("tpu"), b.to("tpu")
    p, q = jnp.asarray(a.numpy()), jnp.asarray(b.numpy())
    jitted = jax.jit(lambda u, v: u + v)
    kept: list[torch.Tensor] = []

    def fused():
        kept.append(x + y)

    with torch.no_grad():
        out = interleaved(
            {"native CPU": lambda: a + b, "jax.jit": lambda: jitted(p, q), "strict": lambda: x + y}, repeats, 100
        )
        times = []
        with state.mode_scope(MODES.DEFER_AND_FUSE):
            for _ in range(repeats):
                kept.clear()
                executor.flush("synchronize")  # nothing is alive: drops what was recorded
                start = time.perf_counter()
                for _ in range(100):
                    fused()
                times.append((time.perf_counter() - start) / 100)
            kept.clear()
            executor.flush("synchronize")
    out["fused, recording"] = statistics.median(times)
    return out


def recording(windows: int = 200, each: int = 20) -> dict[str, float]:
    """Seconds that recording adds to one 8 x 8 addition and the end of its result, with and without the user's line.

    The best of many short windows of `each` ops, taking turns: what a quiet machine would show, as noise only adds. Before
    each window as many ops run that do not count: what is measured is an op in the midst of others. In strict mode each op has a launch record, too. "at the end": what making the records of one op takes after the
    profile, when its notes are read.
    """
    x, y = torch.randn(8, 8).to("tpu"), torch.randn(8, 8).to("tpu")
    kept: list[torch.Tensor] = []

    def window(lines: bool | None) -> tuple[float, float]:
        executor.flush("synchronize")
        active = None if lines is None else trace.start(lines=lines)
        try:
            for _ in range(each):  # the first op of a trace looks at all arrays that there are
                x + y
            start = time.perf_counter()
            for _ in range(each):
                kept.append(x + y)
            kept.clear()
            spent = time.perf_counter() - start
        finally:
            if active is not None:
                trace.stop()
        start = time.perf_counter()
        if active is not None:
            active.close()
        return spent / each, (time.perf_counter() - start) / (2 * each)

    out = {}
    for word, mode in (("fused", MODES.DEFER_AND_FUSE), ("strict", MODES.DEFER_NEVER)):
        with torch.no_grad(), state.mode_scope(mode):
            best = {lines: (float("inf"), float("inf")) for lines in (None, False, True)}
            for _ in range(windows):
                for lines, (run, end) in best.items():
                    now = window(lines)
                    best[lines] = min(run, now[0]), min(end, now[1])
            executor.flush("synchronize")
        without = best[None][0]
        out |= {f"{word}, no lines": best[False][0] - without, f"{word}, with lines": best[True][0] - without}
        out[f"{word}, at the end"] = best[True][1]
    return out


def step(device: str, mode: str, config: mingpt.Config, batch: int) -> Callable[[], float]:
    """A function that runs one training step and gives its loss, so that the device has finished."""
    torch.manual_seed(0)
    model = mingpt.Model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = torch.compile(model) if mode == "compiled" else model
    ids, following = (t.to(device) for t in mingpt.batch(config, batch, seed=0))
    scope = {"strict": MODES.DEFER_NEVER, "fused": MODES.DEFER_AND_FUSE}.get(mode)

    def one() -> float:
        with state.mode_scope(scope) if scope is not None else contextlib.nullcontext():
            optimizer.zero_grad()
            loss = mingpt.loss(run, ids, following)
            loss.backward()
            optimizer.step()
            return loss.item()

    for _ in range(3):  # every program exists after the second step
        one()
    return one


def training(repeats: int = 10) -> dict[str, float]:
    """Seconds of one minGPT step (width 64, 3 layers, batch 4, block 32) on the CPU and in three modes."""
    config = mingpt.Config(layers=3, heads=4, width=64, block=32, dropout=0.0)
    calls = {"native CPU": step("cpu", "eager", config, 4)}
    calls |= {mode: step("tpu", mode, config, 4) for mode in ("strict", "fused", "compiled")}
    return interleaved(calls, repeats, 1)


def report() -> str:
    """The tables as text."""
    lines = [f"torch {torch.__version__}, jax {jax.__version__}, {jax.default_backend()}, medians"]
    for title, unit, scale, figures in (
        ("add, f32[8,8]", "µs", 1e6, small_ops()),
        ("minGPT step, d64 L3 B4 T32, AdamW", "ms", 1e3, training()),
    ):
        native = figures["native CPU"]
        lines += ["", f"{title:<36}{unit:>8}   × native"]
        lines += [f"  {name:<34}{s * scale:>8.3g}{s / native:>11.3g}" for name, s in figures.items()]
    lines += ["", f"{'recording adds to one op, at best':<36}{'µs':>8}"]
    lines += [f"  {name:<34}{s * 1e6:>8.3g}" for name, s in recording().items()]
    return "\n".join(lines)
