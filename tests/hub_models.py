"""Models others wrote, in every mode against the CPU: `python -m tests.hub_models [family …] [--mode strict fused compile]`.

Each family of hub_rows.py is built tiny with random weights, moved, and run forward and backward; outputs and gradients are
the CPU's, and what ran on the CPU is what the row names. A line says what is not so; exit code 1 if there is one. About
20 minutes for all on 2 cores, half of it with --quick.

How far from the CPU a number may be is no guess: where float32 says little (small batch norms one after another lose four
of seven digits), the judge is the same model in float64, and the device may be as far from that as a few times the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as a module: the tests import each other by name

from hub_rows import ROWS, Row, draw, named

import tpu_lab  # noqa: F401  the device
from tpu_lab.backend import fallback

MODES = ("strict", "fused", "compile")
EAGER = {"strict": torch.tpu.EagerMode.DEFER_NEVER}  # what the compiled part leaves is done in fused mode
TIMES = 4  # the CPU's own error in float32: another order of sums may be this much worse on one tensor


def quickly():
    """Compiles in half of the time: programs that run once need not be good ones."""
    return torch.tpu.compiler.custom_compiler_options(
        {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    )


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
    with random weights, so that no output is left without a gradient. A gradient of zeros is as good as none: compiled
    functions give one for what nothing depends on."""
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    out = floats(call(**given))
    model.zero_grad()
    sum((t * draw(*t.shape).to(device)).mean() for t in out if t.requires_grad).backward()
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return [t.detach().cpu() for t in out], {name: g for name, g in grads.items() if g.count_nonzero()}


def exact(row: Row):
    """What `run` gives in float64 on the CPU; None for a family with an op that has no such kernel there."""
    model = build(row).double()
    inputs = row.inputs()
    inputs |= {k: v.double() for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    try:
        return run(model, model, inputs, "cpu")
    except RuntimeError:  # grouped products of experts, and code that asks for float32 by name
        return None


def wrong(row: Row, mode: str) -> list[str]:
    """What of a family is not as on the CPU in a mode, in words; empty if all is."""
    hosted, original = set(), fallback.run

    def watched(record, args, kwargs, reason):
        if "_assert_async" not in record.name:  # a check that eager code makes with a condition
            hosted.add(record.name.removeprefix("aten.").removesuffix(".default"))
        return original(record, args, kwargs, reason)

    model, inputs = build(row), row.inputs()
    want = run(model, model, inputs, "cpu")
    moved = build(row).to("tpu")
    torch._dynamo.reset()
    fallback.run = watched
    try:
        with torch.tpu.set_eager_mode(EAGER.get(mode, torch.tpu.EagerMode.DEFER_AND_FUSE)):
            got = run(torch.compile(moved) if mode == "compile" else moved, moved, inputs, "tpu")
    finally:
        fallback.run = original
    unsaid = [f"{name} ran on the CPU" for name in sorted(hosted - row.host)]
    unsaid += [f"{name} did not run on the CPU" for name in sorted(row.host - hosted)]
    return differences(row, got, want, exact) + unsaid


def differences(row: Row, got, want, truth=lambda row: None) -> list[str]:
    """What is not the CPU's, in words; empty if all is. got, want: what `run` gave; truth: as `exact`, asked if need be.

    A number may be apart by the row's tolerance times the largest of its tensor. A gradient that is zero but for rounding
    (a bias in front of a normalisation) is measured by a hundredth of the model's largest. What is further apart is right
    if its distance from the truth is at most TIMES the CPU's, and that. A truth that the CPU misses by over 1 % is none:
    rounding decided a choice.
    """
    found = [] if len(got[0]) == len(want[0]) else [f"{len(got[0])} outputs for {len(want[0])}"]
    least = max(largest(t) for t in want[1].values()) / 100
    alone = sorted(got[1].keys() ^ want[1].keys())
    alone = [name for name in alone if noticed(got[1], want[1], name) > row.tolerance * least]
    found += [f"gradients of {alone} on one side only"] if alone else []
    pairs = [(0, n, a, b, 1e-3) for n, (a, b) in enumerate(zip(got[0], want[0]))]
    pairs += [(1, name, got[1][name], b, least) for name, b in want[1].items() if name in got[1]]
    far = []
    for part, name, a, b, floor in pairs:
        said, size = ("output", "gradient of")[part] + f" {name}", max(largest(b), floor)
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isfinite(), b.isfinite()):
            found.append(f"{said}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}, or NaN and inf elsewhere")
        elif (apart := largest((a - b)[b.isfinite()])) > row.tolerance * size:
            far.append((part, name, a, b, size, f"{said}: {apart:.3g} apart, with numbers up to {largest(b):.3g}"))
    judge = truth(row) if far else None
    for part, name, a, b, size, said in far:
        if judge is not None and (part == 0 or name in judge[1]):
            right = judge[part][name]
            ours, own = (largest((t - right)[b.isfinite()]) for t in (a, b))
            if own <= 0.01 * size and ours <= TIMES * own + row.tolerance * size:
                continue
            said += f" ({ours:.3g} from float64, the CPU {own:.3g})"
        found.append(said)
    return found


def noticed(got, want, name) -> float:
    """How large a gradient is that one side has alone: what is zero on the other may be rounding here. inf with NaN or inf."""
    only = got.get(name, want.get(name))
    return largest(only) if only.isfinite().all() else float("inf")


def largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value; 0.0 if there is none."""
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hub_models", description=__doc__)
    parser.add_argument("families", nargs="*", default=[])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--quick", action="store_true", help="compile without optimising, as the tests do")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = 0
    for row in map(named, args.families) if args.families else ROWS:
        for mode in args.mode:
            start = time.perf_counter()
            try:
                with quickly() if args.quick else contextlib.nullcontext():
                    found = wrong(row, mode)
            except Exception as error:
                found = [f"{type(error).__name__}: {str(error)[:300]}"]
            torch.tpu._clear_cache()  # all programs of all families are more than a small machine holds
            failed += bool(found)
            said = "; ".join(found[:3]) if found else "as on the CPU"
            print(f"{row.name:30}{mode:9}{time.perf_counter() - start:6.1f} s  {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
