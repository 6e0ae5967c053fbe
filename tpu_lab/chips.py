"""Peaks: what a chip can do at most, with the source of each figure; and this machine's own, measured once.

A peak without a source is worth nothing, so each `Peak` carries its label and its source, and what prints an MFU
prints them, too. TPU figures are dense bf16 FLOP/s and bytes/s of HBM per *chip*, from Google's published system
architecture pages; a chip with two devices (v4, v7x) is divided by two for a figure per device.
"""

from __future__ import annotations

import functools
import json
import os
import platform as machine
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Peak:
    """flops: FLOP/s per device; bandwidth: bytes/s of main memory per device, None if unknown."""

    flops: float
    dtype: str
    label: str  # "this CPU's f32 matmul": goes behind the number
    source: str
    bandwidth: float | None = None


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
    )


@functools.cache
def measured(dtype: str = "f32") -> Peak:
    """This machine's own matmul rate: the best of XLA's and PyTorch's, over several sizes, 1 s, kept on disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    key = f"{cpu_model()} x{cores} {dtype}"
    stored = _read()
    flops = stored.get(key)
    if not isinstance(flops, (int, float)) or flops <= 0:
        flops = _measure(dtype)
        _write({**stored, key: flops})
    return Peak(
        float(flops), dtype, f"this CPU\u2019s {dtype} matmul", f"measured here on {cpu_model()}, {cores} cores"
    )


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
