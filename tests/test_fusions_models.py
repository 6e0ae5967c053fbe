"""Every compiled instruction of the four models leads to the user's line, in the fused mode and under torch.compile."""

import linecache

import pytest
import torch

import tpu_lab
from tpu_lab import fusions
from tpu_lab.models import dlrm, mingpt, resnet, unet

MODELS = {"mingpt": mingpt, "resnet": resnet, "dlrm": dlrm, "unet": unet}


@pytest.mark.parametrize("how", ["fused", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_instructions_map_to_the_users_lines(name, how):
    module = MODELS[name]
    config = module.Config.tiny()
    model = module.Model(config).to("tpu")
    batch = [part.to("tpu") for part in module.batch(config, 2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = module.loss if how == "fused" else torch.compile(module.loss, backend="tpu")

    def step():
        loss(model, *batch).backward()
        if how == "fused":  # the compiled graphs are the forward and the backward pass
            optimizer.step()

    profile = tpu_lab.profile(step, mode="fused")
    m = profile.metrics
    assert how in {r.mode for r in m.launches_in(m.span)}
    found, total = fusions.placed(m)
    assert total > 500 and found >= 0.95 * total

    records = {r.index: r for r in profile.trace.ops}
    made = fusions.of(m)
    assert {"forward", "backward"} <= {g.phase for g in made}
    backward = [records[i] for g in made if g.phase == "backward" for i in g.ops if records[i].phase == "backward"]
    with_forward = [r for r in backward if r.forward is not None]
    assert len(with_forward) >= 0.8 * len(backward)
    same = sum((r.file, r.line) == (records[r.forward].file, records[r.forward].line) for r in with_forward)
    assert same == len(with_forward)  # a backward op stands on its forward op's line
    if how == "compiled":  # eager, the engine adds two gradients of one value for no forward op
        every = [r for r in records.values() if r.phase == "backward"]
        assert sum(r.forward is not None for r in every) >= 0.95 * len(every)
    in_model = {line for g in made for file, line in g.lines if file == module.__file__}
    assert len(in_model) >= 5 and all(linecache.getline(module.__file__, n).strip() for n in in_model)

    held = {i for g in made for i in g.ops}
    ran = {i for r in m.launches_in(m.span) for i in r.ops if records[i].kind == "matmul"}
    assert len(ran - held) <= 0.1 * len(ran)  # x @ x.T has two equal gradients: XLA computes one
    assert sum(g.flops for g in made) == pytest.approx(sum(records[i].flops for i in held), rel=1e-3)
