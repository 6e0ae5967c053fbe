"""tpu_lab.profile() on the device: three ways to call it, exceptions, modes, exports."""

import json
import subprocess
import sys
import time

import pytest
import torch
from fixtures import traces

import tpu_lab
from tpu_lab import trace as trace_module
from tpu_lab.profile import Profile


def step(x):
    return (x @ x).relu().sum().item()


@pytest.fixture
def x():
    return torch.ones(16, 16, device="tpu")


def test_context_manager(x):
    with tpu_lab.profile(mode="fused", peak_flops=1e9, name="two ops") as p:
        assert "still recording" in repr(p)
        y = (x @ x).relu()
        value = y.sum().item()
    assert value == 16.0**3
    names = [o.name.split(".")[1] for o in p.trace.ops]
    assert names[:2] == ["mm", "relu"] and "sum" in names
    assert len(p.trace.launches) == 1 and p.trace.meta["mode"] == "fused"
    assert str(p).splitlines()[1].startswith("two ops \u00b7 test_profile.py:")
    assert p.metrics.whole.total == pytest.approx(p.metrics.wall_ns, rel=0.02)
    assert trace_module.active is None
    assert p.metrics.mfu is not None and "given as peak_flops" in repr(p)


def test_function_counts_calls_as_steps(x):
    p = tpu_lab.profile(step, x, steps=3, warmup=2, peak_flops=1e9)
    assert p.value == 16.0**3
    assert len(p.metrics.steps) == 5 and [s.warmup for s in p.metrics.steps] == [True, True, False, False, False]
    assert len(p.metrics.steady) == 3
    assert p.trace.meta["name"] == "step"


def test_decorator_keeps_the_value(x):
    @tpu_lab.profile(peak_flops=1e9)
    def train(x, scale=1.0):
        return step(x * scale)

    assert train.profile is None
    assert train(x, scale=2.0) == 4 * 16.0**3
    assert isinstance(train.profile, Profile) and train.__name__ == "train"
    assert len(train.profile.trace.ops) >= 4


def test_an_exception_goes_through_and_the_report_stays(x):
    before = torch.tpu.eager_mode
    with pytest.raises(KeyboardInterrupt):
        with tpu_lab.profile(mode="debug", peak_flops=1e9) as p:
            x + 1
            raise KeyboardInterrupt
    assert torch.tpu.eager_mode == before and trace_module.active is None
    assert len(p.trace.ops) == 1 and "stopped by KeyboardInterrupt" in str(p)

    def fail(x):
        x + 1
        raise ValueError("no <b>luck</b>")

    wrapped = tpu_lab.profile()(fail)
    with pytest.raises(ValueError, match="luck"):
        wrapped(x)
    assert "ValueError: no &lt;b&gt;luck" in wrapped.profile._repr_html_()


def test_profiles_do_not_nest(x):
    with tpu_lab.profile() as p:
        with pytest.raises(RuntimeError, match="already active"):
            with tpu_lab.profile():
                pass
        x + 1
    assert len(p.trace.ops) == 1


def test_wrong_calls_teach():
    with pytest.raises(ValueError, match="choose one of fused, strict, debug"):
        tpu_lab.profile(mode="fast")
    with pytest.raises(TypeError, match="no option 'step'"):
        tpu_lab.profile(step=3)
    with pytest.raises(TypeError, match=r"decorate with parentheses, @tpu_lab.profile\(\)"):
        tpu_lab.profile(step)
    with pytest.raises(TypeError, match="a with block runs once"):
        with tpu_lab.profile(steps=3):
            pass
    with pytest.raises(ValueError, match="steps=0: a whole number from 1 on"):
        tpu_lab.profile(step, 1, steps=0)
    with pytest.raises(ValueError, match="no view 'fusion'"):
        Profile(traces.empty()).view("fusion")


def test_nothing_on_the_device_says_why():
    with tpu_lab.profile() as p:
        torch.ones(3) + 1
    assert str(p).startswith("No op ran on 'tpu'") and '.to("tpu")' in str(p)
    assert "No op ran" in str(p.ops) and "No op ran" in str(p.cache)
    assert len(p.ops.rows) == 0 and "device_ms" in p.ops.rows


def test_sleep_shows_as_idle_not_as_work(x):
    with tpu_lab.profile(peak_flops=1e9) as p:
        step(x)
        time.sleep(0.2)
    split = p.metrics.whole
    assert split.idle + split.python > 0.19e9
    assert split.total == pytest.approx(p.metrics.wall_ns, rel=0.02)


def test_item_shows_with_its_line(x):
    with tpu_lab.profile(peak_flops=1e9) as p:
        step(x)
    wait = next(w for w in p.trace.waits if w.what == "item")
    assert wait.file.endswith("test_profile.py") and wait.code == "return (x @ x).relu().sum().item()"


