"""Answers to tutorial 06. Try yourself first: the checks give hints."""

import torch
import torch.nn.functional as F


def pad(ids, length):
    missing = length - (ids.shape[1] - 1)
    return F.pad(ids[:, :-1], (0, missing)), F.pad(ids[:, 1:], (0, missing), value=-100)


def likeliest(logits, k):
    place = torch.tensor([k]).to(logits.device)
    return logits[0].index_select(0, place).argmax()


ANSWERS = {"misses": 8, "cause": "shape", "pad": pad, "likeliest": likeliest, "buckets": (20, 44)}
