"""The module `torch.tpu`: TorchTPU's public names over this backend."""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import sys
import types

import torch

from tpu_lab.backend import executor, forks, memory, pallas, precision, rng, state, streams
from tpu_lab.backend.cache import cache
from tpu_lab.backend.state import EagerMode
from tpu_lab.backend.streams import index_of


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
    """Context manager and decorator: the eager mode of this thread inside the block. Alone it changes nothing, and warns."""
    return state.Scope(mode)


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


def set_device(device) -> None:
    """Accepts tpu:0 only; RuntimeError for another index."""
    index_of(device)


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
    index_of(device)
    return rng.get_state()


def set_rng_state(new_state, device="tpu") -> None:
    """Restore what get_rng_state gave."""
    index_of(device)
    rng.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """get_rng_state of every device: there is one."""
    return [rng.get_state()]


def set_rng_state_all(new_states) -> None:
    """Restore what get_rng_state_all gave."""
    for new_state in new_states:
        rng.set_state(new_state)


def get_device_name(device=None) -> str:
    """ "TPU v6e" on a chip, "XLA:CPU (TPU Lab)" without one."""
    index_of(device)
    return memory.device_name()


def get_device_properties(device=None):
    """name, platform, total_memory (bytes), num_cores."""
    index_of(device)
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


class Precision(enum.Enum):
    """How many bfloat16 passes a float32 matmul takes: DEFAULT 1, HIGH 3, HIGHEST 6 (relative error about 2.4e-3, 1.3e-5, 7e-8).

    On a CPU the passes are computed one by one, so that the error is the chip's.
    """

    DEFAULT = "default"
    HIGH = "high"
    HIGHEST = "highest"


@contextlib.contextmanager
def set_precision(mode):
    """The float32 matmul precision inside the block: a Precision or its name; ValueError for an unknown one."""
    with precision.scope(mode.value if isinstance(mode, Precision) else str(mode).lower()):
        yield


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


def _package(name: str, doc: str, kind=types.ModuleType):
    """A module that `import` finds: torch.tpu has no files."""
    made = kind(name, doc)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    return made


module = _package("torch.tpu", __doc__, _Module)
for _name in (
    "EagerMode set_eager_mode is_available is_initialized device_count current_device set_device manual_seed initial_seed seed "
    "get_rng_state set_rng_state get_rng_state_all set_rng_state_all "
    "get_device_name get_device_properties get_device_capability get_amp_supported_dtype is_bf16_supported Precision "
    "_get_cache_stats _get_cache_hits _get_cache_misses _get_cache_requests _clear_cache _set_cache_only"
).split():
    setattr(module, _name, globals()[_name])
for _name in "device device_of synchronize Stream Event current_stream set_stream stream".split():
    setattr(module, _name, getattr(streams, _name))
for _name in memory.PUBLIC:
    setattr(module, _name, getattr(memory, _name))
module.default_stream = streams.current_stream
module.precision = set_precision
module.manual_seed_all = manual_seed
module.seed_all = seed
module.default_generators = (rng.default,)
module._is_in_bad_fork = forks.in_bad_fork
module.init = lambda: None
module._initialized = True  # torch.utils.checkpoint saves the random state only of a device that is initialised
compiler = _package("torch.tpu.compiler", "XLA options for what is compiled inside a block")
compiler.custom_compiler_options = _custom_compiler_options
module.compiler = compiler
module.pallas = _package("torch.tpu.pallas", pallas.__doc__)
module.pallas.jax_op = pallas.jax_op


def install() -> None:
    """Let `import torch.tpu.compiler` and the like find the modules."""
    sys.modules.update({m.__name__: m for m in (module, compiler, module.pallas)})
