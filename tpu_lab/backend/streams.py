"""Streams and events of `torch.tpu`. XLA orders all work itself: there is one stream, and recording an event waits."""

from __future__ import annotations

import contextlib
import time

import torch

from tpu_lab.backend import host


def index_of(device) -> int:
    """0 for None, 0, -1, "tpu", "tpu:0"; RuntimeError for another index, ValueError for another kind of device."""
    if device is None:
        return 0
    if isinstance(device, int):
        index = device
    else:
        device = torch.device(device)
        if device.type != "tpu":
            raise ValueError(f"expected a tpu device, got {device}")
        index = device.index or 0
    if index not in (0, -1):
        raise RuntimeError(f"there is no tpu:{index}: a process has one TPU device, tpu:0")
    return 0


def synchronize(device=None) -> None:
    """Run what is deferred and wait until the device has finished."""
    index_of(device)
    host.synchronize()


class device:
    """Context manager over a device index; there is only 0 (or -1, which changes nothing)."""

    def __init__(self, device):
        index_of(device)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


class device_of(device):
    """Context manager over a tensor's device."""

    def __init__(self, obj):
        super().__init__(0)


class Stream(torch.Stream):
    """The one stream: XLA orders work itself."""

    def __new__(cls, device=None, priority=0, **_):
        index_of(device)
        return super().__new__(cls, device="tpu:0")

    def __init__(self, *args, **kwargs):
        super().__init__()

    def synchronize(self) -> None:
        """Run what is deferred and wait for the device."""
        synchronize()

    def wait_stream(self, stream) -> None:
        """Work is already in order."""

    def wait_event(self, event) -> None:
        """Work is already in order."""

    def record_event(self, event=None):
        """An event at this point of the stream."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """True: nothing is left to do after a synchronize."""
        synchronize()
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def __eq__(self, other):
        return isinstance(other, torch.Stream) and other.device_type == self.device_type

    def __hash__(self):
        return 0

    def __repr__(self):
        return "<torch.tpu.Stream device=tpu:0>"


class Event:
    """A point in time on the device. `elapsed_time` is in milliseconds; recording waits for the device."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.enable_timing, self._at = enable_timing, None

    def record(self, stream=None) -> None:
        """Run what is deferred, wait for the device and take the time."""
        synchronize()
        self._at = time.perf_counter_ns()

    def elapsed_time(self, end) -> float:
        """Milliseconds from this event to `end`; RuntimeError unless both are recorded with enable_timing=True."""
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("both events need enable_timing=True for elapsed_time")
        if self._at is None or end._at is None:
            raise RuntimeError("both events must be recorded before elapsed_time")
        return (end._at - self._at) / 1e6

    def query(self) -> bool:
        """True: recording has waited."""
        return True

    def wait(self, stream=None) -> None:
        """Work is already in order."""

    def synchronize(self) -> None:
        """Recording has waited."""


_stream = None


def current_stream(device=None) -> Stream:
    """The one stream."""
    global _stream
    index_of(device)
    if _stream is None:  # the name "tpu" must exist first
        _stream = Stream()
    return _stream


def set_stream(stream) -> None:
    """There is only one stream."""


@contextlib.contextmanager
def stream(stream):
    """There is only one stream."""
    yield
