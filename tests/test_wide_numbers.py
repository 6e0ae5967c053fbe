"""A TPU emulates float64 with some 1,700 instructions for a power and some 20 for a product: none where nobody asked for it.

Hyperparameters reach a program as float64 scalars; a lowering that forgets to narrow one makes whole tensors wide.
"""

import re

import pytest
import torch
from test_training import MODELS, OPTIMIZERS

import tpu_lab
from tpu_lab.backend import executor, rehearsal

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


def test_the_keys_of_all_dropouts_are_made_at_once():
    def rounds(n):
        x = torch.ones(4, 4).to("tpu")
        (text,) = texts(lambda: [torch.nn.functional.dropout(x, 0.1) for _ in range(n)])
        main = text[text.index("@main") :]
        return main[: main.index("\n  }")].count("threefry")

    with tpu_lab.backend.state.mode_scope("fused"):
        assert rounds(2) == rounds(9) > 0
