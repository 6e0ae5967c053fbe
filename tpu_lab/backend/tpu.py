"""The module `torch.tpu`: TorchTPU's public names over this backend."""

from __future__ import annotations

import contextlib
import types

import torch

from tpu_lab.backend import executor, host, memory, precision, rng, state
from tpu_lab.backend.cache import cache
from tpu_lab.backend.state import EagerMode


class _Module(types.ModuleType):
    """`torch.tpu.eager_mode` and `allow_excess_precision` are read and written like variables."""

    @property
    def eager_mode(self) -> EagerMode:
        """The global eager mode. Assign an EagerMode to change it; `set_eager_mode` beats it inside its block."""
        return state.default_mode

    @eager_mode.setter
    def eager_mode(self, value):
        mode = state.as_mode(value)
        with state.lock:
            if mode is not EagerMode.DEFER_AND_FUSE:
                executor.flush("strict")
            state.default_mode = state.last_mode = mode

    @property
    def allow_excess_precision(self) -> bool:
        """May XLA keep more precision inside a fusion than the dtypes say? True by XLA's default."""
        return dict(state.compiler_options).get("xla_allow_excess_precision", True)

    @allow_excess_precision.setter
    def allow_excess_precision(self, value: bool):
        rest = tuple(o for o in state.compiler_options if o[0] != "xla_allow_excess_precision")
        state.compiler_options = rest if value else (*rest, ("xla_allow_excess_precision", False))


def set_eager_mode(mode):
    """Context manager: the eager mode of this thread inside the block."""
    return state.mode_scope(state.as_mode(mode))


def is_available() -> bool:
    """True: the device always exists, on a TPU chip or on XLA's CPU."""
    return True


def is_initialized() -> bool:
    """True once tpu_lab is imported."""
    return True


def device_count() -> int:
    """1: one device a process, as in TorchTPU."""
    return 1


def current_device() -> int:
    """0."""
    return 0


def _index(device) -> int:
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


def set_device(device) -> None:
    """Accepts tpu:0 only; RuntimeError for another index."""
    _index(device)


class device:
    """Context manager over a device index; there is only 0 (or -1, which changes nothing)."""

    def __init__(self, device):
        _index(device)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


class device_of(device):
    """Context manager over a tensor's device."""

    def __init__(self, obj):
        super().__init__(0)


def synchronize(device=None) -> None:
    """Run what is deferred and wait until the device has finished."""
    _index(device)
    host.synchronize()


class Stream:
    """The one stream: XLA orders work itself."""

    def __init__(self, device=None, priority=0, **_):
        self.device = torch.device("tpu:0")
        self.stream_id, self.device_index, self.device_type = 0, 0, 20

    def synchronize(self) -> None:
        """Wait for the device."""
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

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0


class Event:
    """A point in time on the device. `elapsed_time` is in milliseconds; recording waits for the device."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.enable_timing, self._at = enable_timing, None

    def record(self, stream=None) -> None:
        """Wait for the device and take the time."""
        import time

        synchronize()
        self._at = time.perf_counter()

    def elapsed_time(self, end) -> float:
        """Milliseconds from this event to `end`; RuntimeError unless both are recorded with enable_timing=True."""
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("both events need enable_timing=True for elapsed_time")
        if self._at is None or end._at is None:
            raise RuntimeError("both events must be recorded before elapsed_time")
        return (end._at - self._at) * 1e3

    def query(self) -> bool:
        """True: recording has waited."""
        return True

    def wait(self, stream=None) -> None:
        """Work is already in order."""

    def synchronize(self) -> None:
        """Recording has waited."""


_stream = Stream()


def current_stream(device=None) -> Stream:
    """The one stream."""
    return _stream


def default_stream(device=None) -> Stream:
    """The one stream."""
    return _stream


def set_stream(stream) -> None:
    """There is only one stream."""


@contextlib.contextmanager
def stream(stream):
    """There is only one stream."""
    yield


def manual_seed(seed: int) -> None:
    """Seed the device's random numbers."""
    rng.manual_seed(seed)


def initial_seed() -> int:
    """The seed of the current sequence."""
    return rng.initial_seed()


def seed() -> int:
    """Seed from the operating system; returns the seed."""
    value = torch.Generator().seed()
    rng.manual_seed(value)
    return value


def get_rng_state(device="tpu") -> torch.Tensor:
    """uint8 CPU tensor of 16 bytes."""
    _index(device)
    return rng.get_state()


def set_rng_state(new_state, device="tpu") -> None:
    """Restore what get_rng_state gave."""
    _index(device)
    rng.set_state(new_state)


def get_device_name(device=None) -> str:
    """ "TPU v6e" on a chip, "XLA:CPU (TPU Lab)" without one."""
    _index(device)
    return memory.device_name()


def get_device_properties(device=None):
    """name, platform, total_memory (bytes), num_cores."""
    _index(device)
    return memory.properties()


def get_device_capability(device=None) -> tuple[int, int]:
    """(0, 0): CUDA's notion; TPUs have none."""
    return (0, 0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What `torch.autocast("tpu")` may cast to."""
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation=True) -> bool:
    """True."""
    return True


class Precision:
    """How many bfloat16 passes a float32 matmul takes: DEFAULT 1, HIGH 3, HIGHEST 6 (relative error about 2.4e-3, 1.3e-5, 7e-8)."""

    DEFAULT, HIGH, HIGHEST = "default", "high", "highest"


@contextlib.contextmanager
def set_precision(mode):
    """The float32 matmul precision inside the block; ValueError for an unknown one."""
    before = precision.level
    precision.set(mode)
    try:
        yield
    finally:
        precision.set(before)


def _get_cache_stats() -> dict:
    """Counts of the compile cache."""
    return cache.stats()


def _get_cache_hits() -> int:
    return cache.hits


def _get_cache_misses() -> int:
    return cache.misses


def _get_cache_requests() -> int:
    return cache.hits + cache.misses


def _clear_cache() -> None:
    from tpu_lab.backend import dispatch

    with state.lock:
        dispatch.clear()


def _set_cache_only(only: bool) -> None:
    """True: a program that is not cached is an error."""
    cache.only = bool(only)


@contextlib.contextmanager
def _custom_compiler_options(options: dict):
    """XLA options for what is compiled inside the block: {"xla_...": value}."""
    before = state.compiler_options
    with state.lock:
        executor.flush("synchronize")
        state.compiler_options = tuple(sorted({**dict(before), **options}.items()))
    try:
        yield
    finally:
        with state.lock:
            executor.flush("synchronize")
            state.compiler_options = before


module = _Module("torch.tpu", __doc__)
for _name in (
    "EagerMode set_eager_mode is_available is_initialized device_count current_device set_device device device_of synchronize "
    "Stream Event current_stream default_stream set_stream stream manual_seed initial_seed seed get_rng_state set_rng_state "
    "get_device_name get_device_properties get_device_capability get_amp_supported_dtype is_bf16_supported Precision "
    "_get_cache_stats _get_cache_hits _get_cache_misses _get_cache_requests _clear_cache _set_cache_only"
).split():
    setattr(module, _name, globals()[_name])
module.precision = set_precision
module.manual_seed_all = manual_seed
module.seed_all = seed
module.default_generators = (rng.default,)
module._is_in_bad_fork = lambda: False
module.init = lambda: None
module._initialized = True
for _name in memory.PUBLIC:
    setattr(module, _name, getattr(memory, _name))
compiler = types.ModuleType("torch.tpu.compiler", "XLA options")
compiler.custom_compiler_options = _custom_compiler_options
module.compiler = compiler
module.__path__ = []  # a package: torch.tpu.compiler imports
