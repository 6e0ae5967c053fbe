"""Peaks: FLOP/s and bytes/s that a chip reaches at most, each with its source; this machine's own are measured once.

A peak without a source is worth nothing, so each `Peak` carries its label and its source, and what prints an MFU
or draws a roofline prints them, too. TPU figures are dense bf16 FLOP/s and bytes/s of HBM per *chip*, from Google's published system
architecture pages; a chip with two devices (v4, v7x) is divided by two for a figure per device.
"""

from __future__ import annotations

import functools
import json
import os
import platform as machine
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable


@dataclass(frozen=True)
class Peak:
    """flops: FLOP/s per device; bandwidth: bytes/s of main memory per device, None if unknown."""

    flops: float
    dtype: str
    label: str  # "this CPU's f32 matmul": goes behind the number
    source: str
    bandwidth: float | None = None
    bandwidth_label: str = ""  # "this CPU's memory, measured"
    bandwidth_source: str = ""


@dataclass(frozen=True)
class Chip:
    """A TPU generation, per chip."""

    name: str
    bf16: float  # FLOP/s, dense
    hbm: int  # bytes
    bandwidth: float  # bytes/s
    devices: int  # devices (JAX's count) per chip
    source: str


_GCP = "Google Cloud TPU system architecture, docs.cloud.google.com/tpu/docs/"
CHIPS = {
    "v4": Chip("v4", 275e12, 32 << 30, 1.2e12, 2, _GCP + "v4"),
    "v5e": Chip("v5e", 197e12, 16 << 30, 0.82e12, 1, _GCP + "v5e"),
    "v5p": Chip("v5p", 459e12, 95 << 30, 2.77e12, 1, _GCP + "v5p"),
    "v6e": Chip("v6e", 918e12, 32 << 30, 1.64e12, 1, _GCP + "v6e"),
    "v7x": Chip("v7x", 2307e12, 192 << 30, 7.37e12, 2, _GCP + "tpu7x"),
}
_KINDS = {  # what JAX calls a device's kind -> our name
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
}


def peak(platform: str = "cpu", device: str = "", dtype: str = "f32") -> Peak | None:
    """The peak to divide by, or None for a chip nobody published one for (then give `peak_flops=`).

    platform, device: as `executor.describe()` gives them. On "cpu" the machine's own matmul rate in `dtype` is
    measured the first time (about a second) and kept in the user's cache folder.
    """
    if platform == "cpu":
        return measured(dtype if dtype in ("f32", "f64", "bf16") else "f32")
    chip = CHIPS.get(_KINDS.get(device, device))
    if chip is None:
        return None
    return Peak(
        chip.bf16 / chip.devices,
        "bf16",
        f"{chip.name}'s bf16 peak" + (", per device" if chip.devices > 1 else ""),
        chip.source,
        chip.bandwidth / chip.devices,
        f"{chip.name}\u2019s HBM" + (", per device" if chip.devices > 1 else ""),
        chip.source,
    )


def given(flops: float, platform: str = "cpu", device: str = "") -> Peak:
    """The caller's own FLOP/s, beside the chip's published memory bandwidth or this machine's measured one."""
    peak = Peak(float(flops), "", "given as peak_flops", "the caller")
    if platform == "cpu":
        return replace(peak, **_memory())
    chip = CHIPS.get(_KINDS.get(device, device))
    if chip is None:
        return peak
    return replace(peak, bandwidth=chip.bandwidth / chip.devices, bandwidth_label=f"{chip.name}\u2019s HBM", bandwidth_source=chip.source)


@functools.cache
def measured(dtype: str = "f32") -> Peak:
    """This machine's own matmul rate and memory bandwidth: the best of XLA's and PyTorch's, 1.5 s, kept on disk."""
    flops = _stored(dtype, lambda: _measure(dtype))
    here = f"measured here on {cpu_model()}, {_cores()} cores"
    return Peak(flops, dtype, f"this CPU\u2019s {dtype} matmul", here, **_memory())


def _memory() -> dict:
    """This machine's memory bandwidth as the fields of a Peak."""
    return {
        "bandwidth": _stored("memory bandwidth", _measure_bandwidth),
        "bandwidth_label": "this CPU\u2019s memory",
        "bandwidth_source": f"measured here on {cpu_model()}, {_cores()} cores: a + s b over arrays larger than the caches",
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stored(what: str, measure: Callable[[], float]) -> float:
    """The figure kept for this processor and number of cores, else measured now and kept."""
    key = f"{cpu_model()} x{_cores()} {what}"
    value = _read().get(key)
    if not isinstance(value, (int, float)) or value <= 0:
        value = measure()
        _write({**_read(), key: value})
    return float(value)


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return machine.processor() or machine.machine() or "unknown CPU"


def _measure(dtype: str, seconds: float = 1.0) -> float:
    """FLOP/s of the best square matmul in the time given. The best, not the mean: a peak is what is possible."""
    import jax
    import jax.numpy as jnp
    import torch

    best = 0.0
    cpu = jax.devices("cpu")[0]
    deadline = time.perf_counter() + seconds
    for n in (512, 1024, 1536):
        x = jax.device_put(jnp.ones((n, n), {"f32": jnp.float32, "f64": jnp.float64, "bf16": jnp.bfloat16}[dtype]), cpu)
        y = torch.ones(n, n, dtype={"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}[dtype])
        xla = jax.jit(lambda a: a @ a)
        for run in (lambda: xla(x).block_until_ready(), lambda: torch.mm(y, y)):
            run()
            for _ in range(6):
                start = time.perf_counter()
                run()
                best = max(best, 2 * n**3 / (time.perf_counter() - start))
        if time.perf_counter() > deadline:
            break
    return best


def _measure_bandwidth(seconds: float = 0.5) -> float:
    """Bytes/s of the best c = a + s b (two arrays read, one written; STREAM's triad, McCalpin 1995)."""
    import jax
    import jax.numpy as jnp
    import torch

    n = _array_bytes() // 4
    cpu = jax.devices("cpu")[0]
    triad = jax.jit(lambda a, b, c: a + 3.0 * b, donate_argnums=2)
    a, b, *c = (jax.device_put(jnp.full((n,), v, jnp.float32), cpu) for v in (1.0, 2.0, 0.0))

    def xla():
        c[0] = triad(a, b, c[0]).block_until_ready()

    best = _best(xla, 12 * n, seconds / 2)
    c.clear()
    a = b = None
    x, y, z = torch.ones(n), torch.ones(n), torch.empty(n)
    return max(best, _best(lambda: torch.add(x, y, alpha=3.0, out=z), 12 * n, seconds / 2))


def _best(run: Callable, nbytes: int, seconds: float) -> float:
    """Bytes/s of the fastest of at least three runs."""
    run()
    best, deadline, runs = 0.0, time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best, runs = max(best, nbytes / (time.perf_counter() - start)), runs + 1
    return best


def _array_bytes() -> int:
    """Twice the last cache, so that three such arrays cannot lie in it; between 64 and 128 MiB."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="utf-8").strip()
        cache = int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        cache = 32 << 20
    return min(max(2 * cache, 64 << 20), 128 << 20)


def _file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tpu_lab" / "peaks.json"


def _read() -> dict:
    try:
        stored = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _write(stored: dict) -> None:
    """Best effort: a read-only home costs a second at the next start, nothing else."""
    path = _file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(stored, indent=1, sort_keys=True), encoding="utf-8")
        part.replace(path)
    except OSError:
        pass
