"""Models others wrote, on the device: each family forward and backward against the CPU, in strict and fused mode."""

import hub_models
import pytest
import torch

import tpu_lab  # noqa: F401  the device
from tpu_lab.backend import fallback

STRICT, FUSED = torch.tpu.EagerMode.DEFER_NEVER, torch.tpu.EagerMode.DEFER_AND_FUSE
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}  # compiles in half of the time


@pytest.fixture(autouse=True)
def quick():
    with torch.tpu.compiler.custom_compiler_options(QUICK):
        yield


@pytest.fixture
def hosted(monkeypatch):
    """The names of the ops that ran on the CPU."""
    seen, run = set(), fallback.run

    def watched(record, args, kwargs, reason):
        seen.add(record.name)
        return run(record, args, kwargs, reason)

    monkeypatch.setattr(fallback, "run", watched)
    return seen


@pytest.mark.parametrize("name", [row.name for row in hub_models.ROWS])
def test_a_family_agrees_with_the_cpu_in_strict_and_fused_mode(name, hosted):
    row = hub_models.named(name)
    model = hub_models.build(row)
    want = hub_models.run(model, model, row.inputs(), "cpu")
    for mode in (STRICT, FUSED):
        moved = hub_models.build(row).to("tpu")
        with torch.tpu.set_eager_mode(mode):
            got = hub_models.run(moved, moved, row.inputs(), "tpu")
        assert hub_models.differences(row, got, want) == []
        assert hosted == set(row.host)