def test_optimizer_steps_and_phases():
    net = torch.nn.Linear(4, 2).to("tpu")
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.ones(3, 4, device="tpu")
    with tpu_lab.profile(mode="fused", peak_flops=1e9) as p:
        for _ in range(5):
            opt.zero_grad()
            net(data).sum().backward()
            opt.step()
    assert len(p.metrics.steps) == 5
    assert {o.phase for o in p.trace.ops} == {"forward", "backward", "optimizer"}
    assert len(p.trace.meta["cpu"]) == 7  # start, each step, end


def test_optimizers_that_take_turns_make_one_step(tmp_path):
    first, second = (torch.nn.Linear(4, 2).to("tpu") for _ in range(2))
    a, b = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)

    def update(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(8, 4).to("tpu")).sum().backward()
        optimizer.step()

    with tpu_lab.profile(peak_flops=1e9) as p:
        for _ in range(3):
            update(first, a), update(first, a), update(second, b)
    assert len(p.metrics.steps) == 3 and len(p.trace.steps) == 9
    p.to_json(tmp_path / "p.json")
    assert len(Profile.from_json(tmp_path / "p.json").metrics.steps) == 3
    with tpu_lab.profile(peak_flops=1e9) as p:  # one after the other
        for model, optimizer in ((first, a), (second, b)):
            for _ in range(3):
                update(model, optimizer)
    assert len(p.metrics.steps) == 6


