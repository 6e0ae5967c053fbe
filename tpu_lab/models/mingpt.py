"""A small GPT that predicts the next character of Python source code. Plain PyTorch, any device.

The shape of GPT-2 (Radford et al. 2019): token and position embeddings, blocks of causal attention and MLP with the
layer norm first, a last layer norm and a head. minGPT after Karpathy's name for the idea; the code is our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_lab.models import data


@dataclass(frozen=True)
class Config:
    """Sizes. `width` must divide by `heads`. `full` is GPT-2 small: 124,439,808 parameters with the head tied."""

    layers: int = 3
    heads: int = 4
    width: int = 128
    block: int = 64  # characters it can see
    vocabulary: int = len(data.VOCABULARY)
    dropout: float = 0.0
    tied: bool = False  # the head shares the token embedding's weight
    attention: str = "written"  # "written" out op by op, or "sdpa": F.scaled_dot_product_attention

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide by heads {self.heads}")
        if self.attention not in ("written", "sdpa"):
            raise ValueError(f'attention is "written" or "sdpa", not {self.attention!r}')

    @classmethod
    def tiny(cls) -> Config:
        return cls(layers=2, heads=2, width=32, block=16)

    @classmethod
    def small(cls) -> Config:
        return cls(layers=4, heads=4, width=128, block=64, dropout=0.1)

    @classmethod
    def full(cls) -> Config:
        return cls(
            layers=12, heads=12, width=768, block=1024, vocabulary=50257, dropout=0.1, tied=True, attention="sdpa"
        )


class Attention(nn.Module):
    """Causal self-attention: f[batch,time,width] -> the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.written = config.attention == "written"
        self.p = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        future = torch.ones(config.block, config.block, dtype=torch.bool).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        if self.written:
            scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
            scores = scores.masked_fill(self.future[:time, :time], float("-inf"))
            mixed = F.dropout(scores.softmax(-1), self.p, self.training) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        return F.dropout(self.proj(mixed), self.p, self.training)


class MLP(nn.Module):
    """Four times wider, GELU, and back: f[batch,time,width] -> the same."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(config.width, 4 * config.width)
        self.proj = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.proj(F.gelu(self.fc(x))))


class Block(nn.Module):
    """Attention, then MLP, each added to what came in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    """int64[batch,time] -> logits f[batch,time,vocabulary], with time at most `config.block`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.block, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        # GPT-2's start: small normal weights, smaller still where a block adds to the residual stream.
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if config.tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        time = ids.shape[1]
        if time > self.config.block:
            raise ValueError(f"{time} characters do not fit in a block of {self.config.block}: pass ids[:, -block:]")
        place = torch.arange(time, device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(place))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))

    @torch.no_grad()
    def generate(
        self, ids: Tensor, count: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
    ) -> Tensor:
        """Append `count` sampled tokens to int64[batch,time] ids; the result is on the CPU.

        Every step runs the same shape, a full block filled from the left: one compiled program serves them all, and
        causal attention never looks at the empty places on the right. The choice is made on the host from a seeded
        CPU generator, so the same weights say the same on every device. `temperature=0` takes the likeliest.
        """
        device = next(self.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        block, ids = self.config.block, ids.cpu()
        was_training = self.training
        self.eval()
        try:
            for _ in range(count):
                seen = ids[:, -block:]
                window = ids.new_zeros(len(ids), block)  # made anew, so that its strides are always the same, too
                window[:, : seen.shape[1]] = seen
                logits = self(window.to(device)).float().cpu()[:, seen.shape[1] - 1]
                following = choose(logits, temperature, top_k, generator)
                ids = torch.cat([ids, following], dim=1)
        finally:
            self.train(was_training)
        return ids


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """A token for each row of logits f[batch,vocabulary] on the CPU: int64[batch,1]. Temperature 0 takes the likeliest."""
    if temperature < 0:
        raise ValueError(f"temperature is at least 0, not {temperature}")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def batch(config: Config, size: int = 8, seed: int = 0, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Random stretches of the first 90% of the text, or of the rest: ids and the ids one later, int64[size,block]."""
    ids = data.tokens()
    cut = len(ids) * 9 // 10
    ids = ids[cut:] if held_out else ids[:cut]
    start = torch.randint(len(ids) - config.block, (size, 1), generator=torch.Generator().manual_seed(seed))
    where = start + torch.arange(config.block + 1)
    stretch = ids[where]
    return stretch[:, :-1].contiguous(), stretch[:, 1:].contiguous()


def loss(model: nn.Module, ids: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy in nats a character; a scalar. ln(vocabulary) before training."""
    return F.cross_entropy(model(ids).flatten(0, 1), following.flatten())


def flops(config: Config, size: int) -> int:
    """Model FLOPs of a training step on `size` blocks (convention of `tpu_lab.models`).

    A token costs 2 FLOPs a weight: 12 width^2 weights a layer and the head (Kaplan et al. 2020, table 1,
    arXiv 2001.08361), and a layer 4 block width for scores and mixing, half of it as attention is causal.
    """
    layer = 2 * 12 * config.width**2 + 2 * config.block * config.width
    head = 2 * config.width * config.vocabulary
    return 3 * size * config.block * (config.layers * layer + head)
