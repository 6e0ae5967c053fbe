"""Answers to tutorial 05. Try yourself first: the checks give hints."""

import torch
import torch.nn.functional as F


def factor(norm):
    return 1 / norm.clamp(min=1.0)


def quiet(model, optimizer, images, labels):
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    right = (logits.argmax(1) == labels).float().mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    scale = factor(norm)
    for p in model.parameters():
        p.grad *= scale
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), right


ANSWERS = {"mib_saved": 7, "launches": 4, "line": 8, "factor": factor, "quiet": quiet}
