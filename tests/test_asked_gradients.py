"""Backward ops with an `output_mask`: any subset of the gradients, as on the CPU.

PyTorch's meta kernels sometimes give a shape for a gradient that nobody asked for; a lowering gives none.
"""

import copy

import pytest
import torch
from torch import nn

import tpu_lab  # noqa: F401

LAYERS = {
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm, eval": lambda: nn.BatchNorm2d(4).eval(),
    "layer norm": lambda: nn.LayerNorm([4, 3, 3]),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "conv": lambda: nn.Conv2d(4, 2, 2),
    "transposed conv": lambda: nn.ConvTranspose2d(4, 2, 2),
}
WANTED = [(x, w, b) for x in (True, False) for w in (True, False) for b in (True, False) if x or w or b]


@pytest.mark.parametrize("wanted", WANTED, ids=lambda w: "".join("xwb"[i] for i in range(3) if w[i]))
@pytest.mark.parametrize("name", LAYERS)
def test_any_subset_of_the_gradients(name, wanted):
    torch.manual_seed(0)
    cpu = LAYERS[name]()
    image = torch.randn(2, 4, 3, 3)
    got = {}
    for device in ("cpu", "tpu"):
        layer = copy.deepcopy(cpu).to(device)
        x = image.to(device).detach().requires_grad_(wanted[0])
        layer.weight.requires_grad_(wanted[1])
        layer.bias.requires_grad_(wanted[2])
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
            layer(x).square().sum().backward()
            got[device] = [None if t.grad is None else t.grad.cpu() for t in (x, layer.weight, layer.bias)]
    for mine, theirs, want in zip(got["tpu"], got["cpu"], wanted, strict=True):
        assert (theirs is not None) == want
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
