"""The compile cache: a structured key -> one executable. Every mode and torch.compile go through it.

A key is what makes a program what it is: its nodes with their signatures, which values are alive, what is donated,
the options. It stays readable, so a miss can be explained against the nearest earlier key (causes.py). Programs hold
no tensor alive. Memory is bounded: the least recently used go first. The disk tier is jax's own persistent cache
(disk.py); a jax monitoring event tells us when it served.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field

import jax

from tpu_lab import trace
from tpu_lab.backend import causes, interrupts, where

LIMIT = 4096  # programs kept in memory


@dataclass(slots=True, eq=False)
class Program:
    """One executable. `call(*args)` runs it; the figures are filled in when it is made."""

    key: tuple
    digest: str
    call: object
    view: causes.View  # what causes.py compares
    flops: int = 0
    nbytes: int = 0
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)  # tracing, lowering, compiling
    tier: str = "compiled"
    cause: str = "first"
    why: str = ""
    site: str = ""
    used: int = 0
    compiled: object = field(default=None, repr=False)
    extra: object = field(default=None, repr=False)  # what torch.compile must know to use the results
    avals: tuple = field(default=(), repr=False)  # shapes and dtypes it was made for
    quick: int = 0  # launches in a row that were done when their dispatch returned: see launches.py
    dead: tuple = ()  # numbers of its ops that no result needs: they do not run
    needs: int = 0  # bytes of its results and temporary buffers

    def hlo(self) -> str:
        """The optimised HLO text. A scope "<index>:<op>" in an instruction's op_name is the index-th op of a launch."""
        return self.compiled.as_text()

    def scratch(self, results: bool = False) -> int | None:
        """Bytes of temporary buffers while it runs, as the compiler planned them; None when it does not say.

        results: with those of its results that no input makes room for.
        """
        try:
            plan = self.compiled.memory_analysis()
            fresh = plan.output_size_in_bytes - plan.alias_size_in_bytes if results else 0
            return int(plan.temp_size_in_bytes + fresh)
        except (AttributeError, NotImplementedError, RuntimeError):
            return None

    def lower(self, platform: str | None = None):
        """The program traced and lowered again (jax.stages.Lowered), for "cpu" or "tpu": needs no such device."""
        traced = self.call.trace(*self.avals)
        return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))

    def stablehlo(self, platform: str | None = None) -> str:
        """The StableHLO text, with locations."""
        return self.lower(platform).as_text(debug_info=True)


class Refused(RuntimeError):
    """A program would have to be made, and somebody asked that none be."""


class Cache:
    """The programs by key, with counts."""

    def __init__(self):
        self.programs: dict[tuple, Program] = {}
        self.hits = self.misses = self.disk_hits = 0
        self.clock = 0
        self.earlier = causes.Earlier()  # what a miss is compared with
        self.only = False  # _set_cache_only(True): a miss is an error
        self.guards: list = []  # called with (view, site, cause, why) before a program is made: may raise Refused

    def get(self, key: tuple) -> Program | None:
        program = self.programs.get(key)
        if program is not None:
            self.hits += 1
            self.clock += 1
            program.used = self.clock
        return program

    def add(self, key: tuple, jitted, args: tuple, view: causes.View, flops: int, nbytes: int, site=None) -> Program:
        """Trace, lower and compile `jitted` for `args` (arrays or avals), and keep it.

        Refused when only cached programs may run (`torch.tpu._set_cache_only`, `tpu_lab.no_recompile`); then nothing
        has run and nothing is kept.
        """
        site = site or where.compile_site()
        cause, why = causes.explain(view, self.earlier)
        if self.only:
            raise Refused(f"{site.file}:{site.line} needs a new program ({why}), and only cached programs may run")
        for guard in tuple(self.guards):
            guard(view, site, cause, why)
        with interrupts.hold():
            t0 = time.perf_counter()
            traced = jitted.trace(*args)
            t1 = time.perf_counter()
            lowered = traced.lower()
            _disk_event.hit = False  # only now: tracing may compile small things of its own
            t2 = time.perf_counter()
            compiled = lowered.compile()
            t3 = time.perf_counter()
        self.misses += 1
        self.clock += 1
        tier = "disk" if _disk_event.hit else "compiled"
        self.disk_hits += tier == "disk"
        program = self.programs[key] = Program(
            key, digest(key), jitted, view, flops, nbytes, (t1 - t0, t2 - t1, t3 - t2), tier, cause, why,
            f"{site.file}:{site.line}", self.clock, compiled, avals=jax.tree.map(_aval, args),
        )  # fmt: skip
        program.needs = program.scratch(results=True) or 0
        self.earlier.add(view)
        if len(self.programs) > LIMIT:
            self._evict()
        return program

    def _evict(self):
        for old in sorted(self.programs.values(), key=lambda p: p.used)[: LIMIT // 8]:
            del self.programs[old.key]
        self.earlier = causes.Earlier(p.view for p in self.programs.values())

    def clear(self) -> None:
        """Forget all programs (counts stay)."""
        self.programs.clear()
        self.earlier = causes.Earlier()

    def stats(self) -> dict:
        """hits, misses, requests, disk_hits, programs; seconds spent tracing, lowering, compiling."""
        spent = [sum(p.seconds[i] for p in self.programs.values()) for i in range(3)]
        return {
            "hits": self.hits,
            "misses": self.misses,
            "requests": self.hits + self.misses,
            "disk_hits": self.disk_hits,
            "programs": len(self.programs),
            "seconds_tracing": spent[0],
            "seconds_lowering": spent[1],
            "seconds_compiling": spent[2],
        }


def _aval(value):
    """The shape of an argument without its memory; what is no array stays."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "dtype") else value


def digest(key: tuple) -> str:
    """A short name for a key within this process."""
    return hashlib.blake2b(repr(key).encode(), digest_size=5).hexdigest()


class _DiskEvent(threading.local):
    hit = False


_disk_event = _DiskEvent()


def _listen(event: str, **_):
    if event == "/jax/compilation_cache/cache_hits":
        _disk_event.hit = True


jax.monitoring.register_event_listener(_listen)
cache = Cache()


def record_compile(program: Program, launch: int) -> trace.CompileRecord:
    """The record of a program that was just made."""
    a, b, c = (round(s * 1e9) for s in program.seconds)
    return trace.CompileRecord(
        launch, program.digest, program.tier, a, b, c, program.why, program.cause, program.site, program.hlo
    )
