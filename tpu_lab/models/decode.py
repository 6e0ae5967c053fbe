"""Writing with a cache: keys and values of what was read are kept, so that each new token is read once. Plain PyTorch.

Two caches for `mingpt.Model`, which differ in shapes and in nothing else. `Growing` is as long as the text, so a
compiler sees another shape, and makes another program, for each token. `Static` has its places from the start and masks
those that nobody filled yet: one shape, one program (Pope et al. 2022, "Efficiently scaling transformer inference",
arXiv 2211.05102, section 3.3, keeps such a buffer of fixed length).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpu_lab.models.mingpt import Model, choose


class Growing:
    """A cache as long as the text: `torch.cat` adds a place for each token. Keys and values f[batch,heads,time,width/heads]."""

    def __init__(self, model: Model) -> None:
        self.pairs: list[tuple[Tensor, Tensor] | None] = [None] * model.config.layers
        self.length = 0  # tokens read

    def add(self, layer: int, key: Tensor, value: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with these at the end."""
        if (before := self.pairs[layer]) is not None:
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
        self.pairs[layer] = key, value
        return key, value


class Static:
    """A cache of `places` from the start: a token is written to its own place. Full, it gets as many places again.

    With places = the model's block it never grows; with fewer it grows in buckets, and each size is a program.
    """

    def __init__(self, model: Model, places: int) -> None:
        if places < 1:
            raise ValueError(f"a cache has at least one place, not {places}")
        config, weight = model.config, model.wte.weight
        # Made on the CPU and moved: on the device, filling it with zeros would itself be a program.
        self.more = torch.zeros(1, config.heads, places, config.width // config.heads, dtype=weight.dtype).to(weight.device)
        self.pairs = [(self.more.clone(), self.more.clone()) for _ in range(config.layers)]
        self.length = 0

    def add(self, layer: int, key: Tensor, value: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with these at their place."""
        keys, values = self.pairs[layer]
        if self.length == keys.shape[2]:
            keys, values = torch.cat([keys, self.more], 2), torch.cat([values, self.more], 2)
        keys, values = keys.index_copy(2, place, key), values.index_copy(2, place, value)
        self.pairs[layer] = keys, values
        return keys, values


def read(model: Model, cache: Growing | Static, token: Tensor) -> Tensor:
    """The logits f[1,vocabulary] after one more token, int64[1,1] on the CPU; the cache keeps what it read.

    ValueError when the model has no further place.
    """
    config, device = model.config, model.wte.weight.device
    if cache.length == config.block:
        raise ValueError(f"{cache.length} tokens are read, and the model's block has no further place")
    place = torch.tensor([cache.length]).to(device)  # an input: as a number in the program it would make one a token
    x = model.wte(token.to(device)) + model.wpe(place)
    for layer, block in enumerate(model.h):
        heads = block.attn.qkv(block.ln_1(x)).view(1, 1, 3, config.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        keys, values = cache.add(layer, key, value, place)
        scores = query @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])
        empty = torch.arange(keys.shape[2], device=device) > place
        mixed = scores.masked_fill(empty, float("-inf")).softmax(-1) @ values
        x = x + block.attn.proj(mixed.transpose(1, 2).reshape(1, 1, config.width))
        x = x + block.mlp(block.ln_2(x))
    cache.length += 1
    return model.head(model.ln_f(x))[:, 0]


@torch.no_grad()
def generate(
    model: Model,
    cache: Growing | Static,
    ids: Tensor,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Append `count` sampled tokens to int64[1,time] ids, on the CPU: what `Model.generate` appends, within the block.

    The text given is read token by token, too. time + count may be one more than the block: the last is not read.
    """
    ids, generator = ids.cpu(), torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        for i in range(ids.shape[1] + count - 1):
            logits = read(model, cache, ids[:, i : i + 1]).float().cpu()
            if i + 1 == ids.shape[1]:
                ids = torch.cat([ids, choose(logits, temperature, top_k, generator)], dim=1)
    finally:
        model.train(was_training)
    return ids
