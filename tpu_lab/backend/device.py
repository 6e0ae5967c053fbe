"""PrivateUse1 becomes "tpu": the name, the hooks, the kernels, and the patches torch needs, each with its reason."""

from __future__ import annotations

import functools
import itertools
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
    from tpu_lab.backend import disk, kernels, patches, storage, tpu

    storage.DEVICE = torch.device("tpu:0")
    torch._register_device_module("tpu", tpu.module)
    tpu.install()
    torch._C._acc.register_python_privateuseone_hook(_hooks)
    torch._C._acc.register_python_privateuseone_device_guard(_guard)
    kernels.register()
    patches.apply()
    disk.install()
    _registered = True


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


# torch's C++ calls these methods also where nothing may be thrown (each stream that autograd asks for). A Python function
# would run bytecode there, between two of which Ctrl-C can arrive: the process would end in std::terminate. So they are
# slots of C objects, which run none: the next item of an endless repetition, the membership test of a range.


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """What torch's C++ asks an accelerator: it is there, it is built, and every context exists."""

    is_available = itertools.repeat(True).__next__
    is_built = itertools.repeat(True).__next__
    has_primary_context = range(-1, 1).__contains__


class Guard(torch._C._acc.DeviceGuard):
    """One device a process: index 0."""

    type_ = itertools.repeat(torch._C._autograd.DeviceType.PrivateUse1).__next__


_hooks, _guard = Hooks(), Guard()  # torch keeps bare pointers: these must live as long as the process
