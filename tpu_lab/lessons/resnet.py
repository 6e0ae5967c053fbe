"""Beside `notebooks/resnet.py`: why fusion groups end, whom convolutions share a kernel with, and what is compiled ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import tpu_lab
from tpu_lab.lessons.runs import eager
from tpu_lab.models import resnet
from tpu_lab.viz import page

if TYPE_CHECKING:
    import pandas as pd


def ends(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Where groups end: for each kind of reason how many groups, and the bytes that they write to memory there."""
    kinds = {
        "the next, or this one, is a matmul or convolution": "matmul",
        "a kernel that the compiler has ready": "custom kernel",
        "a sum over many values must be complete": "reduction|many times",
        "several others read the result": "read by|reads it",
        "it is a result of the program": "result of the program",
    }
    left, found = rows[rows.letter != ""], {}
    for words, pattern in kinds.items():
        hit = left.why.str.contains(pattern)
        found[words], left = left[hit], left[~hit]
    found["another reason"] = left
    return found


def sides(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The groups that the CPU's compiler made of a step, and those that the TPU's made of the same step."""
    on_cpu = rows.compiler.str.contains("CPU")
    return rows[on_cpu], rows[~on_cpu]


def ends_table(cpu: pd.DataFrame, tpu: pd.DataFrame, chip: str, of: str) -> page.Piece:
    """Why groups end, and the bytes written there, on the CPU and on the chip. of: the settings that both were made for."""
    both = [(words, here, there) for (words, here), there in zip(ends(cpu).items(), ends(tpu).values(), strict=True)]
    return page.table(
        [
            {
                f"where a group ends, {of}": words,
                "groups, CPU": f"{len(here)}",
                "MiB written, CPU": f"{here.bytes_out.sum() / 2**20:.1f}",
                f"groups, {chip}": f"{len(there)}",
                f"MiB written, {chip}": f"{there.bytes_out.sum() / 2**20:.1f}",
            }
            for words, here, there in both
            if len(here) + len(there)
        ],
        caption=f"Why fusion groups end, on the CPU and on the TPU, for {of}",
    )


def with_company(rows: pd.DataFrame) -> tuple[int, int]:
    """(convolution kernels that a norm, a relu or an addition shares; all convolution kernels)."""
    some = rows[(rows.kind == "matmul") & rows.inside.str.contains("convolution")]
    return int(some.inside.str.contains("norm|relu|add|threshold").sum()), len(some)


def read(model: torch.nn.Module, x: Tensor, device: str) -> Tensor:
    """The digits that the model sees in x, a part at a time; int64 on the CPU."""
    model.eval()
    with eager("fused"), torch.no_grad():
        seen = torch.cat([model(part.to(device)).argmax(1).cpu() for part in x.split(250)])
    model.train()
    return seen


def ahead(params: Mapping[str, Any]) -> dict[str, Any]:
    """What lies beside the notebook for machines without the TPU's compiler (see tpu_lab/viz/ahead.py)."""
    made = {}
    for batch in sorted({8, 16, 32, 64, 128, params["batch"]}):
        model = resnet.Model(resnet.Config(width=params["channels"])).to(params["device"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=params["rate"])
        # The step of the notebook, schedule and all: with another the compiler makes a few groups more or less.
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, params["rate"], total_steps=9, cycle_momentum=False)
        digits, truth = (part.to(params["device"]) for part in resnet.batch(model.config, batch))

        def step(model=model, optimizer=optimizer, schedule=schedule, digits=digits, truth=truth):
            loss = resnet.loss(model, digits, truth)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            loss.item()

        seen = tpu_lab.profile(step, steps=3, warmup=2, mode="fused", name=f"ResNet C{params['channels']} B{batch}")
        made[batch] = seen.on(params["chip"])
    padding = [
        {"batch": batch, "useful": int(own.logical.sum()), "held": int(own.held.sum())}
        for batch, own in ((batch, c.rows[c.rows.owner == "activations"]) for batch, c in made.items())
    ]
    chosen = made[params["batch"]]
    return {"groups": chosen.fusions, "memory": chosen.view, "padding": padding}
