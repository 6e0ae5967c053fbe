"""Beside `notebooks/dlrm.py`: the baseline, who moves the bytes, and how both models are judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tpu_lab
from tpu_lab.lessons.runs import eager
from tpu_lab.models import dlrm
from tpu_lab.profile import Profile
from tpu_lab.roofline import Roofline
from tpu_lab.viz import number, page, roofline

UNSEEN, PART = 65_536, 16_384  # flights held out, and how many of them are judged at a time
LOOKUPS, OPTIMIZER = "lookups and their gradients", "optimizer"


def config_of(chosen: Mapping[str, Any]) -> dlrm.Config:
    """The model's sizes; it sees three measures of the flight and six of the weather."""
    return dlrm.Config(width=chosen["width"], rows=chosen["rows"], joined=chosen["joined"], measures=9)


def sizes(chosen: Mapping[str, Any]) -> str:
    """`d32 B512`: the settings of a step, but for its tables."""
    return f"d{chosen['width']} B{chosen['batch']}"


def logistic(measured: Tensor, late: Tensor) -> Tensor:
    """A logistic regression on what is measured, fitted on all flights but the held-out ones: a score for each flight."""
    x = torch.cat([measured, torch.ones(len(measured), 1)], dim=1)
    weight = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=30)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x[:-UNSEEN] @ weight, late[:-UNSEEN])
        loss.backward()
        return loss

    optimizer.step(closure)
    return (x @ weight).detach()


def pick(columns: Sequence[Tensor], chosen: Tensor, config: dlrm.Config) -> list[Tensor]:
    """Some flights: late or not, what was measured, and the names, each within its table."""
    late, measured, *names = (column[chosen] for column in columns)
    return [late, measured, *(ids % rows for ids, rows in zip(names, config.heights, strict=True))]


def parts(profile: Profile) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of a step by what they are for: {part: (FLOPs, bytes)}."""
    m = profile.metrics
    found = dict.fromkeys((LOOKUPS, OPTIMIZER, "matmuls", "all else"), (0.0, 0.0))
    for i in m.step_ops:
        op = m.trace.ops[i]
        part = OPTIMIZER if op.phase == "optimizer" else "matmuls" if op.kind == "matmul" else "all else"
        part = LOOKUPS if "embedding" in op.name else part
        if op.kind != "view":
            found[part] = (found[part][0] + op.flops / m.n, found[part][1] + op.bytes / m.n)
    return found


def shares_of(split: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """What `parts` gives, as shares of a step's FLOPs and bytes."""
    flops, moved = (sum(column) for column in zip(*split.values(), strict=True))
    return {part: (own_flops / flops, own_bytes / moved) for part, (own_flops, own_bytes) in split.items()}


def bytes_table(split: Mapping[str, tuple[float, float]]) -> page.Piece:
    """Who does the model FLOPs of a step, those of its matmuls, and who moves its bytes."""
    shares = shares_of(split)
    return page.table(
        [
            {
                "part of a step": part,
                "matmul FLOPs": f"{100 * shares[part][0]:.0f}%",
                "bytes": f"{100 * shares[part][1]:.0f}%",
                "MiB moved": number.sig(moved / 2**20),
                "matmul FLOP per byte": number.sig(flops / moved) if flops else "0",
            }
            for part, (flops, moved) in split.items()
        ],
        caption="FLOPs and bytes of a step by part",
    )


def under_roofs(profile: Profile) -> page.Piece:
    """The roofline of a profile, and what it allows a lookup."""
    roofs = Roofline(profile.metrics)
    lookup = next(p for p in roofs.points if p.cost.name.startswith("tables") and p.cost.phase == "forward")
    return page.stack(
        profile.roofline,
        page.facts(
            (f"{number.sig(lookup.intensity)} FLOP/B", "a lookup does"),
            (f"{number.sig(roofs.ridge)} FLOP/B", "it would need to keep the arithmetic busy: the ridge"),
            (f"{100 * lookup.possible / roofs.peak:.2g}%", "of the peak is all that its roof allows"),
        ),
    )


