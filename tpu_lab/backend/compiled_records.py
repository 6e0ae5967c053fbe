"""The records of a compiled launch: one OpRecord for each node of the graph, then the launch itself."""

from __future__ import annotations

import time

from tpu_lab import trace
from tpu_lab.backend import launches, recorder, where


class Link:
    """What the graphs of one torch.compile call share; it ties a backward graph to the forward call it belongs to: the
    record index of each forward op by sequence number, alone and with its line.

    A backward graph takes the line of its forward, as a backward op does.
    """

    def __init__(self, retraced: str = "", names=()):
        self.retraced, self.names = retraced, names  # Dynamo's reason for tracing again; what the user calls the inputs
        self.owner, self.ops, self.site = None, {}, where.NOWHERE

    def input_name(self, node) -> str:
        """What the user calls a placeholder of an AOTAutograd graph, or the placeholder's own name."""
        given = node.meta.get("desc")
        if type(given).__name__ == "PlainAOTInput" and given.idx < len(self.names):
            return self.names[given.idx]
        if type(given).__name__ == "TangentAOTInput":
            return "a gradient that comes in"
        return node.name

    def site_of(self, phase: str) -> where.Site:
        """The user's line for a launch or a compile now."""
        if phase != "backward" or not self.site.file:
            self.site = where.site(2)
        return self.site


def write(graph, active: trace.Trace, program, made, start, before, after, counts, token, arrays, out, taken) -> None:
    """Append the records of one launch. counts: (inputs, outputs, donated); arrays, out, taken: see live.py."""
    began = time.perf_counter_ns()
    launch, site = active.launch_count, graph.link.site_of(graph.phase)
    phase = "backward" if graph.phase == "backward" else "optimizer" if recorder.optimizer else "forward"
    first = active.op_count
    infos, link = graph.describe(), graph.link
    active.op_count = first + len(infos)
    known = link.ops if phase == "backward" and link.owner is active else {}
    each = 0
    for index, info in enumerate(infos, first):
        file, line, code = (info.file, info.line, info.code) if info.file else site
        record = trace.OpRecord(
            index, info.name, info.inputs, info.outputs, info.static, info.kind, info.module, file, line, code, phase,
            known.get((info.seq, info.file, info.line) if info.again else info.seq), launch, info.flops, info.nbytes, start, each,
            recomputed=info.again and phase == "backward",
        )  # fmt: skip
        active.add("ops", record)
        each = each or time.perf_counter_ns() - began
    if phase == "forward":
        link.owner, link.ops = active, {}
        for index, info in enumerate(infos, first):
            link.ops.setdefault(info.seq, index)
            # ops without a gradient have the number of the one before them, and so has their repetition
            link.ops.setdefault((info.seq, info.file, info.line), index)
    waiting = active.unlaunched
    active.unlaunched = list(range(first, first + len(infos)))
    times = (start, before, after)
    launches.record(active, program, made, "compiled", "compiled", site, times, launches.Counts(*counts), token, arrays, out, program.extra.made, taken)
    active.unlaunched = waiting
