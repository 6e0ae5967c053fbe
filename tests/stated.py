"""The results that the notebooks state, in full: `python -m tests.stated [notebook …] [--mode strict fused compile]`.

Trains each model with its notebook's own defaults and own loop in each mode, on this machine, and says whether the
result is in the stated range; exit code 1 if one is not. About a minute for each line on 2 cores, longer in strict mode.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import torch

import tpu_lab  # noqa: F401  the device
from tpu_lab.lessons import dlrm as flights
from tpu_lab.lessons import resnet as digits
from tpu_lab.lessons import unet as photographs
from tpu_lab.models import data, dlrm, mingpt, unet
from tpu_lab.viz import ahead

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
MODES = ("strict", "fused", "compile")


def load(name):
    """A notebook as a module: its functions may be called, its cells have not run."""
    spec = importlib.util.spec_from_file_location(f"notebook_{name}", NOTEBOOKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # marimo finds the source of a class through it
    spec.loader.exec_module(module)
    return module


def of_mingpt(notebook, params, mode):
    """(nats a character on text it never saw, all losses, at most)."""
    config = mingpt.Config(layers=params["layers"], width=params["width"], block=params["block"], heads=4)
    run = notebook.run(config, {**params, "mode": mode}, params["longer"], params["device"], "")
    return run.held_out, run.losses, (0.0, params["reach"])


def of_resnet(notebook, params, mode):
    """(share of the test digits read right, all losses, at least)."""
    images, labels = data.digits()
    x, steps = (images - images.mean()) / images.std(), params["epochs"] * notebook.SPLIT // params["batch"]
    own = params["channels"], params["batch"], steps, params["rate"], params["device"]
    model, losses = notebook.run(*own, x, labels, "", mode)
    right = digits.read(model, x[notebook.SPLIT :], params["device"]) == labels[notebook.SPLIT :]
    return right.float().mean().item(), losses, (params["accuracy"], 1.0)


def of_dlrm(notebook, params, mode):
    """(AUC on flights it never saw, all losses, at least: that of a logistic regression and a margin)."""
    columns = data.flights()
    late, measured = columns["late"], torch.cat([columns["dense"][:, :3], columns["weather"]], dim=1)
    columns = late, measured, *(columns[name].view(len(late), -1) for name in dlrm.TABLES)
    run = notebook.run({**params, "mode": mode}, params["longer"], params, columns, "")
    unseen = late[-flights.UNSEEN :]
    reached = dlrm.auc(flights.judge(run.model, columns, params["device"]), unseen)
    to_beat = dlrm.auc(flights.logistic(measured, late)[-flights.UNSEEN :], unseen)
    return reached, run.losses, (to_beat + params["better"], 1.0)


def of_unet(notebook, params, mode):
    """(PSNR in dB on a photograph it never saw, all losses, at least: that of the best filter and a margin)."""
    config = unet.Config(width=params["width"], levels=(1, 2), image=params["image"], groups=4, noise=photographs.NOISE)
    model, losses, _ = notebook.train(config, params["steps"], params["rate"], params["device"], mode)
    clean = data.photographs()[notebook.HELD_OUT][:, 10:170, 140:300]
    noisy = clean + photographs.NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reached = photographs.psnr(notebook.denoise(model, noisy[None], 2, params["device"])[0], clean)
    best = max(photographs.psnr(picture, clean) for picture in photographs.filtered(noisy, clean).values())
    return reached, losses, (best + params["better"], 60.0)


RESULTS = {"mingpt": of_mingpt, "resnet": of_resnet, "dlrm": of_dlrm, "unet": of_unet}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stated", description=__doc__)
    parser.add_argument("notebooks", nargs="*", choices=[[], *RESULTS], default=[])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args()
    wrong = 0
    for name in args.notebooks or RESULTS:
        notebook, params = load(name), ahead.params_of(NOTEBOOKS / f"{name}.py")
        for mode in args.mode:
            start = time.perf_counter()
            result, _, (least, most) = RESULTS[name](notebook, params, mode)
            within = least <= result <= most
            wrong += not within
            said = "as stated" if within else "NOT as stated"
            print(
                f"{name:8}{mode:9}{result:8.4f}  {said}: {least:.4f} to {most:.4f}  {time.perf_counter() - start:6.1f} s",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
