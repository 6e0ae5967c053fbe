"""How a notebook runs a model in the mode of its choice, and counts what ran.

The modes are strict, debug, fused, and "compile", where the model is compiled and all else fused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from tpu_lab.backend import forget
from tpu_lab.profile import Profile

MODES = ("strict", "debug", "fused", "compile")
Made = TypeVar("Made")


def eager(mode: str) -> AbstractContextManager:
    """The eager mode inside a block; KeyError for another word than MODES."""
    modes = torch.tpu.EagerMode
    named = {"strict": modes.DEFER_NEVER, "debug": modes.DEFER_NEVER_AND_LAUNCH_BLOCKING, "fused": modes.DEFER_AND_FUSE}
    return torch.tpu.set_eager_mode({**named, "compile": modes.DEFER_AND_FUSE}[mode])


def called(model: torch.nn.Module, mode: str) -> torch.nn.Module:
    """What to call: the model, or, in mode "compile", the compiled one over the same weights."""
    return forget.compiled(model) if mode == "compile" else model


def once(held: dict[Hashable, Made], settings: Hashable, make: Callable[[], Made]) -> Made:
    """What was made last when it was for the same settings, else what `make` gives now.

    A training starts from a seed, so the same settings give the same. The second press of a double click waits until the
    first has trained, and would do all of it again.
    """
    if settings not in held:
        held.clear()
        held[settings] = make()
    return held[settings]


def programs(profile: Profile) -> int:
    """How many different programs ran."""
    return len({launch.key for launch in profile.trace.launches})


def compiling(profile: Profile) -> float:
    """Seconds that went into making programs, or into reading them back from disk."""
    return sum(c.trace_ns + c.lower_ns + c.compile_ns for c in profile.trace.compiles) / 1e9
