"""Device memory: what live arrays hold, and what the device is."""

from __future__ import annotations

import os
import types

import jax

from tpu_lab import trace

PUBLIC = (
    "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "memory_reserved", "max_memory_reserved",
    "memory_stats", "mem_get_info", "empty_cache", "reset_max_memory_allocated",
)  # fmt: skip
peak = 0  # bytes; a profile raises it, too


def _live() -> int:
    return sum(a.nbytes for a in jax.live_arrays())


def memory_allocated(device=None) -> int:
    """Bytes of all arrays alive on the device (deferred results do not exist yet)."""
    global peak
    now = _live()
    peak = max(peak, now)
    return now


def _seen() -> None:
    """Let an active profile raise `peak` by what it has noted so far."""
    if trace.active is not None and trace.active.writer is not None:
        trace.active.writer.catch_up()


def max_memory_allocated(device=None) -> int:
    """The highest memory since the last reset: the chip's own count on a TPU; elsewhere the highest that these calls saw,
    and while a profile is active, that any launch left behind."""
    _seen()
    stats = jax.devices()[0].memory_stats() or {}
    return max(stats.get("peak_bytes_in_use", 0), peak, memory_allocated())


def reset_peak_memory_stats(device=None) -> None:
    """Restart the peak from what is alive now."""
    global peak
    _seen()
    peak = _live()


def memory_stats(device=None) -> dict:
    """allocated_bytes.all.current / .peak, and what the platform itself reports."""
    return {
        "allocated_bytes.all.current": memory_allocated(),
        "allocated_bytes.all.peak": max_memory_allocated(),
        **(jax.devices()[0].memory_stats() or {}),
    }


def mem_get_info(device=None) -> tuple[int, int]:
    """(free, total) bytes of the device; on the CPU those of the machine."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0), stats["bytes_limit"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:  # Linux: what programs can get, so with the caches that would make way, and with free swap
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":") for line in file)
        free = sum(int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        free = total - memory_allocated()
    return free, total


def empty_cache() -> None:
    """Nothing is held back: arrays are freed when their last tensor goes."""


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated
reset_max_memory_allocated = reset_peak_memory_stats


def device_name() -> str:
    """The chip's name, or XLA:CPU."""
    kind = jax.devices()[0]
    return kind.device_kind if kind.platform == "tpu" else "XLA:CPU (TPU Lab)"


def properties():
    """name, platform, total_memory in bytes, num_cores."""
    kind = jax.devices()[0]
    cores = os.cpu_count() if kind.platform == "cpu" else 1
    return types.SimpleNamespace(
        name=device_name(), platform=kind.platform, total_memory=mem_get_info()[1], num_cores=cores, index=0
    )
