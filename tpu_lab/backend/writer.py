"""From notes to records: OpRecords, LaunchRecords, the curve of live bytes and the lives of arrays.

While a profile is active, an op leaves a list of stamps and references in `Trace.log` (recorder.py), a launch another
one (launches.py), and an array that dies its weak reference (live.py). All that can wait is done here, in the order of
the log, when somebody reads the records: mostly once, after the profile has ended. `Trace.writing_ns` says what it cost.
"""

from __future__ import annotations

import bisect
import collections
import gc
import threading
import time
from typing import NamedTuple

from tpu_lab import trace
from tpu_lab.backend import dtypes, memory, where

BATCH = 4096  # notes that a full trace lets come together
forward: dict[int, list] = {}  # the autograd sequence number after it -> the note of the forward op, of the trace that is active
_lock = threading.RLock()
_now = time.thread_time_ns  # what others do meanwhile is not ours
_Op, _Launch, _Held = trace.OpRecord, trace.LaunchRecord, trace.HeldRecord


def of(active: trace.Trace) -> Writer:
    """The writer of a trace."""
    if active.writer is None:
        active.writer = Writer(active)
    return active.writer


class Graph(NamedTuple):
    """The note of the ops of one launch of a compiled graph. forward: what Link keeps of its forward graph."""

    infos: list
    first: int
    launch: int
    phase: str
    site: where.Site
    start: int
    forward: tuple[int, dict] | None


