"""Beside `notebooks/your_model.py`: examples, a model's coverage and steps, what the TPU's compiler makes of it, what to change."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

import tpu_lab
from tpu_lab import advice, pasted
from tpu_lab.coverage import coverage
from tpu_lab.place import place
from tpu_lab.profile import Profile
from tpu_lab.trace import REASONS
from tpu_lab.viz import page, v6e


def examples() -> dict[str, tuple[str, str]]:
    """{name: (code, shape of the input)}, each with something to see."""
    ready = {
        "convolutions": (
            '''
            class Net(nn.Module):
                """Two convolutions and a head, for small pictures."""

                def __init__(self, channels=16):
                    super().__init__()
                    self.first = nn.Conv2d(3, channels, 3, padding=1)
                    self.norm = nn.GroupNorm(4, channels)
                    self.second = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
                    self.head = nn.Linear(2 * channels, 10)

                def forward(self, x):
                    x = F.gelu(self.norm(self.first(x)))
                    x = F.gelu(self.second(x))
                    return self.head(x.mean((2, 3)))
            ''',
            "32, 3, 32, 32",
        ),
        "attention": (
            '''
            class Attention(nn.Module):
                """Each position looks at those before it."""

                def __init__(self, width=64, heads=4):
                    super().__init__()
                    self.heads = heads
                    self.norm = nn.LayerNorm(width)
                    self.qkv = nn.Linear(width, 3 * width)
                    self.out = nn.Linear(width, width)

                def forward(self, x):
                    batch, time, width = x.shape
                    qkv = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1)
                    q, k, v = qkv.permute(2, 0, 3, 1, 4)
                    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                    return x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
            ''',
            "8, 64, 64",
        ),
        "a table of words": (
            '''
            class Words(nn.Module):
                """The mean of some words' vectors, and a guess from it."""

                def __init__(self, words=1000, width=64):
                    super().__init__()
                    self.table = nn.Embedding(words, width)
                    self.hidden = nn.Linear(width, 4 * width)
                    self.head = nn.Linear(4 * width, 2)

                def forward(self, ids):
                    x = self.table(ids).mean(1)
                    return self.head(F.relu(self.hidden(x)))
            ''',
            "i64[64, 20]",
        ),
        "an op that TorchTPU lacks": (
            '''
            class Smooth(nn.Module):
                """An MLP with an activation that is not everywhere."""

                def __init__(self, width=128):
                    super().__init__()
                    self.up = nn.Linear(width, 4 * width)
                    self.down = nn.Linear(4 * width, width)

                def forward(self, x):
                    return x + self.down(F.mish(self.up(x)))
            ''',
            "64, 128",
        ),
        "a question in the middle": (
            '''
            class Careful(nn.Module):
                """It asks for a value before it goes on."""

                def __init__(self, width=128):
                    super().__init__()
                    self.first = nn.Linear(width, width)
                    self.second = nn.Linear(width, width)

                def forward(self, x):
                    x = self.first(x).relu()
                    if x.abs().max() > 10:  # Python must know this, so all before it runs now
                        x = x / 10
                    return self.second(x)
            ''',
            "64, 128",
        ),
    }
    return {name: (inspect.cleandoc(code) + "\n", shape) for name, (code, shape) in ready.items()}


@dataclass(frozen=True)
class Seen:
    """What is known of a model. fault: a sentence when its code did not run; then the rest is None."""

    fault: str = ""
    coverage: Any = None
    profile: Profile | None = None


def look(code: str, shape: str, device: str) -> Seen:
    """Run the code: its ops against TorchTPU's list, and three training steps in fused mode under a profile."""
    doing = "The input shape"
    try:
        given = pasted.inputs(shape)
        with pasted.within_patience(), torch.no_grad():
            doing = "The code"
            with torch.enable_grad():
                model = pasted.model_of(code)
            doing = "The forward pass on the CPU"  # what is wrong there is no fault of a device
            model(*given)
        doing = "The step"
        seen = Seen(coverage=coverage(model, *given), profile=steps(model, given, device))
        return seen if seen.profile.trace.launches else Seen("Nothing ran: the model calls no op on its input, or returns nothing of what it computes")
    except (Exception, SystemExit, pasted.TookTooLong) as error:
        return Seen(pasted.said(error, code, doing))


def steps(model: torch.nn.Module, given: list[torch.Tensor], device: str) -> Profile:
    """Three training steps after two to warm up: forward, backward of the outputs' mean square, and SGD."""
    model, given = model.to(device), [one.to(device) for one in given]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=1e-3) if weights else None

    def step():
        out = model(*given)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        losses = [leaf.float().square().mean() for leaf in leaves if leaf.requires_grad]
        if losses:
            sum(losses).backward()
        if losses and optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        torch.tpu.synchronize()  # a model without anything to learn has nothing else that makes it run

    return tpu_lab.profile(step, steps=3, warmup=2, mode="fused", name=type(model).__name__)


def figures(seen: Seen) -> page.Piece:
    """The key figures of a step, and of TorchTPU's list."""
    m, rows = seen.profile.metrics, seen.coverage.rows
    launches = len(m.launches_in(m.span))
    on_cpu = sorted({op.name for op in m.ops_in(m.span) if op.fallback})
    return page.facts(
        (f"{(rows.torch_tpu != 'missing').sum()} of {len(rows)}", "different ops that TorchTPU can do"),
        (f"{len(m.ops_in(m.span)):,}", "ops in one training step"),
        (f"{launches:,}", "launch a step, in fused mode" if launches == 1 else "launches a step, in fused mode"),
        (
            f"{len(on_cpu)}",
            "ops that this lab must run on the CPU" if len(on_cpu) != 1 else f"runs on the CPU: {on_cpu[0]}",
        ),
    )


def on_chip(profile: Profile, chip: str) -> dict[str, Any]:
    """What the TPU's compiler makes of the step: the groups on the source, the memory, and the one thing to try."""
    compiled = profile.on(chip)
    return {"groups": compiled.fusions, "memory": compiled.view, "try": list(v6e.advice(compiled))}


def changes(seen: Seen, tried: tuple[str, str] | list[str] | None) -> list[tuple[str, str]]:
    """[(what to do, why)]: what TorchTPU lacks, where a step is cut, what the records show, and what the tile wastes."""
    rows, m, found = seen.coverage.rows, seen.profile.metrics, []
    for (file, line), lacks in rows[rows.torch_tpu == "missing"].groupby(["file", "line"], sort=False):
        names = " and ".join(lacks.op.str.removesuffix(".default"))
        where = f"at {file}:{line}" if file else "somewhere in the step"
        found.append((f"Replace {names}.", f"TorchTPU 0.2.0 has no kernel for it, and would raise {where}."))
    launches = m.launches_in(m.span)
    cuts = {
        place(one.file, one.line): one for one in launches if one.reason in ("item", "bool", "print", "numpy", "cpu")
    }
    for where, one in cuts.items():
        found.append(
            (
                "Read no value inside the step.",
                f"{REASONS[one.reason]} at {where}, so all before it must run: {len(launches)} launches a step. "
                "torch.where chooses without asking.",
            )
        )
    found += [(one.act, one.evidence) for one in advice.findings(m) if not (cuts and one.kind == "wait")]
    if tried and not tried[0].startswith("Nothing"):
        found.append(tuple(tried))
    return found or [("Nothing stands out.", "TorchTPU has every op, and one step runs without a look at a value.")]
