"""`torch.accelerator` over this device. Its own functions ask C++ for an allocator, which a Python device cannot have: they
assert, and `empty_host_cache` even ends the process."""

from __future__ import annotations

import functools
from collections import OrderedDict

import torch

from tpu_lab.backend import dtypes, memory, streams


def apply() -> None:
    """Install them. They act only while "tpu" is the current accelerator."""

    def memory_stats(device_index=None, /):
        return OrderedDict(sorted(memory.memory_stats(device_index).items()))

    def get_device_capability(device=None, /):
        return {"supported_dtypes": set(dtypes._TO_JAX)}

    ours = {
        "synchronize": streams.synchronize,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "empty_cache": memory.empty_cache,
        "empty_host_cache": memory.empty_cache,
        "memory_stats": memory_stats,
        "memory_allocated": memory.memory_allocated,
        "max_memory_allocated": memory.max_memory_allocated,
        "memory_reserved": memory.memory_reserved,
        "max_memory_reserved": memory.max_memory_reserved,
        "reset_peak_memory_stats": memory.reset_peak_memory_stats,
        "reset_accumulated_memory_stats": memory.reset_peak_memory_stats,
        "get_memory_info": memory.mem_get_info,
        "get_device_capability": get_device_capability,
    }
    for name, function in ours.items():
        for where in (torch.accelerator, torch.accelerator.memory):
            if hasattr(where, name):
                setattr(where, name, _choosing(getattr(where, name), function))


def _choosing(original, ours):
    @functools.wraps(original)
    def chosen(*args, **kwargs):
        current = torch.accelerator.current_accelerator()
        return (ours if current is not None and current.type == "tpu" else original)(*args, **kwargs)

    return chosen
