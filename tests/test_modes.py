"""compare_modes: each mode from the same start, everything as it was afterwards, and a view that says what differs."""

import functools
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import traces

import tpu_lab
from tpu_lab import snapshot, splice, twin
from tpu_lab import trace as _trace
from tpu_lab.chips import Peak
from tpu_lab.difference import typical
from tpu_lab.metrics import Metrics
from tpu_lab.viz import mode_lanes, modes
from tpu_lab.viz.mode_runs import Compared, Run, agreement, largest

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
PEAK = Peak(182e9, "f32", "this CPU’s f32 matmul", "a test")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def training(lr=0.1):
    """A step over what it holds in its closure, as a notebook has it."""
    torch.manual_seed(0)
    model = Net().to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    x = torch.randn(4, 8).to("tpu")
    losses = []

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return losses[-1]

    return step, model, optimizer, losses


@pytest.fixture(scope="module")
def compared():
    step, model, optimizer, losses = training()
    before = {k: v.cpu().clone() for k, v in model.state_dict().items()}
    drawn = torch.tpu.get_rng_state(), torch.get_rng_state()
    c = tpu_lab.compare_modes(step, steps=3, warmup=2, modes=("strict", "fused"), peak_flops=1e11)
    return c, (model, optimizer, losses, before, drawn)


def test_the_call_changes_nothing(compared):
    _, (model, optimizer, losses, before, drawn) = compared
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), before[name])
    assert not optimizer.state and losses == [] and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.tpu.get_rng_state(), drawn[0]) and torch.equal(torch.get_rng_state(), drawn[1])


def test_losses_fall_and_agree_in_all_modes_and_on_the_cpu(compared):
    c, _ = compared
    rows = c.rows.set_index("mode")
    assert list(rows.index) == ["strict", "fused", "native CPU"] and rows.n["native CPU"] == 3 and rows.n.min() >= 1
    assert np.allclose(rows.loss, rows.loss["strict"], rtol=1e-5) and rows.loss["strict"] > 0
    step, *_ = training()
    alone = [step() for _ in range(5)]
    assert rows.loss["strict"] == pytest.approx(alone[-1], rel=1e-5) and alone[-1] != alone[0]
    text = str(c)
    assert "Losses agree in both" in text and "native CPU" in text
    assert len(text.splitlines()) <= 25 and max(map(len, text.splitlines())) <= 100


def test_launches_come_from_the_records(compared):
    c, _ = compared
    rows = c.rows.set_index("mode")
    assert rows.launches["fused"] == 1 and rows.launches["strict"] > 10 and rows.ops["fused"] == rows.ops["strict"]
    assert c.title.startswith(f"The same step, {rows.launches['strict']} launches or 1: ")
    assert rows.what["fused"] == "one program for forward, backward and SGD"
    m = c.profiles["fused"].metrics
    assert m.trace.meta["mode"] == "fused" and len(m.launches_in(typical(m))) == 1 and len(m.steps) == 5
    assert "compare_modes" not in repr(c.profiles["strict"]) and "test_modes.py" in str(c)


def test_a_profile_of_turns_adds_up(compared):
    c, _ = compared
    for p in c.profiles.values():
        m = p.metrics
        assert m.whole.total == pytest.approx(m.wall_ns) and [o.index for o in m.trace.ops] == list(range(len(m.trace.ops)))
        assert all(a.end_ns <= b.start_ns for a, b in zip(m.steps, m.steps[1:]))
        for launch in m.trace.launches:
            assert m.trace.start_ns <= launch.time_ns <= m.end_ns
            assert {m.trace.ops[i].launch for i in launch.ops} <= {launch.index}


def test_what_is_held_in_a_profile_of_turns_sums_to_its_curve(compared):
    """An array that lives from turn to turn is in each turn's records, and counts once."""
    for mode, profile in compared[0].profiles.items():
        trace = profile.trace
        held = [sum(h.bytes for h in trace.held if h.born <= i and (h.died is None or h.died > i)) for i in range(len(trace.live))]
        assert held == [size for _, size in trace.live], mode
        assert (profile.memory.rows["bytes"] >= 0).all(), mode


def test_compiled_runs_graphs_and_a_failure_is_a_row(monkeypatch):
    w = torch.randn(4, 4).to("tpu")

    def step(x):
        return (x @ w).relu().sum()

    c = tpu_lab.compare_modes(step, torch.ones(4, 4, device="tpu"), steps=2, warmup=1, modes=("strict", "compiled"), cpu=False)
    assert c.rows.launches.tolist() == [3, 1] and "Losses agree in both" in str(c)
    assert c.profiles["compiled"].trace.launches[-1].mode == "compiled"

    def refuses(*_):
        raise RuntimeError("backend='tpu' raised:\nUnsupported: no <b>Dynamo</b> here")

    monkeypatch.setattr(torch, "compile", lambda fn, **options: refuses)
    c = tpu_lab.compare_modes(step, torch.ones(4, 4, device="tpu"), steps=1, warmup=1, modes=("strict", "compiled"), cpu=False)
    failed = c.rows.set_index("mode").failed
    assert "Dynamo" in failed["compiled"] and not failed["strict"] and list(c.profiles) == ["strict"]
    assert "Unsupported: no <b>Dynamo</b> here" in str(c) and "<b>Dynamo" not in c.html