def roof_words(profile: Profile | None) -> str:
    """What bounds the lookups and the optimizer, and how near to it they come where they were measured."""
    bound = "Their roof is the memory's, far below the arithmetic's."
    if profile is None:
        return f"{bound} How near they come to it, the button measures."
    own = [
        p for p in Roofline(profile.metrics).points if p.cost.name.startswith("tables") or p.cost.phase == "optimizer"
    ]
    best = max((p.reached for p in own if p.measured and p.reached), default=None)
    if best is None:
        return bound
    if best < roofline.NEAR:
        return f"{bound} Measured here they reach {number.percent(best, 2)} of it at best: neither roof explains their time."
    return f"{bound} Measured here they reach up to {number.percent(best, 2)} of it: fewer bytes help, faster arithmetic does not."


def figure(compiled: Any, joined: bool) -> list[Any]:
    """What XLA:TPU made of a step: tables, gathers, scatters, and the least time of HBM and of arithmetic."""
    placed = [part.placed for part in compiled.parts if part.placed]
    inside = Counter(i.opcode for p in placed for c in p.module.computations.values() for i in c.instructions)
    least = [f"\u2265 {number.time(sum(p.bound_ns[k] for p in placed))}" for k in (0, 1)]
    return ["one" if joined else "seven", inside["gather"], inside["scatter"], *least]


def ahead(params: Mapping[str, Any]) -> dict[str, Any]:
    """What lies beside the notebook for machines without the TPU's compiler (see tpu_lab/viz/ahead.py)."""
    made = {}
    for joined in (False, True):
        model = dlrm.Model(config_of({**params, "joined": joined})).to(params["device"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=params["rate"])
        late, dense, *names = dlrm.batch(model.config, params["batch"])
        measured = torch.zeros(len(late), 9)  # only shapes count
        batch = [part.to(params["device"]) for part in (late, measured, *names)]

        def step(model=model, optimizer=optimizer, batch=batch):
            dlrm.loss(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        name = f"DLRM d{params['width']} B{params['batch']}{', one table' if joined else ''}"
        made[joined] = tpu_lab.compile_for(step, chip=params["chip"], name=name)
    return {"view": made[params["joined"]].view, "figures": [figure(c, joined) for joined, c in made.items()]}


def judge(model: torch.nn.Module, columns: Sequence[Tensor], device: str) -> Tensor:
    """The model's scores of the held-out flights."""
    rows = torch.arange(len(columns[0]) - UNSEEN, len(columns[0]))
    with eager("fused"), torch.no_grad():
        seen = [[part.to(device) for part in pick(columns, some, model.config)] for some in rows.split(PART)]
        return torch.cat([model(measured, *names).cpu() for _, measured, *names in seen])


def judged(scores: Tensor, baseline: Tensor, late: Tensor, losses: Sequence[float]) -> page.Piece:
    """Both models' finds against false alarms, and the loss of the training."""
    alarms, window = torch.linspace(0, 1, 51), min(20, len(losses))
    smooth = torch.tensor(losses).unfold(0, window, 1).mean(1).tolist()
    return page.beside(
        page.curve(
            {"DLRM": dlrm.roc(scores, late, alarms), "logistic": dlrm.roc(baseline, late, alarms)},
            f"AUC {dlrm.auc(scores, late):.3f} on flights it never saw, {dlrm.auc(baseline, late):.3f} by logistic regression",
            x="of the flights on time, taken for late",
            y="of the late flights, found",
            at=alarms.tolist(),
        ),
        page.curve(
            smooth,
            f"{smooth[-1]:.2f} nats a flight after {len(losses)} steps, {losses[0]:.2f} at first",
            y=f"loss, mean of {window} steps",
            at=range(window, len(losses) + 1),
        ),
        widths=(480, 480),
    )
