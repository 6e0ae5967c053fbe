"""tpu_lab.no_recompile: a program that is made too late is an error with its reason, and nothing is half done."""

import re

import pytest
import torch

import tpu_lab
from tpu_lab import trace
from tpu_lab.backend.cache import cache

MODES = [pytest.param(1, id="strict"), pytest.param(0, id="fused")]
SMALLER = r"f32\[5,4\], was f32\[8,4\] \(last batch is smaller\): use drop_last=True or pad"


class Training:
    """A linear layer, SGD with momentum, and a step over a batch of n rows."""

    def __init__(self, compiled=False):
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 2).to("tpu")
        self.run = torch.compile(self.net, backend="tpu", dynamic=False) if compiled else self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def step(self, n=8):
        self.optimizer.zero_grad()
        loss = self.run(torch.ones(n, 4).to("tpu")).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def weights(self):
        return [p.detach().cpu() for p in self.net.parameters()]


@pytest.fixture(autouse=True)
def no_programs():
    torch.tpu._clear_cache()
    yield
    assert cache.guards == [] and trace.active is None


@pytest.mark.parametrize("mode", MODES)
def test_the_first_steps_compile_and_later_ones_may_not(mode):
    with torch.tpu.set_eager_mode(mode):
        t = Training()
        with pytest.raises(RuntimeError, match=SMALLER) as found:
            with tpu_lab.no_recompile(after=2) as guard:
                for n in (8, 8, 8, 8, 5):
                    t.step(n)
        assert guard.steps == 4
        text = str(found.value)
        assert re.match(re.escape(__file__) + r":\d+ needs a new program in step 5, and no_recompile\(after=2\)", text)
        assert "Way out: pad the inputs to a few fixed sizes" in text
        t.step(5)  # outside all is as before


def test_fused_nothing_is_half_done():
    with torch.tpu.set_eager_mode(0):
        t, same = Training(), Training()
        for n in (8, 8, 8):
            same.step(n)
        with tpu_lab.no_recompile(after=2):
            for _ in range(3):
                t.step(8)
            t.optimizer.zero_grad()
            y = t.net(torch.ones(5, 4).to("tpu"))
            for _ in range(3):  # asked for again and again: refused, not lost
                with pytest.raises(RuntimeError, match="no_recompile"):
                    y.cpu()
            made = len(cache.programs)
            with pytest.raises(RuntimeError, match="no_recompile"):
                y.sum().item()
            assert len(cache.programs) == made
            del y
        for a, b in zip(t.weights(), same.weights(), strict=True):
            assert torch.equal(a, b)


def test_fused_refused_work_runs_when_it_is_asked_for_outside():
    with torch.tpu.set_eager_mode(0):
        with pytest.raises(RuntimeError, match="no_recompile"), tpu_lab.no_recompile(after=0):
            y = torch.ones(3, 4).to("tpu") * 5
            y.cpu()
        assert y.cpu().eq(5).all()


def test_compiled_and_its_backward():
    torch._dynamo.reset()
    t = Training(compiled=True)
    with pytest.raises(RuntimeError, match=r"Dynamo traced it again: tensor '.*' size mismatch at index 0. expected 8, actual 5") as found:
        with tpu_lab.no_recompile(after=2):
            for n in (8, 8, 8, 5):
                t.step(n)
    assert __file__ in str(found.value)
    t.step(5)


def test_a_backward_op_is_refused_at_the_line_that_asked_for_it():
    with torch.tpu.set_eager_mode(1):
        w = torch.ones(4, 4).to("tpu").requires_grad_()
        y = (w @ w).exp().sum()
        with pytest.raises(RuntimeError, match="no_recompile") as found, tpu_lab.no_recompile(after=0):
            y.backward()
        assert f"{__file__}:" in str(found.value) and w.grad is None


@pytest.mark.parametrize("mode", MODES)
def test_a_decorated_function_counts_its_calls(mode):
    @tpu_lab.no_recompile(after=1)
    def double(x):
        return x * 2

    with torch.tpu.set_eager_mode(mode):
        assert double(torch.ones(3).to("tpu")).sum().item() == 6  # its own line is no step's
        assert double(torch.ones(3).to("tpu")).cpu().eq(2).all()
        with pytest.raises(RuntimeError, match=r"step 3, and no_recompile\(after=1\)"):
            double(torch.ones(4).to("tpu"))
        torch.tpu.synchronize()  # outside: what was refused runs
        assert double(torch.ones(3).to("tpu")).cpu().eq(2).all()
    assert double.__name__ == "double"


def test_steps_by_hand_and_the_way_out_for_a_constant():
    x = torch.ones(4, 6).to("tpu")
    with torch.tpu.set_eager_mode(1), tpu_lab.no_recompile(after=1) as guard:
        x.sum(0)
        guard.step()
        x.sum(0)
        with pytest.raises(RuntimeError, match=r"dim=\[1\], was dim=\[0\].*\n  Way out: keep that argument the same"):
            x.sum(1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [lambda n: torch.ones(n, 6, device="tpu"), lambda n: torch.arange(n, device="tpu")])
def test_a_size_that_changes_is_no_number_to_pass(mode, make):
    with torch.tpu.set_eager_mode(mode), tpu_lab.no_recompile(after=1) as guard:
        with pytest.raises(RuntimeError, match=r"last batch is smaller.*\n  Way out: pad the inputs to a few fixed sizes"):
            for n in (8, 5):
                (make(n) * 3).cpu()
                guard.step()


def test_inside_a_profile_the_mode_comes_back_and_the_report_stays():
    before = torch.tpu.eager_mode
    x = torch.ones(4, 6).to("tpu")
    with pytest.raises(RuntimeError, match="no_recompile"):
        with tpu_lab.profile(mode="fused", peak_flops=1e9) as p, tpu_lab.no_recompile(after=0):
            (x * 3).cpu()
    assert torch.tpu.eager_mode == before
    assert [o.name for o in p.trace.ops][:1] == ["aten.mul.Tensor"] and "stopped by Refused" in str(p)


def test_a_program_on_disk_is_refused_too():
    x = torch.ones(4, 6).to("tpu")
    with torch.tpu.set_eager_mode(0):
        (x * 3 + 1).cpu()
        torch.tpu._clear_cache()  # what was compiled is on disk, or would have to be compiled
        with pytest.raises(RuntimeError, match="no_recompile"), tpu_lab.no_recompile(after=0):
            (x * 3 + 1).cpu()
        assert torch.tpu._get_cache_stats()["programs"] == 0


def test_guards_nest_and_wrong_numbers_teach():
    x = torch.ones(4, 6).to("tpu")
    with torch.tpu.set_eager_mode(1), tpu_lab.no_recompile(after=5), tpu_lab.no_recompile(after=0):
        with pytest.raises(RuntimeError, match="after=0"):
            x.cos()
    for after in (-1, True, 1.5):
        with pytest.raises(ValueError, match="the number of steps that may compile"):
            tpu_lab.no_recompile(after=after)


def test_a_step_by_hand_in_fused_mode_ends_with_its_launch():
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        with pytest.raises(RuntimeError, match="in step 4, and no_recompile"), tpu_lab.no_recompile(after=2) as guard:
            for n in (50, 50, 50, 59):
                kept = (torch.ones(n, device="tpu") * 2).sum()
                guard.step()
        assert guard.steps == 3 and kept.item() == 118