def test_the_closure_of_an_optimizer_is_forward_and_backward():
    w = torch.nn.Parameter(torch.ones(4, device="tpu"))
    optimizer = torch.optim.LBFGS([w], max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (w.sin() * w).sum()
        loss.backward()
        return loss

    p = tpu_lab.profile(optimizer.step, closure, mode="strict", peak_flops=1e9)
    phases = {o.name: o.phase for o in p.trace.ops if o.name in ("aten.sin.default", "aten.cos.default", "aten.dot.default")}
    assert phases == {"aten.sin.default": "forward", "aten.cos.default": "backward", "aten.dot.default": "optimizer"}


def test_a_profile_from_a_file_says_what_it_cannot_do(tmp_path, x):
    tpu_lab.profile(lambda: (x @ x).relu(), mode="fused", peak_flops=1e9).to_json(tmp_path / "p.json")
    stored = Profile.from_json(tmp_path / "p.json")
    with pytest.raises(LookupError, match="read from a file.*record it again"):
        stored.fusions_measured()
    assert "read from a file" in str(stored.chip_view("v6e"))


def test_a_call_that_ends_is_no_optimizer(x):
    p = tpu_lab.profile(lambda: x * 3, mode="fused", peak_flops=1e9)
    assert [r.reason for r in p.trace.launches] == ["call end"] and "optimizer step" not in f"{p}{p.fusions}"
    assert "the profiled call ended" in str(p.fusions)


def test_the_eager_modes_that_ran_are_named(x):
    with tpu_lab.profile(mode="strict", peak_flops=1e9) as p:
        x * 3
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
            (x * 3).sum().item()
    assert "strict and fused" in str(p).splitlines()[1]


def test_a_file_that_was_edited_and_loaded_again_shows_its_new_lines(tmp_path, monkeypatch, x):
    import importlib
    import os

    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_module.py"
    file.write_text("def f(x):\n    return x.sin()\n")
    module = importlib.import_module("edited_module")
    assert tpu_lab.profile(module.f, x, peak_flops=1e9).trace.ops[0].code == "return x.sin()"
    file.write_text("# longer\ndef f(x):\n    y = x.cos()\n    return y\n")
    os.utime(file, (2e9, 2e9))
    importlib.reload(module)
    assert tpu_lab.profile(module.f, x, peak_flops=1e9).trace.ops[0].code == "y = x.cos()"


def test_a_report_can_be_read_on_another_thread_while_ops_run(x):
    import threading
    import traceback

    stop, wrong = threading.Event(), []

    def read(p):
        while not stop.is_set():
            try:
                len(str(p.summary)), p.metrics.flops
                p.forget_drawn()
            except Exception:
                wrong.append(traceback.format_exc())
                return

    with tpu_lab.profile(mode="strict", peak_flops=1e9) as p:
        reader = threading.Thread(target=read, args=(p,))
        reader.start()
        for _ in range(400):
            (x @ x.t()).relu()
        stop.set()
        reader.join()
    assert not wrong, wrong
    assert len(p.trace.ops) == 1200


def test_the_buffer_is_bounded(x):
    with tpu_lab.profile(limit=3, peak_flops=1e9) as p:
        for _ in range(10):
            x + 1
    assert len(p.trace.ops) == 3 and p.trace.dropped > 0
    assert f"{p.trace.dropped} dropped" in str(p)


def test_display_protocol(x):
    p = tpu_lab.profile(step, x, peak_flops=1e9)
    bundle = p._repr_mimebundle_()
    assert bundle["text/html"] == p._repr_html_() == p._mime_()[1] and p._mime_()[0] == "text/html"
    assert bundle["text/plain"] == repr(p)
    assert len(repr(p).splitlines()) <= 25
    assert p.ops["name"].tolist() == p.ops.rows.name.tolist()


def test_exports(tmp_path, x):
    p = tpu_lab.profile(step, x, steps=2, peak_flops=1e9)
    p.to_html(tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "<script" not in page and "http" not in page
    p.to_csv(tmp_path / "p.csv")
    assert len((tmp_path / "p.csv").read_text().splitlines()) == len(p.trace.ops) + 1
    p.to_perfetto(tmp_path / "p.json")
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert len(events) >= len(p.trace.ops) + len(p.trace.launches)
    assert (tmp_path / "p.json").stat().st_size <= 250 * len(events)
    p.to_json(tmp_path / "p.tl.json")
    back = Profile.from_json(tmp_path / "p.tl.json")
    assert back.trace.ops == p.trace.ops and back.trace.launches == p.trace.launches
    assert back.metrics.whole == p.metrics.whole


def test_json_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}')
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_json(file)
    Profile(traces.empty()).to_json(file)
    file.write_text(file.read_text().replace('"version":1', '"version":99'))
    with pytest.raises(ValueError, match="schema version 99"):
        Profile.from_json(file)


def test_five_thousand_ops_make_a_page_under_1_mb(tmp_path):
    trace = traces.mingpt()
    assert len(trace.ops) > 5000
    Profile(trace, peak_flops=1e11).to_html(tmp_path / "p.html")
    assert (tmp_path / "p.html").stat().st_size < 1_000_000


def test_reading_records_starts_no_notebook_host():
    code = (
        "import sys, tpu_lab, torch\n"
        "p = tpu_lab.profile(lambda: torch.ones(2, device='tpu') + 1, peak_flops=1e9)\n"
        "repr(p); p._repr_html_(); p.ops.rows\n"
        "assert not {'IPython', 'marimo'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_peak_is_measured_once_and_kept(tmp_path, monkeypatch):
    from tpu_lab import chips

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chips, "_measure", lambda dtype: 5e10)
    monkeypatch.setattr(chips, "_measure_bandwidth", lambda: 2e10)
    chips.measured.cache_clear()
    try:
        peak = chips.peak("cpu")
        assert peak.flops == 5e10 and "this CPU" in peak.label and chips.cpu_model() in peak.source
        assert peak.bandwidth == 2e10 and "memory" in peak.bandwidth_label and chips.cpu_model() in peak.bandwidth_source
        chips.measured.cache_clear()
        monkeypatch.setattr(chips, "_measure", lambda dtype: pytest.fail("measured twice"))
        monkeypatch.setattr(chips, "_measure_bandwidth", lambda: pytest.fail("measured twice"))
        assert chips.peak("cpu").flops == 5e10 and chips.peak("cpu").bandwidth == 2e10
    finally:
        chips.measured.cache_clear()


def test_published_peaks_are_per_device_and_unknown_chips_have_none():
    from tpu_lab import chips

    assert chips.peak("tpu", "TPU v6 lite").flops == 918e12
    assert chips.peak("tpu", "TPU7x").flops == 2307e12 / 2
    assert chips.peak("tpu", "TPU v99") is None
    assert chips.peak("tpu", "TPU7x").bandwidth == 7.37e12 / 2
    mine = chips.given(5e12, "tpu", "TPU v5e")
    assert (mine.flops, mine.label, mine.bandwidth) == (5e12, "given as peak_flops", 0.82e12)
    assert chips.given(5e12, "tpu", "TPU v99").bandwidth is None


def test_what_runs_nothing_when_it_is_called_is_refused():
    def numbers():
        yield 1

    async def wait():
        return 1

    for fn, what in ((numbers, "a generator function"), (wait, "an async function")):
        with pytest.raises(TypeError, match=f"{what} runs nothing when it is called.*with tpu_lab.profile"):
            tpu_lab.profile(fn)
        with pytest.raises(TypeError, match=what):
            tpu_lab.profile()(fn)


def test_rows_of_a_block_do_not_say_a_step():
    layer = torch.nn.Linear(48, 48).to("tpu")
    x = torch.ones(16, 48, device="tpu")
    block = tpu_lab.profile(lambda: layer(x).sum().backward(), peak_flops=1e12)
    names = list(block.summary.rows.name)
    assert "ops in the block" in names and "model FLOPs in the block" in names and "ops a step" not in names
    steady = tpu_lab.profile(lambda: layer(x).sum().backward(), warmup=1, steps=2, peak_flops=1e12)
    rows = steady.summary.rows.set_index("name").value
    assert rows["model FLOPs a step"] == 2 * 2 * 16 * 48 * 48


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_steps_of_a_block_by_hand(x, mode):
    held = []
    with tpu_lab.profile(mode=mode, peak_flops=1e9) as p:
        for _ in range(4):
            held.append((x @ x).sum())
            p.step()
    assert [s.ops[1] - s.ops[0] for s in p.metrics.steps] == [2] * 4
    assert len(p.trace.launches) == (4 if mode == "fused" else 8) and "a step" in p.summary.title
    assert p.metrics.flops == 2 * x.shape[0] * x.shape[1] * x.shape[1]
    with pytest.raises(RuntimeError, match=r"p.step\(\) ends a step of a block that runs"):
        p.step()
