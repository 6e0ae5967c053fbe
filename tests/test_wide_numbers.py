"""A TPU emulates float64, hundreds of instructions for a power: none where nobody asked for it.

Hyperparameters reach a program as float64 scalars; a lowering that forgets to narrow one makes whole tensors wide.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from test_training import MODELS, OPTIMIZERS

import tpu_lab  # noqa: F401  the device
from tpu_lab.backend import executor, rehearsal, state

WIDE = re.compile(r" = .*tensor<(?!1xf64)(\d+x)+f64>")  # more than one element


def texts(step) -> list[str]:
    """StableHLO for a TPU of the programs that a second call of `step` launches in fused mode; nothing runs."""
    with rehearsal.rehearse() as trace:
        for _ in range(2):
            first = len(trace.launches)
            held = step()
            executor.flush("synchronize")
            del held
    return [trace.programs[r.key].lower("tpu").as_text() for r in trace.launches[first:]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_in_float32_has_no_wide_tensors(name, optimizer):
    module, config = MODELS[name]
    model = module.Model(config).to("tpu")
    opt = OPTIMIZERS[optimizer](model.parameters(), "tpu")
    batch = [t.to("tpu") for t in module.batch(config, 4, seed=0)]

    def step():
        opt.zero_grad()
        module.loss(model, *batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()

    found = [line.strip() for text in texts(step) for line in text.splitlines() if WIDE.search(line)]
    made = [line for line in found if "stablehlo.slice %arg0" not in line]  # hyperparameters: one vector comes in
    assert not made, made[:3]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_more_parameters_need_no_more_wide_numbers(make):
    def wide(n):
        params = [torch.nn.Parameter(torch.ones(2 + i).to("tpu")) for i in range(n)]
        opt = make(params, fused=True)
        for p in params:
            p.grad = torch.ones_like(p)
        return sum(len(re.findall(r"stablehlo\.\w+ .*f64>", text)) for text in texts(opt.step))

    assert 0 < wide(2) == wide(9)


@pytest.mark.parametrize("mode", ["fused", "compiled"])
def test_the_keys_of_all_dropouts_are_made_at_once(mode):
    def rounds(n):
        x = torch.ones(4, 4).to("tpu")
        step = lambda x: [F.dropout(x, 0.1) for _ in range(n)]  # noqa: E731
        run = torch.compile(step) if mode == "compiled" else step
        with state.mode_scope("fused"):
            (text,) = texts(lambda: run(x))
        main = text[text.index("@main") :]
        return main[: main.index("\n  }")].count("threefry")

    assert rounds(2) == rounds(9) > 0


def test_masks_are_those_of_strict_mode():
    x = torch.ones(64, device="tpu")

    def masks(x):
        return [F.dropout(x, 0.5), torch.rand_like(x), F.dropout(x, 0.2), torch.randn_like(x)]

    found = {}
    for mode in ("strict", "fused", "compiled"):
        torch.manual_seed(3)
        run = torch.compile(masks) if mode == "compiled" else masks
        with state.mode_scope("fused" if mode == "fused" else "strict"):
            found[mode] = [t.cpu() for t in run(x)] + [torch.rand(3, device="tpu").cpu()]
    for mode in ("fused", "compiled"):
        for here, there in zip(found[mode], found["strict"], strict=True):
            torch.testing.assert_close(here, there)
