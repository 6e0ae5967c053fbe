"""Four models train 4 steps in every mode with every optimizer as on the CPU: losses, parameters, no CPU fallback.

The models are smaller than `tiny()`, since every program is compiled cold; all layer kinds are there.
"""

import contextlib
import copy
import functools
import warnings

import pytest
import torch
from torch import nn

import tpu_lab
from tpu_lab import trace
from tpu_lab.models import dlrm, mingpt, resnet, unet

MODELS = {
    "mingpt": (mingpt, mingpt.Config(layers=1, heads=2, width=16, block=8, dropout=0.0)),
    "resnet": (resnet, resnet.Config(blocks=(1, 1), width=4, image=12)),
    "dlrm": (dlrm, dlrm.Config.tiny()),
    "unet": (unet, unet.Config(width=4, levels=(1, 2), blocks=1, image=8, groups=2)),
}
OPTIMIZERS = {
    "sgd": lambda params, device: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw foreach": lambda params, device: torch.optim.AdamW(params, lr=1e-3, foreach=True),
    "adamw fused": lambda params, device: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "adamw loop": lambda params, device: torch.optim.AdamW(params, lr=1e-3, foreach=False),
    # on the CPU `capturable` is refused; the arithmetic is that of the others
    "adamw capturable": lambda params, device: torch.optim.AdamW(params, lr=1e-3, capturable=device == "tpu"),
}
# An optimizer does not know the model: all of them on one, two of them on each.
PAIRS = [(name, kind) for name in MODELS for kind in OPTIMIZERS if name == "mingpt" or kind in ("sgd", "adamw foreach")]
MODES = ("strict", "debug", "fused", "compiled")


def train(name, optimizer, device, mode, steps=4):
    """Losses of the steps, and the parameters after them on the CPU."""
    module, config = MODELS[name]
    torch.manual_seed(0)
    model = module.Model(config).to(device)
    opt = OPTIMIZERS[optimizer](model.parameters(), device)
    run = torch.compile(model) if mode == "compiled" else model
    modes = torch.tpu.EagerMode
    eager = {"strict": modes.DEFER_NEVER, "debug": modes.DEFER_NEVER_AND_LAUNCH_BLOCKING, "fused": modes.DEFER_AND_FUSE}
    scope = torch.tpu.set_eager_mode(eager[mode]) if mode in eager else contextlib.nullcontext()
    losses = []
    with scope:
        for step in range(steps):
            batch = [t.to(device) for t in module.batch(config, 4, seed=step)]
            opt.zero_grad()
            loss = module.loss(run, *batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            losses.append(loss.detach())
        losses = [loss.item() for loss in losses]
    return losses, [p.detach().cpu() for p in model.parameters()]


@functools.cache
def reference(name, optimizer):
    """The same training by PyTorch on the CPU."""
    same = "adamw foreach" if optimizer == "adamw capturable" else optimizer
    return train(name, same, "cpu", "cpu")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, optimizer", PAIRS)
def test_trains_as_on_the_cpu(name, optimizer, mode):
    losses, parameters = reference(name, optimizer)
    recorded = trace.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", tpu_lab.FallbackWarning)
            got, trained = train(name, optimizer, "tpu", mode)
    finally:
        trace.stop()
        torch._dynamo.reset()
    assert got == pytest.approx(losses, rel=1e-5)
    for mine, theirs in zip(trained, parameters, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert not [op.name for op in recorded.ops if op.fallback or op.kind == "host"]
    if mode == "fused":  # a launch a step (the optimizer's end), one for what is left
        assert len([r for r in recorded.launches if r.step < 4]) == 4, [r.reason for r in recorded.launches]
        assert len([r for r in recorded.launches if r.cache != "hit"]) <= 3


LAYERS = {
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 5, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (3, 5, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(5), (3, 5, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), (2, 4, 3, 3)),
    "Conv2d": (lambda: nn.Conv2d(4, 2, 3, padding=1), (2, 4, 3, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 2, 3), (2, 4, 3, 3)),
    "MultiheadAttention": (lambda: SelfAttention(4, 2, batch_first=True), (2, 5, 4)),
    "LSTM": (lambda: nn.LSTM(4, 3), (5, 2, 4)),
    "GRU": (lambda: nn.GRU(4, 3), (5, 2, 4)),
}


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_whose_weights_are_halves_train(name, dtype):
    """What a norm saves for its backward is float32 here, as on other accelerators: nothing may refuse the mixture."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer, x = make().to(dtype), torch.randn(shape).to(dtype)
    answers = []
    for device in ("cpu", "tpu"):
        own, given = copy.deepcopy(layer).to(device), x.clone().to(device).requires_grad_()
        out = own(given)
        out = out[0] if isinstance(out, tuple) else out
        waves = torch.arange(out.numel()).view(out.shape).sin().to(device)  # of a norm's squares the gradient is next to zero
        (out.float() * waves).sum().backward()
        answers.append([out, given.grad, *(p.grad for p in own.parameters())])
    for there, here in zip(*answers, strict=True):
        assert here.dtype == there.dtype == dtype
        largest = max(there.float().abs().max().item(), 0.1)
        assert (here.cpu().float() - there.float()).abs().max().item() <= 0.04 * largest
