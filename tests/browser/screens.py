"""Every view of real small profiles, made once and stored in a folder: what hosts.py shows in the hosts' own pages.

`python tests/browser/screens.py folder/` writes `<view>.json` (the MIME bundle a notebook gets) and `profile.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tpu_lab
from tpu_lab.models import mingpt
from tpu_lab.profile import VIEWS, Profile


def training(batch: int = 8, config: mingpt.Config | None = None) -> Callable[[], float]:
    """A step of a small minGPT on "tpu"; it returns the loss."""
    torch.manual_seed(0)
    config = config or mingpt.Config(layers=3, heads=4, width=64, block=32)
    model = mingpt.Model(config).to("tpu")
    x, y = (value.to("tpu") for value in mingpt.batch(config, batch))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> float:
        loss = mingpt.loss(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def growing() -> Profile:
    """A loop whose sequence grows: a miss at each length, and two call sites."""
    layer = nn.Linear(16, 16).to("tpu")
    with tpu_lab.profile(name="a growing sequence", peak_flops=2e11) as p:
        for length in (4, 5, 6, 7, 7, 7, 8, 8):
            out = F.gelu(layer(torch.ones(2, length, 16).to("tpu")))
            out.sum().item()
            (out * length).mean().item()
    return p


class Unsafe(nn.Module):
    """A layer whose logarithm meets a zero."""

    def forward(self, x):
        return torch.log(torch.relu(x) * 2).sum()


def screens() -> Iterator[tuple[str, object]]:
    """(name, view), each view a real one."""
    before = tpu_lab.profile(training(), steps=6, warmup=2, mode="strict", name="minGPT d64 L3 B8 T32")
    p = tpu_lab.profile(training(), steps=8, warmup=2, mode="fused", name="minGPT d64 L3 B8 T32")
    for name in VIEWS:
        yield name, p.view(name)
    grown = growing()
    for name in ("summary", "cache"):
        yield f"{name}_growing", grown.view(name)
    yield "fusions_measured", p.fusions_measured(2)
    yield "diff", before.diff(p)
    yield "modes", tpu_lab.compare_modes(training(), steps=4, warmup=2, name="minGPT d64 L3 B8 T32", cpu=True)
    yield "v6e", p.chip_view("v6e")
    model = mingpt.Model(mingpt.Config.tiny())
    inputs = mingpt.batch(mingpt.Config.tiny(), 4)[:1]
    yield "coverage", tpu_lab.coverage(model, *inputs, optimizer=torch.optim.AdamW)
    yield "compared", tpu_lab.compare(model, *inputs, backward=True)
    bad = nn.Sequential(nn.Linear(8, 8), Unsafe()).to("tpu")
    yield "nonfinite", tpu_lab.find_nonfinite(lambda: bad(torch.randn(4, 8).to("tpu")).backward())
    first = next(op for op in p.trace.ops if op.kind == "matmul" and op.index >= p.metrics.span.ops[0])
    yield "marked", p.marked({"op": first.index})
    yield "hard", hard(p).view("ops")
    yield "hard_fusions", hard(p).view("fusions")
    yield "hard_summary", hard(p).view("summary")
    yield "empty", Profile().summary
    yield "profile", p


def hard(p: Profile) -> Profile:
    """The same records with the longest names that people have: a deep module, a long file, large counts."""
    long = "a_directory_with_a_long_name/and_another_one_below_it/train_the_very_large_language_model_v2_final.py"
    ops = [replace(op, file=long if op.file else "", module=f"model.language_model.{op.module}.wrapped_module")
           for op in p.trace.ops]  # fmt: skip
    meta = {**p.trace.meta, "file": long, "name": "my_company.research.LanguageModelWithARetrievalHead.from_pretrained"}
    return Profile(replace(p.trace, ops=ops, meta=meta), peak_flops=2e11)


def write(folder: Path) -> list[str]:
    """Store all of them; the names of the views."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, shown in screens():
        if isinstance(shown, Profile):
            shown.to_json(folder / f"{name}.json")
            continue
        (folder / f"{name}.bundle").write_text(json.dumps(shown._repr_mimebundle_()), encoding="utf-8")
        names.append(name)
    return names


class Stored:
    """A stored view; it shows itself in marimo as the view would."""

    def __init__(self, folder: str, name: str) -> None:
        self.bundle = json.loads((Path(folder) / f"{name}.bundle").read_text(encoding="utf-8"))

    def _mime_(self) -> tuple[str, str]:
        return "text/html", self.bundle["text/html"]


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
