"""A recording longer than its buffer, and one that is stopped: bounded, honest about it, the mode restored."""

import pytest
import torch
from fixtures import traces

import tpu_lab
from tpu_lab import trace as trace_module
from tpu_lab.profile import Profile
from tpu_lab.trace import CompileRecord, LaunchRecord, OpRecord, Trace, WaitRecord

LIMIT, CALLS = 4_000, 20_000  # the rules of 200,000 and 1,000,000, in a size that a test can afford
VIEWS = ("summary", "ops", "cache")


def long_trace(limit=LIMIT, calls=CALLS):
    """`calls` ops with a launch, a compile, a wait and a memory point each, into a buffer of `limit` of a kind."""
    t = Trace(limit=limit, start_ns=0, meta={**traces.META, "mode": "strict", "name": "long", "cpu": []})
    for i in range(calls):
        now = i * 10_000
        phase = ("forward", "backward", "optimizer")[i % 100 // 40]
        t.add("ops", OpRecord(
            i, "aten.add.Tensor", ("f32[8,8]",), ("f32[8,8]",), (), "elementwise", f"h.{i % 12}.mlp", "train.py", 20 + i % 40, "x = x + y",
            phase, None, i, 0, 768, now, 1400, False, 9000,
        ))  # fmt: skip
        t.add("launches", LaunchRecord(
            i, (i,), "hit" if i > 60 else "miss", "strict", "train.py", 20 + i % 40, "x = x + y", "strict", f"k{i % 60}", now + 2000, 900, 0,
            4000, 1500, 0, 768, 2, 1, 0, i // 100, now + 9000,
        ))  # fmt: skip
        why = f"x: f32[{i},8], was f32[{i + 1},8] (last batch is smaller): use drop_last=True or pad"
        t.add("compiles", CompileRecord(i, f"k{i}", "compiled", 1000, 1000, 1000, why, "shape", "train.py:20"))
        t.add("waits", WaitRecord("item", "train.py", 21, "loss.item()", now + 9000, 500, 100, 4))
        t.add("live", (i, 4096))
        if i % 100 == 99:
            t.steps.append(now + 10_000)
    t.end_ns = calls * 10_000
    t.marks.append(("block end", t.end_ns))
    return t


def test_a_long_trace_is_bounded_and_says_what_it_dropped():
    t = long_trace()
    assert [len(getattr(t, kind)) for kind in ("ops", "launches", "compiles", "waits", "live")] == [LIMIT] * 5
    assert t.dropped == 5 * (CALLS - LIMIT)
    p = Profile(t, peak_flops=1e9)
    assert "80,000 dropped" in str(p) and "80,000 dropped" in p._repr_html_()
    assert len(p.ops.rows) == LIMIT
    for name in VIEWS:
        assert len(p.view(name).html) < 1_000_000 and len(str(p.view(name))) < 200_000, name


def test_the_recorder_goes_on_counting_when_the_buffer_is_full():
    x = torch.ones(4, 4).to("tpu")
    with tpu_lab.profile(mode="strict", limit=5, peak_flops=1e9) as p:
        for _ in range(9):
            x + 1
    t = p.trace
    assert len(t.ops) == len(t.launches) == 5 and t.op_count == t.launch_count == 9
    assert [r.index for r in t.ops] == [0, 1, 2, 3, 4] and t.dropped >= 8


@pytest.mark.parametrize("mode, ops", [("strict", 60), ("fused", 60)])
def test_figures_of_a_step_are_those_of_the_steps_that_were_recorded_whole(mode, ops):
    w = torch.ones(8, 8).to("tpu")

    def step():
        kept = [(w @ w).relu().sum() for _ in range(3)]
        torch.tpu.synchronize()
        return kept

    whole = tpu_lab.profile(step, steps=10, mode=mode, peak_flops=1e9)
    part = tpu_lab.profile(step, steps=10, mode=mode, peak_flops=1e9, limit=ops)
    assert part.trace.dropped and len(part.trace.ops) == ops
    assert part.metrics.flops == whole.metrics.flops == 3 * 2 * 8**3
    assert 1 <= len(part.metrics.steady) <= 6 and len(whole.metrics.steady) >= 9
    assert "recorded whole, then the limit of 60 records" in str(part) and "recorded whole" not in str(whole)
    assert "recorded whole" in str(part.diff(whole))
    none = tpu_lab.profile(step, steps=10, mode=mode, peak_flops=1e9, limit=2)
    assert not none.metrics.steady and "0 recorded whole, then the limit of 2 records" in str(none)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("mode", ["strict", "debug", "fused"])
def test_what_stops_a_block_passes_through_in_every_mode(mode, error):
    before, x = torch.tpu.eager_mode, torch.ones(4, 4).to("tpu")
    with pytest.raises(error) as raised, tpu_lab.profile(mode=mode, peak_flops=1e9) as p:
        y = x * 3
        z = y + 1
        raise error("stop")
    assert raised.value.args == ("stop",)
    assert torch.tpu.eager_mode == before and trace_module.active is None
    assert [o.name for o in p.trace.ops] == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert f"stopped by {error.__name__}" in str(p)
    if mode == "fused":  # nothing ran within the block
        assert str(p).startswith("2 ops called, none launched") and p.metrics.flops == 0 and not p.trace.launches
    assert z.cpu().eq(4).all()  # what was deferred still runs


def test_a_profile_without_lines_knows_the_ops():
    x = torch.ones(4, 4).to("tpu")
    with tpu_lab.profile(mode="strict", lines=False, peak_flops=1e9) as p:
        (x * 3).relu()
    assert [o.name for o in p.trace.ops] == ["aten.mul.Tensor", "aten.relu.default"]
    assert {(o.file, o.line) for o in p.trace.ops} == {("", 0)} and "mul" in str(p.ops)
