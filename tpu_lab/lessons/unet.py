"""Beside `notebooks/unet.py`: counts of programs, classical filters, and the pictures beside one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from skimage import filters, restoration
from torch import Tensor
from torch.nn import functional as F

from tpu_lab.viz import page

NOISE = 0.1  # standard deviation, where black is 0 and white is 1
BUCKETS = (2, 8, 16, 32, 64)


def padded(pictures: Tensor, bucket: int) -> Tensor:
    """Pictures f32[n,3,h,w], grown to the right and down to multiples of `bucket`: mirrored, so that no edge appears."""
    height, width = pictures.shape[-2:]
    return F.pad(pictures, (0, -width % bucket, 0, -height % bucket), mode="reflect")


def grown(requests: Sequence[Tensor], bucket: int) -> float:
    """Pixels computed for each pixel sent."""
    return sum(padded(x, bucket).numel() for x in requests) / sum(x.numel() for x in requests)


def buckets_table(requests: Sequence[Tensor]) -> page.Piece:
    """What each bucket costs and leaves: plain counting."""
    rows = [
        {
            "pad to multiples of": f"{bucket}",
            "different sizes left": f"{len({padded(x, bucket).shape for x in requests})}",
            "pixels computed": f"{grown(requests, bucket):.2f} \u00d7",
        }
        for bucket in BUCKETS
    ]
    return page.table(rows, caption="Different sizes and pixels computed for each bucket")


def psnr(picture: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, of pictures in 0..1: higher is better."""
    return -10 * torch.log10((picture.clamp(0, 1) - clean).square().mean()).item()


def filtered(noisy: Tensor, clean: Tensor) -> dict[str, Tensor]:
    """Two classical filters, {name: picture}, each at its best of a few strengths. Total variation keeps edges."""
    x, tv = noisy.numpy(), restoration.denoise_tv_chambolle
    tried = {
        "Gaussian": [filters.gaussian(x, sigma, channel_axis=0) for sigma in (0.7, 0.85, 1, 1.2)],
        "total variation": [tv(x, weight, channel_axis=0) for weight in (0.06, 0.08, 0.1, 0.12)],
    }
    return {
        name: max(map(torch.from_numpy, pictures), key=lambda picture: psnr(picture, clean))
        for name, pictures in tried.items()
    }


def compared(shown: Mapping[str, Tensor], clean: Tensor) -> page.Piece:
    """The pictures in a row, each with its PSNR, and the original."""
    captioned = [(picture, f"{name}: {psnr(picture, clean):.1f} dB") for name, picture in shown.items()]
    return page.pictures([*captioned, (clean, "original, never seen in training")], width=200, smooth=True)


def loss_curve(losses: Sequence[float], decibels: float, seconds: float) -> page.Piece:
    """The mean of 20 steps each, under what came of it."""
    mean = [sum(part) / len(part) for part in (losses[max(0, i - 19) : i + 1] for i in range(len(losses)))]
    said = f"{decibels:.1f} dB after {len(losses)} steps, {seconds:.0f} s with compiling"
    return page.curve(mean, said, y="noise left, mean of 20 steps", levels=[(1, "untouched")])
