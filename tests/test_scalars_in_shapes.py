"""A number that decides a shape or a branch is part of the program; all others are runtime inputs.

The kind of fault: the second call with another number gives the first call's result.
"""

import pytest
import torch

import tpu_lab  # noqa: F401

MODES = {"strict": torch.tpu.EagerMode.DEFER_NEVER, "fused": torch.tpu.EagerMode.DEFER_AND_FUSE}
CALLS = {
    "arange end": [lambda d, e=e: torch.arange(e, device=d) for e in (6.0, 3.0, 2.5)],
    "arange step": [lambda d, s=s: torch.arange(0, 1, s, device=d) for s in (0.1, 0.5, 0.25)],
    "arange start": [lambda d, s=s: torch.arange(s, 4.0, device=d) for s in (0.0, 1.5)],
    "arange as int64": [lambda d, e=e: torch.arange(e, dtype=torch.int64, device=d) for e in (6.0, 3.0)],
    "range": [lambda d, e=e: torch.range(0.0, e, device=d) for e in (4.0, 2.0)],
    "linspace": [lambda d, e=e: torch.linspace(0.0, e, 5, device=d) for e in (1.0, 2.0)],
    "full": [lambda d, v=v: torch.full((3,), v, device=d) for v in (1.0, 2.5)],
    "norm order": [lambda d, p=p: torch.arange(5.0, device=d).norm(p) for p in (1.0, 2.0, float("inf"), 0.5)],
    "pow": [lambda d, p=p: (torch.arange(5.0, device=d) + 1) ** p for p in (2.0, 0.5, -1.0)],
    "clamp": [lambda d, m=m: torch.arange(5.0, device=d).clamp(min=m) for m in (1.0, 2.0)],
    "leaky relu": [lambda d, s=s: torch.nn.functional.leaky_relu(-torch.ones(3, device=d), s) for s in (0.1, 0.2)],
    "repeat in a loop": [lambda d, n=n: torch.arange(float(n), device=d).sum() for n in (2, 3, 4)],
}


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_another_number_gives_another_result(name, mode):
    with torch.tpu.set_eager_mode(MODES[mode]):
        got = [call("tpu").cpu() for call in CALLS[name]]
    for mine, call in zip(got, CALLS[name], strict=True):
        torch.testing.assert_close(mine, call("cpu"))


def test_compiled_arange_follows_its_argument():
    count = torch.compile(lambda n: torch.arange(n, device="tpu") * 2.0)
    assert [tuple(count(n).shape) for n in (3.0, 5.0, 3.0)] == [(3,), (5,), (3,)]
