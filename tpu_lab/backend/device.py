"""PrivateUse1 becomes "tpu": the name, the hooks, the kernels, and the patches torch needs, each with its reason."""

from __future__ import annotations

import functools
import sys

import jax
import torch

TORCH_MINOR = "2.13"
OWNED = (
    "another backend already owns torch's PrivateUse1 device under the name {name!r}{who}, and a process can have only "
    "one. To use TPU Lab, start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0, which keeps torch from loading it"
)
_registered = False


def register() -> None:
    """Register the device. RuntimeError if another backend owns the name, ImportError if torch does not fit."""
    global _registered
    if _registered:
        return
    _probe()
    _own_the_name()
    jax.config.update("jax_enable_x64", True)  # int64 and float64 tensors are honestly 64-bit
    _without_tracebacks()
    from tpu_lab.backend import disk, guard, kernels, patches, storage, tpu

    storage.DEVICE = torch.device("tpu:0")
    torch._register_device_module("tpu", tpu.module)
    tpu.install()
    guard.install()
    kernels.register()
    patches.apply()
    disk.install()
    _registered = True


def _without_tracebacks() -> None:
    """Each array and each traced operation of jax's remembers the Python stack: 1 to 3 µs of each op, by its depth, and the
    code objects of the user's functions stay alive with our programs. Our records know the user's line themselves.
    """
    from jaxlib import _jax

    if hasattr(_jax, "set_tracebacks_enabled"):
        _jax.set_tracebacks_enabled(False)


def _probe() -> None:
    """The entry points we build on are experimental: look before anything is half registered."""
    if not torch.__version__.startswith(TORCH_MINOR + "."):
        raise ImportError(
            f"tpu_lab is made for torch {TORCH_MINOR}.x, found {torch.__version__}: pip install 'torch=={TORCH_MINOR}.*'"
        )
    missing = [
        name
        for name in (
            "_acc.create_empty_tensor",
            "_acc.register_python_privateuseone_hook",
            "_ImperativeEngine",
            "_construct_storage_from_data_pointer",
            "_dispatch_has_kernel_for_dispatch_key",
            "_current_autograd_node",
        )  # fmt: skip
        if not _has(torch._C, name)
    ]
    if missing:
        raise ImportError(f"torch {torch.__version__} lacks {', '.join(missing)}, which tpu_lab needs")


def _has(where, dotted: str) -> bool:
    try:
        functools.reduce(getattr, dotted.split("."), where)
    except AttributeError:
        return False
    return True


def _own_the_name() -> None:
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        who = " (torch_tpu)" if "torch_tpu" in sys.modules else ""
        raise RuntimeError(OWNED.format(name=name, who=who))
    torch.utils.rename_privateuse1_backend("tpu")
