"""The notes of a compiled launch: one of all ops of the graph, then that of the launch itself. writer.py makes the records."""

from __future__ import annotations

import torch

from tpu_lab import trace
from tpu_lab.backend import launches, recorder, where, writer


class Link:
    """What the graphs of one torch.compile call share; it ties a backward graph to the forward call it belongs to: the
    index of its first op, and the position of each by sequence number, alone and with its line.

    A backward graph takes the line of its forward, as a backward op does.
    """

    def __init__(self, retraced: str = "", names=()):
        self.retraced, self.names = retraced, names  # Dynamo's reason for tracing again; what the user calls the inputs
        self.owner, self.forward, self.site = None, None, where.NOWHERE

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
    """Note one launch and its ops. counts: (inputs, outputs, donated); arrays, out, taken: see live.py."""
    launch, site = active.launch_count, graph.link.site_of(graph.phase)
    phase = "backward" if graph.phase == "backward" else "optimizer" if recorder.optimizer and not torch.is_grad_enabled() else "forward"
    first, infos, link = active.op_count, graph.describe(), graph.link
    active.op_count = first + len(infos)
    if first >= active.limit:
        writer.of(active).bound()
    forward = link.forward if phase == "backward" and link.owner is active else None
    active.log.append(writer.Graph(infos, first, launch, phase, site, start, forward))
    if phase == "forward":
        link.owner, link.forward = active, (first, graph.positions())
    waiting = active.unlaunched
    active.unlaunched = list(range(first, first + len(infos)))
    times = (start, before, after)
    launches.record(active, program, made, "compiled", "compiled", site, times, launches.Counts(*counts), token, arrays, out, program.extra.made, taken)
    active.unlaunched = waiting


def positions(infos) -> dict:
    """Autograd's sequence number of each op -> its position: a backward op has that of its forward op."""
    found: dict = {}
    for at, info in enumerate(infos):
        found.setdefault(info.seq, at)
        # ops without a gradient have the number of the one before them, and so has their repetition
        found.setdefault((info.seq, info.file, info.line), at)
    return found
