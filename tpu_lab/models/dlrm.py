"""A recommendation model that tells which flights will be late. Plain PyTorch, any device.

Naumov et al. 2019, "Deep learning recommendation model" (arXiv 1906.00091): embedding tables for what is counted in
names, an MLP for what is measured, the dot products of all pairs of their vectors, and an MLP on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_lab.models import data

# The tables, and how many rows the flights of 2013 need. "airports" is a bag of two: from and to.
TABLES = {"carrier": 16, "airports": 107, "tailnum": 4037, "flight": 3835, "month": 12, "weekday": 7, "hour": 19}
DENSE = 4  # distance, planned departure and arrival, departure delay


@dataclass(frozen=True)
class Config:
    """Sizes. A table has `rows` rows at most: names beyond share a row (modulo), the usual hashing trick.

    `full` has the MLPs and the width of the MLPerf benchmark, with the flights' tables: its memory is all MLP, where
    a real one's is all tables.
    """

    width: int = 16  # of each embedding, and of the bottom MLP's result
    bottom: tuple[int, ...] = (32,)  # hidden layers
    top: tuple[int, ...] = (32,)
    rows: int = 10_000
    measures: int = DENSE  # columns of what is measured
    joined: bool = False  # all tables under one another in one EmbeddingBag: one lookup instead of seven

    @classmethod
    def tiny(cls) -> Config:
        return cls(width=8, bottom=(16,), top=(16,), rows=64)

    @classmethod
    def small(cls) -> Config:
        return cls(width=16, bottom=(64, 32), top=(64, 32))

    @classmethod
    def full(cls) -> Config:
        return cls(width=128, bottom=(512, 256), top=(1024, 1024, 512, 256))

    @property
    def vectors(self) -> int:
        """Vectors that interact: one a table, and the bottom MLP's."""
        return len(TABLES) + 1

    @property
    def heights(self) -> tuple[int, ...]:
        """Rows of each table, in TABLES' order."""
        return tuple(min(rows, self.rows) for rows in TABLES.values())

    @property
    def bottom_sizes(self) -> tuple[int, ...]:
        return (self.measures, *self.bottom, self.width)

    @property
    def top_sizes(self) -> tuple[int, ...]:
        pairs = self.vectors * (self.vectors - 1) // 2
        return (self.width + pairs, *self.top, 1)


def mlp(sizes: tuple[int, ...], last: bool) -> nn.Sequential:
    """Linear layers with ReLU between, and after the last one if `last`."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers if last else layers[:-1])


class Model(nn.Module):
    """f[n,measures] measures and int64[n,bag] names, one a table in order -> logits f[n]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        heights = (sum(config.heights),) if config.joined else config.heights
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, config.width, mode="sum") for rows in heights)
        self.bottom = mlp(config.bottom_sizes, last=True)
        self.top = mlp(config.top_sizes, last=False)
        pairs = torch.tril_indices(config.vectors, config.vectors, offset=-1)
        self.register_buffer("pairs", pairs, persistent=False)
        first = torch.tensor([0, *config.heights]).cumsum(0)[:-1]  # the row at which each table begins, if joined
        self.register_buffer("first", first, persistent=False)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, dense: Tensor, *names: Tensor) -> Tensor:
        if len(names) != len(TABLES):
            raise ValueError(f"the model has {len(TABLES)} tables ({', '.join(TABLES)}), not {len(names)}")
        measured = self.bottom(dense)
        vectors = torch.stack([measured, *self.look_up(names)], dim=1)
        dots = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([measured, dots[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)

    def look_up(self, names: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """One f[n,width] a table: the row of its name, or the sum of a bag's rows."""
        if not self.config.joined:
            return [table(ids) for table, ids in zip(self.tables, names, strict=True)]
        sizes = [ids.shape[1] for ids in names]
        starts = torch.tensor([0, *sizes], device=self.first.device).cumsum(0)
        flights = torch.arange(len(names[0]), device=self.first.device)
        bags = (flights[:, None] * sum(sizes) + starts[:-1]).flatten()
        rows = torch.cat([ids + first for ids, first in zip(names, self.first, strict=True)], dim=1)
        return self.tables[0](rows.flatten(), bags).view(len(flights), len(names), -1).unbind(1)


def batch(config: Config, size: int = 32, seed: int = 0) -> tuple[Tensor, ...]:
    """Late or not f32[size], measures f32[size,4], then int64[size,bag] names, one a table in TABLES' order."""
    columns = data.flights()
    chosen = torch.randint(len(columns["late"]), (size,), generator=torch.Generator().manual_seed(seed))
    names = []
    for name, rows in zip(TABLES, config.heights, strict=True):
        ids = columns[name][chosen] % rows
        names.append(ids if ids.dim() == 2 else ids[:, None])
    return (columns["late"][chosen], columns["dense"][chosen], *names)


def loss(model: nn.Module, late: Tensor, dense: Tensor, *names: Tensor) -> Tensor:
    """Mean log loss in nats; a scalar. 0.55 for who knows only how many flights are late."""
    return F.binary_cross_entropy_with_logits(model(dense, *names), late)


def flops(config: Config, size: int) -> int:
    """Model FLOPs of a training step on `size` flights (convention of `tpu_lab.models`): MLPs and dots, no lookups.

    All vectors^2 dot products are counted, as the product computes them, though each pair is used once.
    """

    def cost(sizes: tuple[int, ...]) -> int:
        return sum(2 * inputs * outputs for inputs, outputs in zip(sizes, sizes[1:], strict=False))

    dots = 2 * config.vectors**2 * config.width
    return 3 * size * (cost(config.bottom_sizes) + cost(config.top_sizes) + dots)


def auc(scores: Tensor, late: Tensor) -> float:
    """How often a late flight has a higher score than one on time: 0.5 is guessing, 1 is knowing."""
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (count.cumsum(0) - (count - 1) / 2).double()[place]  # equal scores share the mean of their ranks
    positive = late.sum().double()
    return ((ranks[late > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(late) - positive))).item()


def roc(scores: Tensor, late: Tensor, alarms: Tensor) -> list[float]:
    """Of the late flights, the share found when this share of those on time is taken for late, too."""
    ordered = late[scores.argsort(descending=True)].double()
    hits, false = ordered.cumsum(0) / late.sum(), (1 - ordered).cumsum(0) / (1 - late).sum()
    return hits[(torch.searchsorted(false, alarms.double(), right=True) - 1).clamp_min(0)].tolist()
