"""A UNet that takes the noise off photographs. Plain PyTorch, any device.

Ronneberger et al. 2015 (arXiv 1505.04597) gave the shape: down, up, and skip connections across. The blocks (group
norm, SiLU, convolution, with a way around) are those of Ho et al. 2020 (arXiv 2006.11239), without the time step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_lab.models import data


@dataclass(frozen=True)
class Config:
    """Sizes. One level for each entry of `levels`, which multiplies `width`; each level below halves the image.

    `width` must divide by `groups`, and `image` by 2 for each level but the first.
    """

    width: int = 32
    levels: tuple[int, ...] = (1, 2)
    blocks: int = 1  # a level, on the way down and on the way up
    image: int = 32
    channels: int = 3
    groups: int = 8
    noise: float = 0.1  # standard deviation, where the photograph is in 0..1

    def __post_init__(self) -> None:
        if self.width % self.groups:
            raise ValueError(f"width {self.width} does not divide by groups {self.groups}")
        if self.image % (1 << (len(self.levels) - 1)):
            raise ValueError(f"image {self.image} cannot be halved {len(self.levels) - 1} times")

    @classmethod
    def tiny(cls) -> Config:
        return cls(width=8, levels=(1, 2), image=16, groups=4)

    @classmethod
    def small(cls) -> Config:
        return cls(width=32, levels=(1, 2, 2), image=32)

    @classmethod
    def full(cls) -> Config:
        return cls(width=128, levels=(1, 2, 3, 4), blocks=2, image=64, groups=32)


class Block(nn.Module):
    """Norm, SiLU, 3x3 convolution, twice, and a way around: f[n,inputs,h,w] -> f[n,outputs,h,w]."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(groups, inputs)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm_2 = nn.GroupNorm(groups, outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.around = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x)))
        y = self.conv_2(F.silu(self.norm_2(y)))
        return y + self.around(x)


class Model(nn.Module):
    """Noisy images f[n,channels,image,image] -> the noise in them, the same shape, in standard deviations."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        widths = [config.width * level for level in config.levels]
        self.first = nn.Conv2d(config.channels, widths[0], 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        inputs = widths[0]
        for level, width in enumerate(widths):
            sizes = [inputs] + [width] * config.blocks
            self.down.append(
                nn.Sequential(*(Block(a, b, config.groups) for a, b in zip(sizes, sizes[1:], strict=False)))
            )
            inputs = width
            if level < len(widths) - 1:
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
        self.middle = Block(inputs, inputs, config.groups)
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(len(widths))):
            width = widths[level]
            if level < len(widths) - 1:
                self.grow.append(nn.Conv2d(inputs, width, 3, padding=1))
                inputs = width
            sizes = [inputs + width] + [width] * config.blocks  # the skip connection doubles what comes in
            self.up.append(nn.Sequential(*(Block(a, b, config.groups) for a, b in zip(sizes, sizes[1:], strict=False))))
            inputs = width
        self.norm = nn.GroupNorm(config.groups, inputs)
        self.last = nn.Conv2d(inputs, config.channels, 3, padding=1)
        nn.init.zeros_(self.last.weight)  # it starts by predicting no noise: the loss starts at the noise's variance
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for level, blocks in enumerate(self.down):
            x = blocks(x)
            skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        x = self.middle(x)
        for step, blocks in enumerate(self.up):
            if step > 0:
                x = self.grow[step - 1](F.interpolate(x, scale_factor=2, mode="nearest"))
            x = blocks(torch.cat([x, skips.pop()], dim=1))
        return self.last(F.silu(self.norm(x)))


def batch(
    config: Config, size: int = 4, seed: int = 0, photographs: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Random squares of the photographs with noise on them, and that noise: both f32[size,channels,image,image].

    photographs: each f32[3,height,width] in 0..1; all of `data.photographs()` when left out. The images are centred (0..1 less 0.5). The noise is standard normal, and `config.noise` times it was added.
    ValueError unless `config.channels` is 3.
    """
    if config.channels != 3:
        raise ValueError(f"the photographs have 3 channels, not {config.channels}")
    generator = torch.Generator().manual_seed(seed)
    photographs = photographs or data.photographs()

    def pick(end: int) -> int:
        return int(torch.randint(end, (), generator=generator))

    squares = []
    for _ in range(size):
        photograph = photographs[pick(len(photographs))]
        top, left = (pick(side - config.image + 1) for side in photograph.shape[1:])
        squares.append(photograph[:, top : top + config.image, left : left + config.image])
    clean = torch.stack(squares) - 0.5
    noise = torch.randn(clean.shape, generator=generator)
    return clean + config.noise * noise, noise


def loss(model: nn.Module, noisy: Tensor, noise: Tensor) -> Tensor:
    """Mean squared error of the predicted noise, in its variances; a scalar. 1 for who predicts none."""
    return F.mse_loss(model(noisy), noise)


def flops(config: Config, size: int) -> int:
    """Model FLOPs of a training step on `size` images (convention of `tpu_lab.models`): convolutions only."""

    def cost(inputs: int, outputs: int, kernel: int, pixels: int) -> int:
        return 2 * kernel**2 * inputs * outputs * pixels**2

    def block(inputs: int, outputs: int, pixels: int) -> int:
        around = cost(inputs, outputs, 1, pixels) if inputs != outputs else 0
        return cost(inputs, outputs, 3, pixels) + cost(outputs, outputs, 3, pixels) + around

    widths = [config.width * level for level in config.levels]
    pixels, inputs = config.image, widths[0]
    total = cost(config.channels, inputs, 3, pixels)
    for level, width in enumerate(widths):
        total += block(inputs, width, pixels) + (config.blocks - 1) * block(width, width, pixels)
        inputs = width
        if level < len(widths) - 1:
            pixels //= 2
            total += cost(width, width, 3, pixels)
    total += block(inputs, inputs, pixels)
    for level in reversed(range(len(widths))):
        width = widths[level]
        if level < len(widths) - 1:
            pixels *= 2
            total += cost(inputs, width, 3, pixels)
            inputs = width
        total += block(inputs + width, width, pixels) + (config.blocks - 1) * block(width, width, pixels)
        inputs = width
    return 3 * size * (total + cost(inputs, config.channels, 3, pixels))
