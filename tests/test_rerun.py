"""Re-running a cell ten times, as a reader does who moves a control, does not grow memory: neither tensors nor records."""

import gc
import logging
import sys

import pytest
import stated
import torch

import tpu_lab
from tpu_lab.models import mingpt, unet
from tpu_lab.trace import LaunchRecord, OpRecord, Trace


@pytest.fixture(scope="module")
def cells():
    """What a cell of a notebook does, by notebook: each gives its profile."""
    gpt, denoiser = (stated.load(name) for name in ("mingpt", "unet"))
    turns = stated.load("modes")
    config = mingpt.Config(layers=1, heads=2, width=16, block=8)
    chosen = {"mode": "fused", "dtype": "float32", "batch": 2, "rate": 1e-2}
    compiled = {**chosen, "mode": "compile"}
    small = unet.Model(unet.Config(width=8, levels=(1, 2), groups=4)).to("tpu")
    return {
        "mingpt": lambda: gpt.run(config, chosen, 4, "tpu", "").profile,
        "mingpt compiled": lambda: gpt.run(config, compiled, 3, "tpu", "").profile,
        "unet": lambda: denoiser.serve(small, [torch.zeros(1, 3, 16, 16)] * 2, 16, "fused", "tpu")[0],
        "modes": lambda: turns.compare(16, 1, 16, ("fused", "compiled"), 1, "tpu"),
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


# PyTorch and JAX keep a little of each program that is made anew; torch.compile the fakes of an optimizer's gradients, too.
@pytest.mark.parametrize("name, objects_each", [("mingpt", 300), ("mingpt compiled", 300), ("unet", 300), ("modes", 600)])
def test_ten_times_is_no_more_than_four_times(cells, name, objects_each, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep all that it writes
    earlier, found = [], []
    for _ in range(10):
        earlier[:] = [*earlier[-1:], cells[name]()]  # a notebook keeps two, to say what changed
        assert earlier[-1]._repr_html_() and (name == "modes" or earlier[0].diff(earlier[-1]).title)
        found.append(alive())
    (held, records, objects), (held_later, records_later, objects_later) = found[3], found[9]
    assert held_later == held and records_later == records > 100
    assert objects_later - objects < 6 * objects_each


def test_no_names_of_dynamos_come_together_in_the_users_module(cells):
    def names(module):
        return {name for name in vars(module) if name.startswith(("__compiled_fn", "__resume_at", "__optimizer"))}

    turns = sys.modules["notebook_modes"]
    for _ in range(2):
        cells["modes"]()
        cells["mingpt compiled"]()
    gc.collect()
    assert names(turns) == set() and len(names(mingpt)) == 1  # the last model's: the next compile takes it away


def test_what_the_user_compiled_himself_stays_compiled():
    """The same function, compared and called: the comparison forgets its own copy."""
    x = torch.ones(4, 4).to("tpu")

    def step():
        return (x * 2 + 1).sum()

    own = torch.compile(step)
    assert own().item() == 48
    tpu_lab.compare_modes(step, steps=1, modes=("compiled",), cpu=False)
    with tpu_lab.profile(mode="strict", peak_flops=1e9) as p:
        assert own().item() == 48
    assert [launch.mode for launch in p.trace.launches] == ["compiled"] and not p.trace.compiles
