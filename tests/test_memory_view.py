"""Who holds the memory: lives of arrays that sum to the curve, owners by name, torch's own figures, the view."""

import gc
import re
import weakref

import pytest
import torch
from fixtures import traces

import tpu_lab
from tpu_lab.memory_use import BANDS, MemoryUse
from tpu_lab.metrics import Metrics
from tpu_lab.profile import Profile
from tpu_lab.trace import HeldRecord, LaunchRecord, OpRecord, Trace
from tpu_lab.viz import memory

FILE = "test_memory_view.py"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.proj = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.proj(torch.tanh(self.fc(x)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.h = torch.nn.ModuleList([Block(), Block()])
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return (x * self.scale).square().mean()


def weights_and_step(compile=False, rows=32):
    model = Net().to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    run = torch.compile(model) if compile else model
    x = torch.ones(rows, 16, device="tpu")

    def step():
        optimizer.zero_grad()
        loss = run(x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


@pytest.fixture(scope="module", params=["debug", "fused", "compiled"])
def recorded(request):
    """(model, profile of three steps); debug waits after each op, so that nothing is held for being late."""
    model, step = weights_and_step(request.param == "compiled")
    mode = "debug" if request.param == "compiled" else request.param
    return model, tpu_lab.profile(step, steps=2, warmup=1, mode=mode, peak_flops=1e12)


def held_at(trace, point):
    return sum(h.bytes for h in trace.held if h.born <= point and (h.died is None or h.died > point))


def test_lives_sum_to_the_curve_at_each_point(recorded):
    _, p = recorded
    assert len(p.trace.live) > 3 and not p.trace.dropped
    assert [held_at(p.trace, i) for i in range(len(p.trace.live))] == [n for _, n in p.trace.live]
    use = MemoryUse(p.metrics)
    assert (sum(use.bands[b] for b in BANDS) == use.bytes).all()
    for point in {use.peak, use.first, use.last}:
        assert sum(h.bytes for h in use.holdings(point)) == use.bytes[point]


def test_weights_gradients_and_state_are_known_by_their_tensors(recorded):
    model, p = recorded
    size = sum(w.nbytes for w in model.parameters())
    alive = [h for h in p.trace.held if h.died is None]
    named = {h.name for h in alive if h.owner == "weights"}
    assert set(dict(model.named_parameters())) <= named
    buffers = sum(b.nbytes for b in model.buffers())
    assert sum(h.bytes for h in alive if h.owner == "weights") == size + buffers
    assert sum(h.bytes for h in alive if h.owner == "gradients") == size
    state = [h for h in alive if h.owner == "optimizer" and h.name.startswith("exp_avg")]
    assert sum(h.bytes for h in state) == 2 * size
    assert "exp_avg_sq of h.1.fc.weight" in {h.name for h in state}


def test_activations_are_known_by_module_and_line(recorded):
    _, p = recorded
    use = MemoryUse(p.metrics)
    point = use.first + int(use.bands["activations"][use.first : use.last + 1].argmax())
    named = [h for h in use.holdings(point) if h.band == "activations" and h.name.startswith("h.")]
    if p.trace.meta["mode"] == "fused":  # its results in between are no arrays
        assert not named
    else:
        assert any(h.name.startswith("h.0\u20131") for h in named)
        assert all(h.file.endswith(FILE) and h.line and h.phase == "forward" for h in named)


def test_a_fused_step_says_what_is_inside_the_program():
    _, step = weights_and_step(rows=20_000)  # large beside whatever other tests of this process left
    p = tpu_lab.profile(step, steps=2, warmup=2, mode="fused", peak_flops=1e12)
    (program,) = {p.trace.programs[r.key] for r in p.metrics.launches_in(p.metrics.span) if len(r.ops) > 9}
    assert program.scratch() == program.compiled.memory_analysis().temp_size_in_bytes > 0
    text = str(p.memory).replace("\n", " ")
    assert "between launches" in p.memory.title and "by the compiler\u2019s plan" in text and "inside its program" in text
    assert "in backward" not in p.memory.title  # nobody saw when in the program


def test_what_the_host_sent_and_what_is_older_is_called_so():
    old = torch.ones(10_000_000).to("tpu")  # large beside whatever other tests of this process left
    with tpu_lab.profile(mode="debug", peak_flops=1e12) as p:
        new = torch.ones(5_000_000).to("tpu")
        total = new.sum() + old.sum()
    owners = {(h.owner, h.bytes) for h in p.trace.held}
    assert ("before", 40_000_000) in owners and ("inputs", 20_000_000) in owners
    assert "copied from the host" in str(p.memory) and "made before the profile" in str(p.memory)
    assert total.item() == 15_000_000


@pytest.mark.parametrize("mode", ["debug", "fused"])
def test_torchs_figures_agree_with_the_view(mode):
    gc.collect()
    x = torch.ones(300, 300, device="tpu") * 1
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    with tpu_lab.profile(mode=mode, peak_flops=1e12) as p:
        y = x @ x
        z = (y + x).relu()
        torch.tpu.synchronize()
        now = torch.tpu.memory_allocated()
        del y
        total = z.sum().item()
    live = [n for _, n in p.trace.live]
    assert total > 0 and live[-1] == pytest.approx(torch.tpu.memory_allocated(), abs=64)  # jax's own constants
    assert now in [pytest.approx(n, abs=64) for n in live]
    top = max(live)
    assert torch.tpu.max_memory_allocated() == pytest.approx(top, abs=64)
    for figures in (torch.tpu.memory_stats(), torch.accelerator.memory_stats()):
        assert figures["allocated_bytes.all.peak"] == pytest.approx(top, abs=64)
        assert figures["allocated_bytes.all.current"] == pytest.approx(live[-1], abs=64)
    assert torch.accelerator.max_memory_allocated() == torch.tpu.max_memory_allocated()
    rows = p.memory.rows
    assert rows[rows.part == "held"].bytes.sum() == top == rows[rows.part == "curve"].bytes.max()
    del z
    torch.tpu.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.tpu.memory_allocated() < top


def test_nothing_is_watched_when_no_profile_is_active():
    import jax

    from tpu_lab.backend import live

    gc.collect()
    older = {id(a) for a in jax.live_arrays()}  # what other tests left, and their profiles with it

    def watched():
        new = [a for a in jax.live_arrays() if id(a) not in older]
        return [r for a in new for r in weakref.getweakrefs(a) if r.__callback__ is not None]

    with tpu_lab.profile(mode="debug", peak_flops=1e12) as p:
        torch.ones(8, device="tpu") + 1
    before = len(p.trace.held)
    assert before and not watched() and live._owner is None
    model, step = weights_and_step()
    step()
    assert not watched() and len(p.trace.held) == before


def test_holders_survive_a_file(recorded, tmp_path):
    _, p = recorded
    p.to_json(tmp_path / "p.json")
    back = Profile.from_json(tmp_path / "p.json")
    assert back.trace.held == p.trace.held and str(back.memory) == str(p.memory)


def op(index, phase="forward", module="m", line=1):
    return OpRecord(index, "aten.mul.Tensor", (), ("f32[1]",), (), "elementwise", module, "a.py", line, "x", phase, None, index, 0, 0, index, 0)  # fmt: skip


def launch(index):
    return LaunchRecord(index, (index,), "hit", "debug", "a.py", 1, "x", "debug", "k", index, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, index + 1)  # fmt: skip


@pytest.fixture
def by_hand():
    """Four ops: two forward results, one backward, one of the optimizer; 1,000 bytes of weights below."""
    trace = Trace(start_ns=0, end_ns=9, meta={"mode": "debug"})
    trace.ops = [op(0, module="h.0.a"), op(1, module="h.1.a"), op(2, "backward", "h.1.a"), op(3, "optimizer", "SGD", 9)]
    trace.launches = [launch(i) for i in range(4)]
    trace.held = [
        HeldRecord(None, 0, None, 1000, "weights", "w"),
        HeldRecord(0, 0, 3, 300, "", ""),
        HeldRecord(1, 1, 3, 300, "", ""),
        HeldRecord(2, 2, None, 200, "", ""),
        HeldRecord(3, 3, None, 50, "", ""),
    ]
    trace.live = [(0, 1300), (1, 1600), (2, 1800), (3, 1250)]
    return trace


def test_bands_and_holdings_by_hand(by_hand):
    use = MemoryUse(Metrics(by_hand))
    assert use.peak == 2 and use.op_at(2).index == 2
    assert {b: list(use.bands[b]) for b in ("weights", "activations", "gradients", "other")} == {
        "weights": [1000] * 4, "activations": [300, 600, 600, 0], "gradients": [0, 0, 200, 200], "other": [0, 0, 0, 50],
    }  # fmt: skip
    assert list(use.kept["activations"]) == [300, 600, 0, 0]  # gone before the optimizer's launch
    held = [(h.name, h.band, h.bytes, h.tensors) for h in use.holdings(2)]
    assert held == [("weights", "weights", 1000, 1), ("h.0\u20131.a: mul", "activations", 600, 2), ("h.1.a: mul", "gradients", 200, 1)]
    view = memory.draw(Metrics(by_hand))
    assert view.title == "Memory peaks at 1.76\u00a0KiB, early in backward; weights are 56% of it"
    assert view.finding == "peak 1.76\u00a0KiB, at h.1.a on the way back"


def test_dropped_holders_are_a_row_and_older_files_say_so(by_hand):
    by_hand.held = by_hand.held[:2]
    use = MemoryUse(Metrics(by_hand))
    assert ("records that were dropped", 500) in [(h.name, h.bytes) for h in use.holdings(2)]
    by_hand.held = []
    assert "no holders" in memory.draw(Metrics(by_hand)).text()


def test_the_curve_stays_small_with_many_points():
    m = Metrics(traces.strict(12))
    many = Trace(start_ns=0, end_ns=m.trace.end_ns, meta=dict(m.trace.meta, cpu=[]), ops=m.trace.ops, launches=m.trace.launches)
    many.live, many.held = m.trace.live, m.trace.held
    html = memory.draw(Metrics(many)).html
    path = re.search(r'class="line"[^>]* d="([^"]*)"', html)[1]
    assert len(many.live) > 1900 and path.count("H") <= 501 and len(html) < 100_000
    with pytest.raises(ValueError, match="sorts by bytes, not by 'time'"):
        memory.draw(m, sort="time")
    assert memory.draw(Metrics(Trace(ops=[op(0)]))).title.startswith("No launch ran")


def test_what_is_older_is_no_temporary_result_of_the_optimizer():
    old = torch.ones(10_000_000).to("tpu")  # large beside whatever other tests of this process left
    layer = torch.nn.Linear(64, 64).to("tpu")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        layer(torch.ones(4, 64, device="tpu")).sum().backward()
        optimizer.step()

    p = tpu_lab.profile(step, steps=2, warmup=1, mode="debug", peak_flops=1e12)
    assert "temporary results" not in p.memory.title and "made before the profile" in str(p.memory)
    assert old.numel() == 10_000_000


@pytest.mark.parametrize("mode", ["strict", "debug", "fused", "compiled"])
def test_what_is_written_in_place_stays_whose_it_was(mode):
    layer = torch.nn.Linear(300, 300, bias=False).to("tpu")
    optimizer = torch.optim.AdamW(layer.parameters())
    x, fresh = torch.ones(4, 300, device="tpu"), torch.ones(300, 300)
    weight = layer.weight.detach()  # the same memory under another name

    def by_hand():
        with torch.no_grad():
            weight.mul_(0.5)
        return 0

    scale = torch.compile(by_hand) if mode == "compiled" else by_hand
    with tpu_lab.profile(mode="strict" if mode == "compiled" else mode, peak_flops=1e12) as p:
        layer(x).sum().backward()
        optimizer.step()
        torch.tpu.synchronize()
        scale()
        torch.tpu.synchronize()
        layer(x).sum().item()
        weight.copy_(fresh)
        weight[0].zero_()
        layer(x).sum().item()
        layer.weight.grad.add_(1)
        torch.tpu.synchronize()
    size = weight.nbytes
    use = MemoryUse(p.metrics)
    assert list(use.bands["weights"][1:]) and set(use.bands["weights"][1:].tolist()) <= {size, 2 * size}
    alive = [(h.owner, h.name) for h in p.trace.held if h.died is None and h.bytes == size]
    assert alive.count(("weights", "weight")) == 1 and alive.count(("gradients", "weight")) == 1
