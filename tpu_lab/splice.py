"""Several short traces of one kind of work as one: what lay between them is cut out of the clock."""

from __future__ import annotations

from dataclasses import replace

from tpu_lab.trace import Trace


def join(traces: list[Trace]) -> Trace:
    """One trace: the records of all, renumbered, each trace beginning when the one before it ended."""
    first = traces[0]
    out = Trace(limit=sum(t.limit for t in traces), start_ns=first.start_ns, meta={**first.meta, "cpu": []})
    clock, ops, launches, ran = first.start_ns, 0, 0, 0.0
    for t in traces:
        shift = clock - t.start_ns
        end = max((ns for what, ns in t.marks if what == "block end"), default=t.end_ns)
        for o in t.ops:
            forward, launch = (None if v is None else v + by for v, by in ((o.forward, ops), (o.launch, launches)))
            out.ops.append(replace(o, index=o.index + ops, forward=forward, launch=launch, time_ns=o.time_ns + shift))
        for r in t.launches:
            ready = r.ready_ns + shift if r.ready_ns else 0
            out.launches.append(
                replace(r, index=r.index + launches, ops=tuple(i + ops for i in r.ops), time_ns=r.time_ns + shift, ready_ns=ready, step=r.step + len(out.steps))
            )  # fmt: skip
        out.compiles += [replace(c, launch=c.launch + launches) for c in t.compiles]
        out.waits += [replace(w, time_ns=w.time_ns + shift) for w in t.waits]
        out.marks += [(what, ns + shift) for what, ns in t.marks if what != "block end"]
        lives = len(out.live)
        for h in t.held:
            over = h.died is None and t is not traces[-1]  # the next trace tells it again, as made before it
            died = lives + len(t.live) if over else None if h.died is None else h.died + lives
            op = None if h.op is None else h.op + ops
            out.held.append(replace(h, op=op, born=h.born + lives, died=died, taken=h.taken or over))
        out.live += [(op + ops, size) for op, size in t.live]
        out.programs.update(t.programs)
        out.dropped += t.dropped
        out.writing_ns += t.writing_ns
        samples = t.meta.get("cpu") or []
        out.meta["cpu"] += [(ns + shift, cpu - samples[0][1] + ran) for ns, cpu in samples]
        ran = out.meta["cpu"][-1][1] if out.meta["cpu"] else 0
        out.steps += [ns + shift for ns in t.steps]
        out.steppers += t.steppers
        ops += max((o.index + 1 for o in t.ops), default=0)
        launches += max((r.index + 1 for r in t.launches), default=0)
        clock = end + shift
    out.end_ns = clock
    out.marks.append(("block end", clock))
    return out
