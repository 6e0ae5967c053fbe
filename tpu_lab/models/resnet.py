"""A residual network that reads handwritten digits. Plain PyTorch, any device.

He et al. 2015, "Deep residual learning" (arXiv 1512.03385): convolution, batch norm, and a way around. `tiny` and
`small` have the CIFAR-10 shape (section 4.2), `full` is ResNet-50 with the stride on the 3x3 convolution ("v1.5").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_lab.models import data


@dataclass(frozen=True)
class Config:
    """Sizes. `blocks` gives the blocks of each stage; each stage after the first halves the image, doubles the width.

    `full` is ResNet-50: 25,557,032 parameters.
    """

    blocks: tuple[int, ...] = (1, 1, 1)
    width: int = 16
    image: int = 28  # pixels high and wide
    channels: int = 1
    classes: int = 10
    bottleneck: bool = False  # 1x1, 3x3, 1x1 with four times the width out, instead of two 3x3
    stem: str = "cifar"  # "cifar": 3x3; "imagenet": 7x7 stride 2, then max pooling

    def __post_init__(self) -> None:
        if self.stem not in ("cifar", "imagenet"):
            raise ValueError(f'stem is "cifar" or "imagenet", not {self.stem!r}')

    @classmethod
    def tiny(cls) -> Config:
        return cls(blocks=(1, 1, 1), width=8)

    @classmethod
    def small(cls) -> Config:
        return cls(blocks=(3, 3, 3), width=16)

    @classmethod
    def full(cls) -> Config:
        return cls(blocks=(3, 4, 6, 3), width=64, image=224, channels=3, classes=1000, bottleneck=True, stem="imagenet")


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size at stride 1; no bias, as batch norm follows."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of three, and a way around: f[n,inputs,h,w] -> f[n,outputs,h',w']."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            plan = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        else:
            plan = [(inputs, width, 3, stride), (width, width, 3, 1)]
        outputs = plan[-1][1]
        self.convs = nn.ModuleList(conv(*sizes) for sizes in plan)
        self.norms = nn.ModuleList(nn.BatchNorm2d(sizes[1]) for sizes in plan)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (convolution, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(convolution(y))
            if i < len(self.convs) - 1:
                y = F.relu(y)
        return F.relu(y + self.around(x))


class Model(nn.Module):
    """Images f[n,channels,image,image] -> logits f[n,classes]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        if config.stem == "imagenet":
            first: nn.Module = conv(config.channels, config.width, 7, 2)
            pool: nn.Module = nn.MaxPool2d(3, 2, padding=1)
        else:
            first, pool = conv(config.channels, config.width, 3), nn.Identity()
        self.stem = nn.Sequential(first, nn.BatchNorm2d(config.width), nn.ReLU(), pool)
        stages, inputs = [], config.width
        for stage, count in enumerate(config.blocks):
            width = config.width << stage
            outputs = 4 * width if config.bottleneck else width
            blocks = []
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Block(inputs, width, stride, config.bottleneck))
                inputs = outputs
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(inputs, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def batch(config: Config, size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Digits and their labels: f32[size,channels,image,image], mean 0 and deviation 1 over the set, and int64[size].

    Where the model wants a larger image or three channels, the digit is enlarged and repeated.
    """
    images, labels = data.digits()
    chosen = torch.randint(len(images), (size,), generator=torch.Generator().manual_seed(seed))
    x = (images[chosen] - images.mean()) / images.std()
    if config.image != x.shape[-1]:
        x = F.interpolate(x, size=(config.image, config.image), mode="bilinear", align_corners=False)
    return x.expand(-1, config.channels, -1, -1).contiguous(), labels[chosen]


def shifted(images: Tensor, by: int = 1) -> Tensor:
    """Images f[n,channels,h,w], each moved by up to `by` pixels up, down and sideways, at random; the edge comes along.

    A digit that stands a little elsewhere is the same digit: a network that sees such copies learns more from few.
    """
    count, channels, height, width = images.shape
    wide = F.pad(images, (by, by, by, by), mode="replicate")
    down, right = torch.randint(2 * by + 1, (2, count, 1))
    rows, columns = (down + torch.arange(height))[:, None, :, None], (right + torch.arange(width))[:, None, None, :]
    return wide[torch.arange(count)[:, None, None, None], torch.arange(channels)[None, :, None, None], rows, columns]


def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in nats; a scalar. About ln(classes) before training."""
    return F.cross_entropy(model(images), labels)


def flops(config: Config, size: int) -> int:
    """Model FLOPs of a training step on `size` images (convention of `tpu_lab.models`).

    A convolution costs 2 kernel^2 inputs outputs for each pixel that comes out. That the first one needs no gradient
    for its image is not taken off: backward is twice forward.
    """

    def cost(inputs: int, outputs: int, kernel: int, pixels: int) -> int:
        return 2 * kernel**2 * inputs * outputs * pixels**2

    pixels = config.image
    if config.stem == "imagenet":
        pixels = (pixels + 1) // 2
        total = cost(config.channels, config.width, 7, pixels)
        pixels = (pixels + 1) // 2
    else:
        total = cost(config.channels, config.width, 3, pixels)
    inputs = config.width
    for stage, count in enumerate(config.blocks):
        width = config.width << stage
        outputs = 4 * width if config.bottleneck else width
        for i in range(count):
            before = pixels
            if stage > 0 and i == 0:
                pixels = (pixels + 1) // 2
            if config.bottleneck:
                total += (
                    cost(inputs, width, 1, before) + cost(width, width, 3, pixels) + cost(width, outputs, 1, pixels)
                )
            else:
                total += cost(inputs, width, 3, pixels) + cost(width, width, 3, pixels)
            if inputs != outputs or before != pixels:
                total += cost(inputs, outputs, 1, pixels)
            inputs = outputs
    return 3 * size * (total + 2 * inputs * config.classes)
