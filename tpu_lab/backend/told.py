"""Libraries that ask for each device they know by its name, and take the CPU if none is there: they are told of "tpu".

accelerate (and with it transformers' Trainer and `device_map="auto"`) has no hook for a device outside of its list, and its
variable ACCELERATE_TORCH_DEVICE also overrules `cpu=True`. So two of its answers are completed when it is imported, or at
once if it was imported before: the default device, and the memory of each device. Where it finds another device, or was
told one, its answer stays.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys

import torch

from tpu_lab.backend import memory


def apply() -> None:
    """Complete the answers of what is imported already, and of the rest when it is imported."""
    for name, tell in TOLD.items():
        if name in sys.modules:
            tell(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


def _default_device(module) -> None:
    known = module.PartialState.default_device.fget

    @functools.wraps(known)
    def default_device(self):
        found = known(self)
        return torch.device("tpu", 0) if found.type == "cpu" else found

    module.PartialState.default_device = property(default_device)


def _max_memory(module) -> None:
    known = module.get_max_memory

    @functools.wraps(known)
    def get_max_memory(max_memory=None):
        found = known(max_memory)
        if max_memory is None and not [key for key in found if key != "cpu"]:
            found = {0: memory.mem_get_info()[0], **found}
        return found

    for other in [m for m in list(sys.modules.values()) if m is module or getattr(m, "__name__", "").startswith(("accelerate.", "transformers."))]:
        for name in [name for name, value in vars(other).items() if value is known]:
            setattr(other, name, get_max_memory)


TOLD = {"accelerate.state": _default_device, "accelerate.utils.modeling": _max_memory}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing of its own: what others find is run, and then completed."""

    def find_spec(self, name, path, target=None):
        if name not in TOLD or (spec := importlib.machinery.PathFinder.find_spec(name, path, target)) is None:
            return None
        run = spec.loader.exec_module

        def run_and_tell(module):
            run(module)
            TOLD[name](module)

        spec.loader.exec_module = run_and_tell
        return spec