def test_dynamo_traces_a_model_once_for_all_profiles():
    model, x = Net().to("tpu"), torch.ones(2, 8, device="tpu")
    compiled, traced = torch.compile(model), []
    for _ in range(3):
        tpu_lab.profile(compiled, x)
        traced.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert traced[0] == traced[1] == traced[2] > 0


def test_what_fn_raises_goes_through_and_the_state_is_back():
    model = Net().to("tpu")
    before = model.a.bias.detach().cpu().clone()

    def step():
        with torch.no_grad():
            model.a.bias.add_(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tpu_lab.compare_modes(step, steps=1, modes=("strict",))
    assert torch.equal(model.a.bias.detach().cpu(), before) and _trace.active is None


def test_wrong_calls_are_told():
    with pytest.raises(ValueError, match="'quick' is none of debug, strict"):
        tpu_lab.compare_modes(lambda: 0, modes=("quick",))
    with pytest.raises(ValueError, match="choose some of debug, strict"):
        tpu_lab.compare_modes(lambda: 0, modes=())
    with pytest.raises(ValueError, match="at least one step"):
        tpu_lab.compare_modes(lambda: 0, steps=0)
    with pytest.raises(TypeError, match="needs a function"):
        tpu_lab.compare_modes(3)
    with tpu_lab.profile(), pytest.raises(RuntimeError, match="end the profile first"):
        tpu_lab.compare_modes(lambda: 0)
    assert tpu_lab.compare_modes(lambda: 0, steps=1, modes=("strict",)).title == "No op ran on 'tpu'"


def test_a_step_that_makes_its_own_tensors_has_no_cpu_line():
    c = tpu_lab.compare_modes(lambda: torch.ones(3, device="tpu").sum(), steps=1, warmup=1, modes=("strict",))
    assert "made tensors on 'tpu' by itself: give cpu=" in c.rows.failed.iloc[-1]
    c = tpu_lab.compare_modes(lambda: torch.ones(3, device="tpu").sum(), cpu=lambda: torch.ones(3).sum(), steps=2, modes=("strict",))
    assert c.rows.n.tolist() == [2, 2]


def test_an_iterator_is_named_when_losses_differ():
    batches = iter([torch.full((2,), float(i)).to("tpu") for i in range(8)])
    c = tpu_lab.compare_modes(lambda: next(batches).sum(), steps=1, warmup=1, modes=("strict", "fused"), cpu=False)
    assert "Losses differ" in str(c) and "an iterator, which cannot be wound back" in str(c).replace("\n ", "")


# --- finding, saving, copying -----------------------------------------------------------------------------------------

counter = {"calls": 0}
WEIGHT = torch.nn.Parameter(torch.ones(3))


class Trainer:
    def __init__(self):
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(2, device="tpu")), []
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def step(self, by=1.0):
        self.weight.grad = torch.full_like(self.weight, by)
        self.optimizer.step()
        self.schedule.step()
        self.seen.append(by)
        counter["calls"] += 1
        with torch.no_grad():
            WEIGHT.mul_(2)


def test_methods_globals_schedulers_and_partials_are_found_and_restored():
    trainer = Trainer()
    step = functools.partial(trainer.step, by=2.0)
    restore = snapshot.save(snapshot.find(step))
    step()
    assert trainer.weight.tolist() == [-2.0, -2.0] and counter["calls"] == 1 and WEIGHT[0].item() == 2
    restore()
    assert trainer.weight.tolist() == [0.0, 0.0] and trainer.weight.grad is None and trainer.seen == []
    assert trainer.optimizer.param_groups[0]["lr"] == 1.0 and trainer.schedule.last_epoch == 0
    assert counter == {"calls": 0} and WEIGHT.tolist() == [1.0, 1.0, 1.0]


def test_the_twin_is_another_step_on_the_cpu():
    step, model, optimizer, losses = training()
    fn, args, kwargs = twin.on_cpu(step, (), {})
    trace = _trace.start()
    first = fn(*args, **kwargs)
    _trace.stop()
    assert not trace.ops and losses == [] and not optimizer.state
    assert step() == pytest.approx(first, rel=1e-5) and losses


def test_joined_traces_keep_their_steps_and_lose_the_gap():
    parts = [traces.mingpt(2), traces.mingpt(3)]
    parts[1].start_ns += 0
    out = splice.join(parts)
    assert len(out.ops) == sum(len(t.ops) for t in parts) and len(out.steps) == 5
    ends = [max(ns for what, ns in t.marks if what == "block end") - t.start_ns for t in parts]
    assert out.end_ns - out.start_ns == sum(ends)
    assert all(out.ops[o.forward].phase == "forward" for o in out.ops if o.forward is not None)
    assert [r.step for r in out.launches] == [0, 1, 2, 3, 4]


