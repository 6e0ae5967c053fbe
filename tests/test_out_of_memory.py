"""Out of memory is said before anything runs, with line and size, and no value is lost by it."""

import pytest
import torch
from torch import nn

import tpu_lab  # noqa: F401
from tpu_lab.backend import executor, memory, room

MODES = ["strict", "debug", "fused"]


@pytest.fixture(params=MODES)
def mode(request):
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode(dict(zip(MODES, (1, 2, 0)))[request.param])):
        yield request.param


@pytest.fixture
def small(monkeypatch):
    """A device with 100 kB free."""
    monkeypatch.setattr(room, "LARGE", 0)
    monkeypatch.setattr(memory, "mem_get_info", lambda device=None: (100_000, 1 << 34))


def trainer(compiled=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    run = torch.compile(model, dynamic=False) if compiled else model

    def step(rows):
        optimizer.zero_grad()
        run(torch.linspace(0, 1, rows * 8, device="tpu").reshape(rows, 8)).square().mean().backward()
        optimizer.step()

    def held():
        state = [s for p in model.parameters() for k, s in optimizer.state[p].items() if k != "step"]  # that is on the host
        return [t.detach().cpu().clone() for t in (*model.state_dict().values(), *state)]

    return step, held


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_op_larger_than_the_device_is_refused_at_its_line(mode):
    x = torch.arange(3.0, device="tpu")
    y = x * 2 + 1
    with pytest.raises(torch.OutOfMemoryError, match=r"aten.ones makes f32\[4398046511104\].*test_out_of_memory.py:\d+: .*ones"):
        torch.ones(1 << 42, device="tpu")
    with pytest.raises(torch.OutOfMemoryError, match="aten.expand|aten.mul|aten.clone"):
        (x[:1].expand(1 << 42) * 2).clone()
    assert y.tolist() == [1, 3, 5]


def test_a_batch_too_large_takes_nothing_along(mode, small):
    step, held = trainer()
    step(4)
    step(4)
    before = held()
    with pytest.raises(torch.OutOfMemoryError, match="this launch needs .*smaller batch"):
        step(20_000)
        torch.tpu.synchronize()
    if mode == "fused":  # the whole step is one launch: it has not run
        assert same(held(), before)
        assert not executor.graph.nodes
    step(4)
    torch.tpu.synchronize()
    assert all(torch.isfinite(t).all() for t in held()) and not same(held(), before)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_the_very_first_batch_may_be_too_large(kind, small):
    given = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def train(device):
        torch.manual_seed(0)
        model = nn.Linear(8, 1).to(device)
        optimizer = kind(model.parameters(), 0.1, **given)
        for rows in (40_000, 4, 4) if device == "tpu" else (4, 4):
            optimizer.zero_grad()
            model(torch.linspace(0, 1, rows * 8, device=device).reshape(rows, 8)).square().mean().backward()
            if rows == 40_000:
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
            else:
                optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        torch.testing.assert_close(train("tpu"), train("cpu"))


def test_a_compiled_model_says_so_too(small):
    step, held = trainer(compiled=True)
    step(4)
    before = held()
    with pytest.raises(torch.OutOfMemoryError, match="this launch needs .*smaller batch"):
        step(20_000)
    step(4)
    assert not same(held(), before)


def test_what_failed_to_compile_twice_leaves_what_it_would_have_written(monkeypatch):
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        weight = torch.ones(3, device="tpu")
        weight.add_(1)
        torch.tpu.synchronize()
        weight.mul_(3)

        def fails(plan):
            raise RuntimeError("the compiler is ill")

        with monkeypatch.context() as patch:
            patch.setattr(executor, "_compile_graph", fails)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="ill"):
                    weight.tolist()
        assert weight.tolist() == [2, 2, 2]


def test_what_is_free_is_what_programs_can_get():
    free, total = torch.tpu.mem_get_info()
    assert 0 < free and total >= 1 << 30
