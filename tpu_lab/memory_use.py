"""What the device held, when, and who held it: the curve of live bytes in bands, and the holders at one moment.

`Trace.live` has a point after each launch; `Trace.held` has the life of each array behind it, so at each point the
holders' bytes sum to the point's. What a program needs while it runs, its temporary buffers, is in neither: it is the
compiler's own figure (`scratch`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tpu_lab.metrics import Metrics
from tpu_lab.place import family, op_name, stem
from tpu_lab.trace import HeldRecord, LaunchRecord, OpRecord

BANDS = ("weights", "optimizer", "gradients", "activations", "other")
WORDS = {"inputs": "copied from the host", "before": "made before the profile", "": "results without a known op"}


@dataclass(frozen=True)
class Holding:
    """What one line, or one owner, holds at a moment. band: one of BANDS; tensors: how many arrays."""

    name: str
    band: str
    file: str
    line: int
    phase: str
    tensors: int
    bytes: int


class MemoryUse:
    """The memory of one trace; `first` and `last` bound the points of the step that is drawn."""

    def __init__(self, m: Metrics) -> None:
        self.m, self.live = m, m.trace.live
        self.at = np.array([op for op, _ in self.live], dtype=np.int64)  # op index of each point
        self.bytes = np.array([n for _, n in self.live], dtype=np.int64)
        ops = m.ops_in(m.span)
        if m.steady and ops:
            low, high = ops[0].index, ops[-1].index
            inside = np.flatnonzero((self.at >= low) & (self.at <= high))
        else:
            inside = np.arange(len(self.at))
        self.first, self.last = (int(inside[0]), int(inside[-1])) if len(inside) else (0, -1)

    @cached_property
    def peak(self) -> int:
        """The point of the step with most bytes."""
        return self.first + int(np.argmax(self.bytes[self.first : self.last + 1]))

    @cached_property
    def highest(self) -> int:
        """The point of the whole block with most bytes."""
        return int(np.argmax(self.bytes))

    @cached_property
    def _changes(self) -> dict[str, np.ndarray]:
        """Bytes that came, that went before a launch, and that a launch took over, at each point by band."""
        n = len(self.live)
        out = {band: np.zeros((3, n + 1), dtype=np.int64) for band in BANDS}
        for record in self.m.trace.held:
            own = out[self.band(record)]
            own[0, min(record.born, n)] += record.bytes
            if record.died is not None:
                own[2 if record.taken else 1, min(record.died, n)] += record.bytes
        return out

    @cached_property
    def bands(self) -> dict[str, np.ndarray]:
        """Bytes by band after each launch; they sum to `bytes`, what no record explains being "other"."""
        out = {band: np.cumsum(came - went - taken)[:-1] for band, (came, went, taken) in self._changes.items()}
        out["other"] = out["other"] + self.bytes - sum(out.values())
        return out

    @cached_property
    def kept(self) -> dict[str, np.ndarray]:
        """`bands` without what was let go before the next launch: the level in between, as most of it goes at once."""
        return {band: self.bands[band] - went[1:] for band, (_, went, _) in self._changes.items()}

    def band(self, record: HeldRecord) -> str:
        """Where an array belongs: its owner, else the way of the op that made it."""
        if record.owner in BANDS:
            return record.owner
        op = self._op(record)
        if record.owner or op is None:
            return "other"
        if op.phase == "backward":
            return "activations" if op.recomputed else "gradients"
        return "other" if op.phase == "optimizer" else "activations"

    def holders(self, point: int) -> list[HeldRecord]:
        """The arrays alive at a point."""
        return [h for h in self.m.trace.held if h.born <= point and (h.died is None or h.died > point)]

    def holdings(self, point: int) -> list[Holding]:
        """The holders at a point by owner, or by module and line, most bytes first; they sum to the point's bytes."""
        groups: dict[tuple, list[HeldRecord]] = {}
        for record in self.holders(point):
            op = self._op(record)
            if record.owner or op is None:
                key: tuple = (record.owner if record.owner in BANDS or record.owner in WORDS else "",)
            else:
                key = (self.band(record), op.file, op.line, stem(op.module), op.phase)
            groups.setdefault(key, []).append(record)
        out = [self._holding(key, records) for key, records in groups.items()]
        rest = int(self.bytes[point]) - sum(h.bytes for h in out)
        if rest:
            out.append(Holding("records that were dropped", "other", "", 0, "", 0, rest))
        return sorted(out, key=lambda h: (-h.bytes, h.name, h.line))

    def _holding(self, key: tuple, records: list[HeldRecord]) -> Holding:
        total = sum(r.bytes for r in records)
        if len(key) == 1:
            owner = key[0]
            name = {"optimizer": f"{self.optimizer}\u2019s state" if self.optimizer != "optimizer" else "optimizer state", "gradients": "gradients of the weights"}.get(owner, WORDS.get(owner, owner))
            return Holding(name, owner if owner in BANDS else "other", "", 0, "", len(records), total)
        band, file, line, _, phase = key
        made: Counter = Counter()
        ops = [op for r in records if (op := self._op(r)) is not None]
        for r, op in zip(records, ops, strict=True):
            made[op_name(op.name)] += r.bytes
        names = [n for n, _ in made.most_common(3)]
        what = ", ".join(names[:2]) + (" \u2026" if len(names) > 2 else "")
        module = "" if phase == "optimizer" else family(op.module for op in ops)
        return Holding(f"{module}: {what}" if module else what, band, file, line, phase, len(records), total)

    @cached_property
    def optimizer(self) -> str:
        """AdamW, as the records call it."""
        return next((op.module for op in self.m.trace.ops if op.phase == "optimizer" and op.module), "optimizer")

    @cached_property
    def _numbered(self) -> dict[int, OpRecord]:
        return {op.index: op for op in self.m.trace.ops}

    def op(self, index: int) -> OpRecord | None:
        """The op with this index, if it was kept."""
        return self._numbered.get(index)

    def _op(self, record: HeldRecord) -> OpRecord | None:
        return self._numbered.get(record.op) if record.op is not None else None

    def op_at(self, point: int) -> OpRecord | None:
        """The newest op at a point."""
        return self._numbered.get(int(self.at[point]))

    def launch_at(self, point: int) -> LaunchRecord | None:
        """The launch after which a point was taken; None for what the end of the block added."""
        launches = self.m.trace.launches
        return launches[point] if point < len(launches) else None

    @cached_property
    def scratch(self) -> list[tuple[LaunchRecord, int]]:
        """(launch, bytes of temporary buffers, the compiler's figure) for the step's launches that have some."""
        launches = self.m.launches_in(self.m.span)
        asked = {key: getattr(self.m.trace.programs.get(key), "scratch", None) for key in {r.key for r in launches}}
        sizes = {key: ask() for key, ask in asked.items() if ask is not None}
        return [(r, n) for r in launches if (n := sizes.get(r.key))]


def of(m: Metrics) -> MemoryUse:
    """The memory of these metrics, worked out once."""
    if "_memory" not in vars(m):
        vars(m)["_memory"] = MemoryUse(m)
    return vars(m)["_memory"]
