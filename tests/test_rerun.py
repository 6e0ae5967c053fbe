"""Re-running a cell ten times, as a reader does who moves a control, does not grow memory: neither tensors nor records."""

import gc

import pytest
import stated
import torch

import tpu_lab  # noqa: F401  the device
from tpu_lab.models import mingpt, unet
from tpu_lab.trace import LaunchRecord, OpRecord, Trace


@pytest.fixture(scope="module")
def cells():
    """What a cell of a notebook does, by notebook: each gives its profile."""
    gpt, denoiser = (stated.load(name) for name in ("mingpt", "unet"))
    config = mingpt.Config(layers=1, heads=2, width=16, block=8)
    chosen = {"mode": "fused", "dtype": "float32", "batch": 2, "rate": 1e-2}
    small = unet.Model(unet.Config(width=8, levels=(1, 2), groups=4)).to("tpu")
    return {
        "mingpt": lambda: gpt.run(config, chosen, 4, "tpu", "").profile,
        "unet": lambda: denoiser.serve(small, [torch.zeros(1, 3, 16, 16)] * 2, 16, "fused", "tpu")[0],
    }


def alive():
    """(bytes on the device, records, all objects)"""
    gc.collect()
    objects = gc.get_objects()
    return (
        torch.tpu.memory_allocated(),
        sum(type(o) in (Trace, OpRecord, LaunchRecord) for o in objects),
        len(objects),
    )


@pytest.mark.parametrize("name", ["mingpt", "unet"])
def test_ten_times_is_no_more_than_four_times(cells, name):
    earlier, found = [], []
    for _ in range(10):
        earlier[:] = [*earlier[-1:], cells[name]()]  # a notebook keeps two, to say what changed
        assert earlier[-1]._repr_html_() and earlier[0].diff(earlier[-1]).title
        found.append(alive())
    (held, records, objects), (held_later, records_later, objects_later) = found[3], found[9]
    assert held_later == held and records_later == records > 100
    # PyTorch and JAX keep a little of each program that is made anew: some 80 objects.
    assert objects_later - objects < 0.005 * objects
