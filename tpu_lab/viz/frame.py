"""Words that every view says the same way: the line of provenance, why there is nothing to show, the phase's name."""

from __future__ import annotations

from collections import Counter

from tpu_lab.metrics import Metrics
from tpu_lab.place import place, short_file
from tpu_lab.viz import number

WAY = {"forward": ("\u2192 fwd", "forward"), "backward": ("\u2190 bwd", "backward"), "optimizer": ("", "optimizer")}


def provenance(m: Metrics) -> list[tuple[str, bool]]:
    """(text, bold) pieces: name, file and lines, steps, mode, compiler, cores, dtype."""
    meta = m.trace.meta
    out = [(str(meta["name"]), False)] if meta.get("name") else []
    if meta.get("file"):
        end = meta.get("end_line")
        span = f"\u2013{end}" if end and end != meta.get("line") else ""
        out.append((f"{short_file(meta['file'])}:{meta.get('line')}{span}", False))
    if m.steps:
        n, steady = len(m.steps), len(m.steady)
        out.append((number.plural(n, "step") + (f", {steady} steady" if steady and steady < n else ""), False))
        if cut := sum(s.cut for s in m.steps):
            out.append((f"{number.count(n - cut)} recorded whole, then the limit of {number.plural(m.trace.limit, 'record')}", True))
    if meta.get("mode"):
        others = dict.fromkeys(r.mode for r in m.trace.launches if r.mode not in ("compiled", meta["mode"]))
        out.append((" and ".join([str(meta["mode"]), *others]), True))
    if compiler := meta.get("compiler"):
        out.append((compiler + (f", jax {meta['jax']}" if meta.get("jax") else "") + cores(meta), False))
    if kind := dtype(m):
        out.append((kind, False))
    if meta.get("error"):
        out.append((f"stopped by {meta['error']}"[:160], True))
    return out


def meta_lines(meta, width: int = 98) -> list:
    """The line of provenance for a terminal, in as many lines as it needs."""
    lines: list[str] = []
    for text, _ in meta:
        if lines and len(lines[-1]) + 3 + len(text) <= width:
            lines[-1] += f" \u00b7 {text}"
        else:
            lines.append(text)
    return [[(line, "dim")] for line in lines]


def cores(meta: dict) -> str:
    return f", {number.plural(meta['cores'], 'core')}" if meta.get("platform") == "cpu" and meta.get("cores") else ""


def dtype(m: Metrics) -> str:
    """The dtype that most matmuls of the drawn step give, else most ops: `f32`."""
    ops = m.ops_in(m.span)
    found = Counter(o.outputs[0].split("[")[0] for o in ops if o.outputs and o.kind == "matmul")
    found = found or Counter(o.outputs[0].split("[")[0] for o in ops if o.outputs)
    return found.most_common(1)[0][0] if found else ""


def nothing(m: Metrics) -> str:
    """Why there is nothing to show, when no op and no launch was recorded; "" when there is."""
    trace = m.trace
    if trace.ops or trace.launches:
        return ""
    if trace.meta.get("recording"):
        return "The profile is still recording: it shows itself when its block has ended"
    what = "No op ran on 'tpu'"
    if trace.dropped:
        return f"{what} that fitted: the limit of {number.plural(trace.limit, 'record')} dropped {number.count(trace.dropped)}"
    return what


def nothing_hint(m: Metrics) -> str:
    """What to look at when nothing ran."""
    hint = m.trace.meta.get("hint", "")  # a script's: what to change in it
    where = place(m.trace.meta.get("file", ""), m.trace.meta.get("line", 0))
    if m.trace.meta.get("error"):
        stopped = f"The block stopped before any op reached the device: {m.trace.meta['error']}"[:240]
        return f"{stopped}. {hint}" if hint else stopped
    if hint:
        return hint
    return (
        f"The block{' at ' + where if where else ''} took {number.time(m.wall_ns)} on the host. Ops on CPU tensors are not "
        'recorded: move the model and its inputs with .to("tpu"), or make tensors with device="tpu".'
    )