def test_a_function_can_be_compared_more_often_than_dynamo_compiles_one():
    def step(width):
        x = torch.ones(width).to("tpu")
        return lambda: (x * 2 + 1).relu().sum()

    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=1):  # as after moving a notebook's controls eight times
        found = [tpu_lab.compare_modes(step(w), steps=1, modes="compiled", cpu=False).rows.launches[0] for w in (4, 8, 12)]
    assert found == [1, 1, 1], "compiled each time, never op by op"


# --- the view ---------------------------------------------------------------------------------------------------------


def made_up(mode="fused", **changes):
    trace = traces.strict(6) if mode != "fused" else traces.mingpt(6, layers=3)
    trace.meta["mode"] = mode
    losses = tuple(4.1743 - 0.01 * i for i in range(6))
    return Run(mode, Metrics(trace, PEAK), changes.get("losses", losses))


def everything(**changes):
    runs = (made_up("debug"), made_up("strict"), made_up("fused", **changes), Run("compiled", None, failed="Unsupported: <img src=x>"))
    return Compared(runs, Run("native CPU", None, (4.0,) * 6, times=(210_000_000, 205_000_000, 214_000_000)), 4, 2, "AdamW")


@pytest.mark.parametrize("name, made", [("modes", everything), ("modes_empty", lambda: Compared((Run("fused", Metrics(traces.empty())),), None, 1, 0))])
def test_text_is_golden(name, made):
    text = modes.draw(made()).text()
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("TPU_LAB_GOLDEN") == "write":
        file.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 25 and max(map(len, text.splitlines())) <= 100


def test_html_is_safe_small_and_the_same_twice():
    drawn = modes.draw(everything())
    assert drawn.html == modes.draw(everything()).html and len(drawn.html) < 300_000
    assert "<script" not in drawn.html and "<img" not in drawn.html and not re.search(r"https?:|url\(", drawn.html)
    assert len(drawn.title) <= 85 and not drawn.title.endswith(".")


def test_a_native_cpu_that_is_far_slower_does_not_squeeze_the_lanes():
    def slower(factor):
        return replace(everything(), native=Run("native CPU", None, (4.0,) * 6, times=(int(129e6 * factor),) * 3))

    assert modes.axis(slower(2.9)) > 2.9 * 129e6 and "\u250a native CPU" in modes.draw(slower(2.9)).text()
    far = modes.draw(slower(12.0))
    assert modes.axis(slower(12.0)) == modes.axis(slower(0.5)), "as long as the modes need"
    assert "native CPU 1.55\u00a0s, beyond this axis" in far.html and '<i class="native"' not in far.html
    assert "\u250a" not in far.text() and re.search("1[12][.][0-9]\u00d7", far.text()), "three digits"


def test_every_launch_has_its_tick_and_paints_keep_their_length():
    run = made_up("strict")
    m, step = run.metrics, typical(run.metrics)
    axis = 1.07 * step.ns
    lanes = mode_lanes.lanes(m, step, axis)
    assert lanes.ticks.count("M") == len({round(1000 * t / axis, 1) for t in mode_lanes.launch_times(m, step)}) > 100
    host = mode_lanes.host_pieces(m, step)
    assert sum(p.end - p.start for p in host) == pytest.approx(step.ns)
    drawn = mode_lanes.columns(host, axis, 720)
    for paint in {p.paint for p in host}:
        share = sum(p.end - p.start for p in host if p.paint == paint) / axis
        assert drawn.count(paint) / 720 == pytest.approx(share, abs=2 / 720)


@pytest.mark.parametrize("axis, marks", [(280, [0, 50, 100, 150, 200, 250]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (9, [0, 2, 4, 6, 8])])
def test_round_times(axis, marks):
    assert mode_lanes.nice(axis) == pytest.approx(marks)


def test_losses_that_differ_are_named():
    agree, said = agreement(everything(losses=(4.1743, 4.1643, 3.0, 4.1443, 4.1343, 4.1243)))
    assert agree is False and said.startswith("Losses differ by 0.28 of their size at call 3 of 6: debug 4.1543, fused 3")
    assert agreement(everything(losses=(4.1743,) * 5))[1].startswith("Losses differ in shape")
    assert agreement(Compared((made_up("strict", losses=()), made_up(losses=())), None, 4, 2))[0] is None
    assert largest((np.ones(3),), (np.ones(3) * (1 + 1e-6),))[0] == pytest.approx(1e-6, rel=1e-3)
    assert largest((1.0, float("nan")), (1.0, 2.0)) == (float("inf"), 1)


def test_the_lab_reads_the_loss_after_the_recording():
    x = torch.ones(4).to("tpu")
    c = tpu_lab.compare_modes(lambda: (x * 2).sum(), steps=3, modes=("strict", "fused"), peak_flops=1e11)
    for profile in c.profiles.values():
        assert {w.what for w in profile.trace.waits} == {"synchronize"} and "Read the value" not in profile.summary.html
    assert c.rows.loss.tolist() == [8.0] * 3
