"""Processes and host memory: DataLoader workers, and pinned memory.

A forked child has the parent's memory but not the threads that run its device. CPU work is fine there; the first use of
"tpu" is one clear error instead of a hang.
"""

from __future__ import annotations

import os
import threading
import warnings

import torch

from tpu_lab.backend import interrupts, state

FORKED = (
    "cannot use device 'tpu' in a forked child process: its threads stayed in the parent. Keep datasets and workers on "
    "the CPU and move batches in the training process, or start processes with the 'spawn' method"
)
_child = False


def in_bad_fork() -> bool:
    """Is this a child that was forked after the device had started?"""
    return _child


class _NoDevice:
    """What a forked child finds in place of the device's lock: every device operation enters it."""

    def __enter__(self):
        raise RuntimeError(FORKED)

    def __exit__(self, *exc):
        return False


def _started() -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _after_fork() -> None:
    global _child
    _child = _child or _started()
    interrupts.after_fork()
    state.lock = _NoDevice() if _child else threading.RLock()  # the parent's other threads may have held the old one


def apply() -> None:
    """Install the fork hook, and make pinning the identity."""
    os.register_at_fork(after_in_child=_after_fork)
    # jax warns of every fork, thus of every DataLoader with workers. The hook above makes the danger an error.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
    torch.Tensor.pin_memory = _pin_memory


_pin = torch.Tensor.pin_memory


def _pin_memory(self, device=None):
    """XLA copies host memory itself, pinned or not, so a CPU tensor is as good as pinned: `DataLoader(pin_memory=True)`."""
    if torch.overrides.has_torch_function_unary(self):
        return torch.overrides.handle_torch_function(_pin_memory, (self,), self, device)
    if self.device.type == "cpu" and (device is None or torch.device(device).type == "tpu"):
        return self
    return _pin(self) if device is None else _pin(self, device)
