"""What a notebook trains comes out the same in strict, fused and compiled; `python -m tests.stated` gives the full figures."""

import pytest
import stated
import torch
from small_notebooks import SMALL

# Fewer steps still: an op by itself is a program in strict mode. minGPT's modes are compared in test_showcase_models.py.
SHORT = {
    "resnet": {**SMALL["resnet"], "batch": 1000},
    "dlrm": {**SMALL["dlrm"], "longer": 4},
    "unet": {**SMALL["unet"], "steps": 3},
}


@pytest.mark.parametrize("name", SHORT)
def test_the_modes_agree(name):
    notebook = stated.load(name)
    results = {mode: stated.RESULTS[name](notebook, SHORT[name], mode) for mode in stated.MODES}
    expected, losses, _ = results["strict"]
    assert len(losses) > 2
    for result, own, _ in results.values():
        # Sums in another order, and a few steps of Adam that make more of it; a test digit is worth 0.001.
        torch.testing.assert_close(torch.tensor(own), torch.tensor(losses), rtol=2e-3, atol=2e-3)
        assert result == pytest.approx(expected, rel=0.01, abs=0.01)