class Writer:
    """Reads the log of one trace from its beginning to its end."""

    def __init__(self, active: trace.Trace) -> None:
        self.trace = active
        self._alive: dict = {}  # id of a reference -> (it, HeldRecord) of what is alive at this place in the log
        self._total = 0  # bytes of those
        self._late: collections.deque = collections.deque()  # (record, note, its slot, call into XLA) of launches that may not be ready, in order
        self._ready = 0  # when the newest finished launch was ready
        self._open: collections.deque = collections.deque(maxlen=64)  # (record, note) of ops whose call had not returned, or failed
        self._step = 0  # optimizer steps finished
        self._cost = 0  # what recording cost, of the last op whose was measured
        self._sizes: dict = {}  # signature -> see _results
        self._sites: dict = {}  # (id of a code object, position) -> (its site, the code object)
        forward.clear()

    def catch_up(self) -> None:
        """Make records of all notes that there are."""
        if not self.trace.log and not self._late:
            return
        with _lock:
            start = _now()
            collecting = gc.isenabled()
            gc.disable()  # it would look at all that is made here again and again, and none of it is garbage
            try:
                self._write()
            finally:
                if collecting:
                    gc.enable()
                self.trace.writing_ns += _now() - start

    def _write(self) -> None:
        log = self.trace.log
        for _ in range(len(self._open)):
            record, note = self._open.popleft()
            record.launch = note[10]
            if note[11]:
                record.host_ns = note[11] - note[1]
            else:
                self._open.append((record, note))
        notes = log[:]
        del log[: len(notes)]
        for note in notes:
            kind = note.__class__
            if kind is list:
                if note[0].__class__ is int:
                    self._launch(*note, note)
                    continue
                if not note[15]:
                    self._op(note)
                    if note[13] is None or note[14]:  # it has no launch yet, or that comes later in the log
                        continue
                if note[15] == 1:
                    self._op_launch(note)
            elif kind is Graph:
                self._graph(*note)
            elif kind is tuple:
                self._told(*note)
            elif kind is frozenset:
                self._left_out(note)
            else:
                self._gone(note)
        self._clock()

    def bound(self) -> None:
        """A full trace: keep its notes few, and forget what the records would need."""
        forward.clear()
        if len(self.trace.log) >= BATCH:
            self.catch_up()

    def _op(self, note) -> None:
        what, start, entered, noted, spot, module, phase, of, again, index, launch, returned = note[:12]
        note[15] = 1
        active = self.trace
        if len(active._ops) >= active.limit:
            active._dropped += 1
            return
        file, line, code = self._site(spot)
        if what.__class__ is tuple:
            name, inputs, outputs, static, kind, fallback = what
            inputs, outputs, flops, size = _texts(inputs), _texts(outputs), 0, 0
        else:
            name, inputs, outputs, static, kind = what.name, what.inputs, what.out_text, what.static, what.record.kind
            fallback, flops, size = False, what.flops, what.nbytes
        if noted:
            self._cost = noted - entered
        record = _Op(
            index, name, inputs, outputs, static, kind, module, file, line, code, phase, of, launch, flops, size, start,
            self._cost, fallback, returned - start if returned else 0, again,
        )  # fmt: skip
        active._ops.append(record)
        if not returned:
            self._open.append((record, note))

    def _graph(self, infos, first, launch, phase, site, start, forward) -> None:
        active, backward = self.trace, phase == "backward"
        fits = max(0, min(len(infos), active.limit - len(active._ops)))
        active._dropped += len(infos) - fits
        begin, known = forward or (0, {})
        for index, info in enumerate(infos[:fits], first):
            at = known.get((info.seq, info.file, info.line) if info.again else info.seq)
            active._ops.append(_Op(
                index, info.name, info.inputs, info.outputs, info.static, info.kind, info.module,
                *((info.file, info.line, info.code) if info.file else site), phase, None if at is None else begin + at, launch,
                info.flops, info.nbytes, start, 0, recomputed=info.again and backward,
            ))  # fmt: skip

    def _left_out(self, indices) -> None:
        """Ops that did not run: they did no work."""
        ops = self.trace._ops
        for index in indices:
            at = bisect.bisect_left(ops, index if index >= 0 else -1 - index, key=lambda op: op.index)
            if at < len(ops) and ops[at].index in (index, -1 - index):
                ops[at].flops = ops[at].bytes = 0
                ops[at].launch = ops[at].launch if index >= 0 else None

    def _site(self, spot):
        if spot is None:
            return where.NOWHERE
        key = id(spot[0]), spot[1]
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = where.read(spot), spot[0]  # the code object stays, and with it its id
        return found[0]

    def _op_launch(self, note) -> None:
        """A launch of one op. Its lookup began when the op was called: it is the same key."""
        note[15] = 2
        (program, before, after, born), made, mode = note[13], note[16], note[17]
        sizes, counts = self._sizes.get(note[0]) or self._results(note[0])
        point, own = len(self.trace._live), note[9]
        for ref, size in zip(born if born.__class__ is list else (born,), sizes):
            self._alive[id(ref)] = ref, _Held(own, point, None, size, "", "")
            self._total += size
        start = min(note[1] + self._cost, before)
        self._launched(note[10], (own,), own, mode, self._site(note[4]), mode, program, made, start, before, after, counts, note, 12)

    def _results(self, sig) -> tuple:
        """(bytes of each result of an op, (inputs, results, none donated)), as its signature says."""
        sizes = [f.base.nbytes for f in sig.fresh] + [sig.windows[i].base.nbytes for i in sig.writes]
        found = self._sizes[sig] = sizes, (len(sig.windows), len(sizes), 0)
        return found

    def _launch(self, _, program, made, mode, start, before, after, noted, index, born, reason, site, ops, newest, at, came, taken,
                counts, note) -> None:  # fmt: skip
        point = len(self.trace._live)
        for ref in taken:
            self._gone(ref, taken=True)
        for ref, size in came:
            self._came(ref, size, point, None, "inputs")
        op = ops[0] if ops else None
        for k, (ref, size) in enumerate(born):
            if at is not None:
                op = ops[at[k]] if at[k] is not None and at[k] < len(ops) else None
            self._came(ref, size, point, op, "")
        if ops and self.trace._ops and self.trace._ops[-1].index == ops[-1] and noted > after:
            self.trace._ops[-1].record_ns += noted - after
        self._launched(index, tuple(ops), newest, reason, site, mode, program, made, start, before, after, counts, note, 0)

    def _launched(self, index, ops, newest, reason, site, mode, program, made, start, before, after, counts, note, slot) -> None:
        active, total, limit = self.trace, self._total, self.trace.limit
        if len(active._live) < limit:
            active._live.append((newest, total))
        else:
            active._dropped += 1
        if total > memory.peak:
            memory.peak = total
        active._programs[program.digest] = program  # hlo(), stablehlo(), lower(platform): what ran, as text
        if len(active._launches) >= limit:
            active._dropped += 1
            return
        steps = active.steps
        while self._step < len(steps) and steps[self._step] <= start:
            self._step += 1
        compile_ns, cache, lookup = 0, "hit", before - start
        if made is not None:
            compile_ns, cache = round(sum(made.seconds) * 1e9), "disk" if made.tier == "disk" else "miss"
            lookup = max(lookup - compile_ns, 0)
        record = _Launch(
            index, ops, cache, reason, *site, mode, program.digest, start, lookup, compile_ns, after - before, 0, program.flops,
            program.nbytes, *counts, self._step,
        )  # fmt: skip
        active._launches.append(record)
        self._late.append((record, note, slot, before))

    def _clock(self) -> None:
        """Device time = ready - max(its dispatch, the one before it ready): in order, as far as it is known."""
        late = self._late
        while late and (ready := late[0][1][late[0][2]]):
            record, _, _, before = late.popleft()
            if ready > 0:
                device = ready - (before if before > self._ready else self._ready)
                record.device_ns, record.ready_ns, self._ready = device if device > 0 else 0, ready, ready

    # --- the lives of arrays ---------------------------------------------------------------------------------------

    def older(self, ref, size: int) -> None:
        """An array that was there before the profile."""
        self._came(ref, size, len(self.trace._live), None, "before")

    def _came(self, ref, size: int, point: int, op: int | None, owner: str) -> None:
        self._alive[id(ref)] = ref, _Held(op, point, None, size, owner, "")
        self._total += size

    def _told(self, ref, size: int | None, owner: str, name: str = "") -> None:
        """It came from the host, of this size; or whose it is."""
        if size is not None:
            self._came(ref, size, len(self.trace._live), None, owner)
        elif (found := self._alive.get(id(ref))) is not None:
            found[1].owner, found[1].name = owner, name

    def _gone(self, ref, taken: bool = False) -> None:
        found = self._alive.pop(id(ref), None)
        if found is not None:
            held = found[1]
            self._total -= held.bytes
            held.died, held.taken = len(self.trace._live), taken
            self._hold(held)

    def _hold(self, held) -> None:
        active = self.trace
        if len(active._held) < active.limit:
            active._held.append(held)
        else:
            active._dropped += 1

    def finish(self) -> None:
        """The trace has ended: the arrays that are alive have no end."""
        self.catch_up()
        active = self.trace
        if active.live and active.live[-1][1] != self._total:  # what went after the last launch
            active.add("live", (active.op_count - 1, self._total))
        for _, held in self._alive.values():
            self._hold(held)
        self._alive.clear()
        self._total = 0
        forward.clear()


def _texts(avals: tuple) -> tuple[str, ...]:
    """("f32[8]", ...) of (size, dtype, size, dtype, ...); texts stay."""
    if not avals or avals[0].__class__ is str:
        return avals
    return tuple(dtypes.aval(size, dtype) for size, dtype in zip(avals[::2], avals[1::2]))
