"""`tpu_lab.no_recompile(after=2)`: an error that says why, where a step that should run from the cache does not."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Callable

from torch.optim.optimizer import register_optimizer_step_post_hook

from tpu_lab.advice import CHANGES
from tpu_lab.backend import executor
from tpu_lab.backend.cache import Refused, cache
from tpu_lab.place import place


class no_recompile:  # noqa: N801  a context manager is written as a function is
    """After `after` steps, whatever needs a new program raises RuntimeError with the reason, the line and a way out.

        with tpu_lab.no_recompile(after=2):          @tpu_lab.no_recompile(after=2)
            for x, y in loader:                      def step(x, y): ...
                train(x, y)

    In a block a step ends with `optimizer.step()`, or with `guard.step()` (`with ... as guard`), which then counts alone.
    A decorated function's calls are its steps. A program that would be read back from disk counts as one, too: it is
    traced, lowered and loaded, and the step stalls.

    Nothing is half done when it raises: no program was made, and what fused mode has deferred stays deferred and runs when
    its values are asked for outside. What is deferred when a block or a decorated call ends is launched there, so that
    it is looked at, too. Holds for all threads; blocks nest. ValueError for a negative number of steps.
    """

    def __init__(self, after: int = 2) -> None:
        if isinstance(after, bool) or not isinstance(after, int) or after < 0:
            raise ValueError(f"no_recompile(after={after!r}): the number of steps that may compile, 0 or more")
        self.after = after
        self.steps = 0  # that have ended
        self._by_hand = False
        self._last: weakref.ref | None = None  # the graph that held deferred ops of the last allowed step
        self._hooks: list = []

    def __enter__(self) -> no_recompile:
        owner = threading.get_ident()

        def ended(*_):
            if not self._by_hand and threading.get_ident() == owner:
                self._count()

        self._hooks.append(register_optimizer_step_post_hook(ended))
        cache.guards.append(self._check)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if error is None:
                executor.flush("synchronize")
        finally:
            cache.guards.remove(self._check)
            self._hooks.pop().remove()

    def __call__(self, fn: Callable) -> Callable:
        """As a decorator: each call is a step."""
        guard = self.__class__(self.after)
        guard._by_hand = True

        @functools.wraps(fn)
        def guarded(*args, **kwargs):
            with guard:
                value = fn(*args, **kwargs)
            guard._count()
            return value

        return guarded

    def step(self) -> None:
        """A step has ended: what it deferred is launched. Optimizer steps are no longer counted."""
        self._by_hand = True
        executor.flush("mark")
        self._count()

    def _count(self) -> None:
        self.steps += 1
        if self.steps == self.after and executor.graph.nodes:
            self._last = weakref.ref(executor.graph)

    def _check(self, view, site, cause: str, why: str) -> None:
        if self.steps < self.after:
            return
        if view.kind == "fused" and self._last is not None and self._last() is executor.graph:
            return  # it holds ops of a step that may compile
        change = CHANGES.get(cause, "run this code once within the first steps")
        where = f"{site.file}:{site.line}" if place(site.file, site.line) else "an unknown line"
        raise Refused(
            f"{where} needs a new program in step {self.steps + 1}, and no_recompile(after={self.after}) lets none be made "
            f"by then.\n  Why: {why}.\n  Way out: {change}; or allow more steps with after=."
        )
