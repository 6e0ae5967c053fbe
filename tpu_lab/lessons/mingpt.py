"""Beside `notebooks/mingpt.py`: the loss against simpler models, MFU over the sequence, two caches side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tpu_lab
from tpu_lab.lessons.runs import called, compiling, programs
from tpu_lab.models import mingpt
from tpu_lab.profile import Profile
from tpu_lab.viz import number, page

LENGTHS = (16, 32, 64, 128, 256)  # characters of a block, whose MFU is compared


def loss_curve(losses: Sequence[float], guess: float, alone: float, paired: float) -> page.Piece:
    """The loss over the steps, in nats a character, against what simpler models reach."""
    return page.curve(
        losses,
        f"{losses[-1]:.2f} nats a character after {len(losses)} steps, {losses[0]:.2f} at first",
        y="loss, nats a character",
        levels=[(guess, "guessing"), (alone, "how often each"), (paired, "and the one before")],
    )


def sizes(params: Mapping[str, Any]) -> str:
    """`d64 L2 B8`: the settings of a model, but for the length of its texts."""
    return f"d{params['width']} L{params['layers']} B{params['batch']}"


def mfu_curve(
    chip: str, on_chip: Sequence[tuple[int, float]], here: Sequence[tuple[int, float]] = (), of: str = ""
) -> page.Piece:
    """MFU over the length of a sequence: at most on the chip, and measured here. (characters, share of the peak) each.

    of: the settings that the chip's line is for; what is measured here is of those on the page."""
    said = f"{f'With {of} ' if of else ''}{chip} can use {on_chip[0][1]:.0%} of its peak at {on_chip[0][0]} characters, {on_chip[-1][1]:.0%} at {on_chip[-1][0]}"
    if here:
        best = max(here, key=lambda point: point[1])
        said += f"; this machine, with the settings above, {best[1]:.0%} at best"
    lengths = sorted({length for length, _ in (*on_chip, *here)})
    lines = {f"{chip}, at most": dict(on_chip), "here, measured": dict(here)}
    return page.curve(
        {name: [100 * line.get(n, math.nan) for n in lengths] for name, line in lines.items() if line},
        said,
        x="block: characters of a sequence",
        y="MFU, %",
        at=lengths,
        ticks=lengths,
    )


def about(config: mingpt.Config, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile of these settings is told. Of a compiled step the model is compiled, the rest is fused."""
    name = f"minGPT d{config.width} L{config.layers} B{chosen['batch']} T{config.block}"
    mode = "fused" if chosen["mode"] == "compile" else chosen["mode"]
    return {"name": name, "flops": mingpt.flops(config, chosen["batch"]), "mode": mode}


def mfu(config: mingpt.Config, chosen: Mapping[str, Any], device: str) -> float | None:
    """The MFU of forward and backward, without an optimizer: of three steps after one that compiles."""
    model = mingpt.Model(config).to(device)
    compiled = called(model, chosen["mode"])
    ids, following = (part.to(device) for part in mingpt.batch(config, chosen["batch"]))

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=chosen["dtype"] == "bfloat16"):
            loss = mingpt.loss(compiled, ids, following)
        loss.backward()
        loss.item()  # runs what was only noted so far
        model.zero_grad()

    return tpu_lab.profile(step, steps=3, warmup=1, **about(config, chosen)).metrics.mfu


def at_most(config: mingpt.Config, batch: int, compiled: Any) -> float:
    """The MFU that no step on the chip can exceed: model FLOPs over what the chip's arithmetic could do in its bound."""
    return mingpt.flops(config, batch) / (compiled.bound_ns / 1e9 * compiled.target.flops)


def caches(growing: Profile, static: Profile, places: int) -> page.Piece:
    """The ledgers of two ways to write, side by side, and how many programs each needed."""
    tokens = len(static.trace.launches)
    return page.stack(
        page.heading(f"{tokens} tokens: {programs(growing)} programs as the cache grows, {programs(static)} with its places ready"),
        page.facts(
            (f"{programs(growing)} \u2192 {programs(static)}", "programs"),
            (f"{compiling(growing):.1f} s \u2192 {compiling(static):.1f} s", "making them, or reading them back from disk"),
            (f"{number.sig(tokens / (growing.metrics.wall_ns / 1e9))} \u2192 {number.sig(tokens / (static.metrics.wall_ns / 1e9))}", "tokens a second, all in all"),
        ),
        page.beside(
            page.stack(page.heading("As long as the text"), growing.cache),
            page.stack(page.heading(f"{places} places at a time"), static.cache),
            widths=(480, 480),
        ),
    )  # fmt: skip


def ahead(params: Mapping[str, Any]) -> dict[str, Any]:
    """What lies beside the notebook for machines without the TPU's compiler (see tpu_lab/viz/ahead.py)."""
    shares, view = [], None
    for block in sorted({*LENGTHS, params["block"]}):
        config = mingpt.Config(layers=params["layers"], width=params["width"], block=block)
        model = mingpt.Model(config).to(params["device"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=params["rate"])
        ids, following = (part.to(params["device"]) for part in mingpt.batch(config, params["batch"]))

        def step(model=model, optimizer=optimizer, ids=ids, following=following):
            with torch.autocast("tpu", torch.bfloat16, enabled=params["dtype"] == "bfloat16"):
                loss = mingpt.loss(model, ids, following)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        name = f"minGPT d{config.width} L{config.layers} B{params['batch']} T{block}"
        compiled = tpu_lab.compile_for(step, chip=params["chip"], name=name)
        if block in LENGTHS:
            shares.append([block, at_most(config, params["batch"], compiled)])
        if block == params["block"]:
            view = compiled.view
    return {"mfu": shares, "view": view}
