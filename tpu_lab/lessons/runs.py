"""How a notebook runs a model in the mode of its choice, and counts what ran.

The modes are strict, debug, fused, and "compile", where the model is compiled and all else fused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from tpu_lab.backend import forget
from tpu_lab.profile import Profile

MODES = ("strict", "debug", "fused", "compile")


def eager(mode: str) -> AbstractContextManager:
    """The eager mode inside a block; KeyError for another word than MODES."""
    modes = torch.tpu.EagerMode
    named = {"strict": modes.DEFER_NEVER, "debug": modes.DEFER_NEVER_AND_LAUNCH_BLOCKING, "fused": modes.DEFER_AND_FUSE}
    return torch.tpu.set_eager_mode({**named, "compile": modes.DEFER_AND_FUSE}[mode])


def called(model: torch.nn.Module, mode: str) -> torch.nn.Module:
    """What to call: the model, or, in mode "compile", the compiled one over the same weights."""
    return forget.compiled(model) if mode == "compile" else model


def programs(profile: Profile) -> int:
    """How many different programs ran."""
    return len({launch.key for launch in profile.trace.launches})


def compiling(profile: Profile) -> float:
    """Seconds that went into making programs, or into reading them back from disk."""
    return sum(c.trace_ns + c.lower_ns + c.compile_ns for c in profile.trace.compiles) / 1e9
