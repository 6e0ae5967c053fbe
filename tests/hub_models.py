"""Models others wrote, tiny and with random weights: one row a family, built from its own config, with inputs.

`python -m tests.hub_models [family …] [--mode strict fused compile]` runs the rows in each mode against the CPU.
"""

from __future__ import annotations

import torch

from hub_rows import ROWS, Row, draw


def named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def build(row: Row, **more) -> torch.nn.Module:
    """The model of a row on the CPU, the same weights each time; without dropout, with batch statistics."""
    import transformers

    torch.manual_seed(0)
    kind, given = getattr(transformers, row.model), {**row.config, **more}
    if row.backbone:
        given["backbone_config"] = getattr(transformers, row.backbone[0])(**row.backbone[1])
    model = kind(kind.config_class(**given)).train(row.training)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.train()
    return model


def floats(value) -> list[torch.Tensor]:
    """The floating tensors of a model's output, in order: what a loss can be made of."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in floats(v)] if isinstance(value, (list, tuple)) else []


def run(call, model, inputs, device):
    """(outputs, gradients by name) of one forward and backward, on the CPU. The loss is a mean of all that came out
    with random weights, so that no output is left without a gradient."""
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    out = floats(call(**given))
    model.zero_grad()
    sum((t * draw(*t.shape).to(device)).mean() for t in out if t.requires_grad).backward()
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return [t.detach().cpu() for t in out], grads


def differences(row: Row, got, want) -> list[str]:
    """What is not the CPU's, in words; empty if all is. got, want: what `run` gave.

    A number may be apart by the row's tolerance times the largest of its tensor. A gradient that is zero but for rounding
    (a bias in front of a normalisation) is measured by a hundredth of the model's largest.
    """
    found = [] if len(got[0]) == len(want[0]) else [f"{len(got[0])} outputs for {len(want[0])}"]
    if got[1].keys() != want[1].keys():
        found.append(f"gradients of {sorted(got[1].keys() ^ want[1].keys())} on one side only")
    least = max(largest(t) for t in want[1].values()) / 100
    pairs = [(f"output {n}", a, b, 1e-3) for n, (a, b) in enumerate(zip(got[0], want[0]))]
    pairs += [(f"gradient of {name}", got[1][name], b, least) for name, b in want[1].items() if name in got[1]]
    for name, a, b, floor in pairs:
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isfinite(), b.isfinite()):
            found.append(f"{name}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}, or NaN and inf elsewhere")
        elif (apart := largest((a - b)[b.isfinite()])) > row.tolerance * max(largest(b), floor):
            found.append(f"{name}: {apart:.3g} apart, with numbers up to {largest(b):.3g}")
    return found


def largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value; 0.0 if there is none."""
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
