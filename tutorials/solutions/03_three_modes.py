"""Answers to tutorial 03. Try yourself first: the checks give hints."""

import torch


def quick(x):
    with torch.tpu.set_eager_mode("fused"):
        return ((x * 2 + 1).relu() ** 2).sum()


def train(model, opt, batches):
    losses = []
    for x, y in batches:
        loss = (model(x) - y).square().mean()
        loss.backward()
        losses.append(loss.detach())
        opt.step()
        opt.zero_grad()
    return [loss.item() for loss in losses]


ANSWERS = {
    "launches_strict": 5,
    "fused_twice": (2, 1),
    "quick": quick,
    "launches_debug": 5,
    "train": train,
}
