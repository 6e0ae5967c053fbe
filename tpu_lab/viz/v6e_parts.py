"""The parts of the TPU compiler's view, from a `Compiled` to words and shares. See v6e.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpu_lab import padding
from tpu_lab.assignment import HBM, VMEM
from tpu_lab.fusions import users
from tpu_lab.place import short_file
from tpu_lab.viz import number
from tpu_lab.viz.v6e import GIB, Bar, Row, Segment, Space, gib

if TYPE_CHECKING:
    from tpu_lab.aot import Compiled

LETTERS = {"weights": "W", "optimizer": "O", "gradients": "G", "activations": "A", "inputs": "I"}
PAINT = {"padding": "pad", "reserved": "rest", "free": "room", "other": "rest"}
WORDS = {"other": "scalars and constants", "reserved": "gaps"}
MISFIT = 1.06  # of the axis: where a bar ends that runs out over the limit


def meta(c: Compiled) -> tuple:
    """The line of provenance: it says that nothing ran."""
    about, answer = c.trace.meta, c.main.answer
    out = [(str(about["name"]), False)] if about.get("name") else []
    if about.get("file"):
        out.append((f"{short_file(about['file'])}:{about.get('line')}", False))
    seconds = f"{number.sig(answer.seconds)} s" + (", read back from disk" if answer.cached else "")
    out.append((f"compiled ahead of time for {c.target.name}, libtpu {answer.libtpu}, {seconds}", False))
    if c.main.split:
        out.append((f"{number.plural(len(c.main.split), 'input')} split over {c.target.devices} devices, sizes are one device\u2019s", False))
    elif c.main.whole:
        out.append((f"not split over {c.target.devices} devices, sizes are of the whole: {c.main.whole}", True))
    return (*out, ("nothing ran on a TPU, no step time is predicted", True))


def facts(c: Compiled) -> tuple:
    """((figure, unit, caption), ...): groups as the fusions view counts them, HBM, VMEM, and the bound with its two reasons."""
    placed = [(p.times, p.placed) for p in c.parts if p.placed]
    if not placed:
        return ()
    made, cpu = len(users(c.groups)), users(c.cpu_groups or ())
    beside = f"XLA:CPU makes {number.count(len(cpu))}" if cpu else f"in {number.plural(len(c.parts), 'program')}"
    moved = sum(times * sum(p.traffic) for times, p in placed)
    compute = sum(times * p.bound_ns[1] for times, p in placed)
    bound, unit = number.time_pair(c.bound_ns)
    vmem, vmem_unit = number.pair(c.vmem, number._SIZES)
    together = sum(len(p.collectives) * times for times, p in placed)
    if together:
        beside += f"; {number.plural(together, 'collective')}"
    return (
        (number.count(made), "group" if made == 1 else "groups", beside),
        (gib(c.hbm), "GiB", f"HBM, of {gib(c.target.hbm)} GiB"),
        (vmem, vmem_unit, f"VMEM at most, of {number.size(c.target.vmem)}"),
        (
            f"\u2265{number.NBSP}{bound}", f"{unit} a step",
            f"{number.size(moved)} at {bandwidth(c)}; compute {number.time(compute)}",
        ),
    )  # fmt: skip


def bandwidth(c: Compiled) -> str:
    return f"{number.sig(c.target.bandwidth / 1e12)} TB/s"


def fit(c: Compiled, need: int) -> tuple[tuple[Bar, ...], tuple, tuple[str, float]]:
    """(bars, ticks as (words, share), limit as (words, share)) on one axis that reaches a little over the limit."""
    room = c.target.hbm
    axis = room * 1.09
    bars = [Bar("this step", min(need / axis, MISFIT / 1.09), f"{gib(need)} GiB", not c.fits)]
    step = next(s for s in (1, 2, 4, 8, 16, 32) if room / GIB / s < 5)
    ticks = tuple((str(n), n * GIB / axis) for n in range(0, int(room / GIB * 0.93) + 1, step))
    return tuple(bars), ticks, (f"{gib(room)} GiB", room / axis)


def spaces(c: Compiled) -> tuple[Space, ...]:
    """HBM and VMEM of the largest program at their fullest moments."""
    placed = c.main.placed
    if placed is None:
        return ()
    out = []
    for name, space, held, room in (("HBM", HBM, placed.hbm, c.target.hbm), ("VMEM", VMEM, placed.vmem, c.target.vmem)):
        shares = [(s.owner, s.bytes) for s in placed.shares(space)]
        shares.sort(key=lambda s: (s[0] in PAINT, -s[1]))
        if name == "VMEM" and room > held:
            shares.append(("free", room - held))
        whole = sum(n for _, n in shares) or 1
        unit, factor = number.size_unit(max((n for _, n in shares), default=1))
        parts = tuple(
            Segment(
                PAINT.get(owner, owner), LETTERS.get(owner, ""), _words(owner, name), number.sig(n / factor), n / whole,
                f"{_words(owner, name)}: {number.size(n)}, {number.percent(n / whole)}",
            )
            for owner, n in shares
        )  # fmt: skip
        caption = f"{number.size(held)} of {number.size(room)}"
        out.append(Space(name, caption, unit, parts, f"{name}, {caption}: " + ", ".join(p.tip for p in parts)))
    return tuple(out)


def _words(owner: str, space: str) -> str:
    if owner == "weights" and space == "VMEM":
        return "weights, in slices"
    return WORDS.get(owner, owner)


def chosen(kinds: list[padding.Kind], limit: int) -> list[padding.Kind]:
    """The kinds that waste most, and the largest that wastes nothing, in the order of what they hold."""
    least = 0.002 * sum(k.held for k in kinds)
    padded = sorted((k for k in kinds if k.factor > 1.02 and k.waste > least), key=lambda k: -k.waste)[: max(1, limit - 1)]
    plain = [k for k in kinds if k.factor <= 1.02][: limit - len(padded)]
    keep = {id(k) for k in (*padded, *plain)}
    return [k for k in kinds if id(k) in keep]


def row(k: padding.Kind, longest: int, factor: float) -> Row:
    """One line of the table."""
    where = " \u00b7 ".join(x for x in (k.module, k.where) if x) or k.owner
    many = f" \u00d7{k.count}" if k.count > 1 else ""
    return Row(
        k.what, k.where, where, k.shape + many, k.layout, k.logical / longest, k.waste / longest,
        number.sig(k.logical / factor), number.sig(k.held / factor), number.sig(k.factor),
        f"{k.what}: {number.size(k.logical)} useful of {number.size(k.held)} held \u00b7 {where}",
    )  # fmt: skip


def tile_words(tile: padding.Tile | None) -> tuple[str, str, str]:
    """(used, empty, caption) of the drawn tile."""
    if tile is None:
        return "", "", ""
    used, side, word = (tile.lanes, tile.width, "lanes") if tile.by_lanes else (tile.sublanes, tile.height, "sublanes")
    return (
        f"{used} of {side} {word} used: a dimension of {number.count(tile.size)}",
        f"{side - used} empty",
        f"{tile.height} sublanes \u00d7 {tile.width} lanes, one tile",
    )


def advice(c: Compiled, worst: padding.Kind | None, tile: padding.Tile | None) -> tuple[str, str]:
    """(the act, its reason): one thing to try, or that nothing stands out."""
    if not c.fits:
        placed = c.main.placed
        sums = {s.owner: s.bytes for s in placed.shares(HBM)} if placed else {}
        if sums and max(sums, key=lambda o: sums[o]) in ("activations", "padding", "inputs"):
            return (
                "Try a smaller batch.",
                f"Activations hold {number.size(sums.get('activations', 0))} at the fullest moment, and they grow with it. bf16 "
                "autocast halves most of them, and checkpointing computes them twice instead of holding them.",
            )
        return "Try bf16 autocast or a smaller batch.", "Both take bytes off what is held at the fullest moment."
    if worst is None or tile is None or worst.waste < 0.02 * (c.hbm + c.vmem):
        return "Nothing stands out.", "Little of what the step holds is padding, and it fits."
    side = tile.width if tile.by_lanes else tile.height
    what = f"{worst.what} ({worst.shape})"
    return (
        f"Try {number.count(tile.better)} for the dimension of {number.count(tile.size)}.",
        f"The last two dimensions of a buffer's layout are laid on tiles of {tile.height} \u00d7 {tile.width}. "
        f"{number.count(tile.size)} is no multiple of {side}, so {what} holds {number.sig(worst.factor)} times its bytes: "
        f"{number.count(tile.better)} would hold the same.",
    )


def sources(c: Compiled) -> str:
    """Where the figures come from."""
    peak = f"{number.sig(c.target.flops / 1e12)} TFLOP/s bf16 and {bandwidth(c)}, published peaks"
    return f"sizes and layouts: the compiler\u2019s \u00b7 \u2265: roofline bound at {peak}"
