"""Answers to tutorial 08. Try yourself first: the checks give hints."""

import torch
import torch.nn.functional as F

from tpu_lab.models import mingpt


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids, following in batches:
        missing = model.config.block - ids.shape[1]
        ids, following = F.pad(ids, (0, missing)), F.pad(following, (0, missing), value=-100)
        loss = mingpt.loss(model, ids.to("tpu"), following.to("tpu"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


ANSWERS = {"launches": 19, "line": 12, "train": train}
