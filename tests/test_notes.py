"""What an op leaves behind while it is recorded, and the records that are made of it: when, how many, and in which order."""

import sys
import threading

import pytest
import torch

import tpu_lab
from tpu_lab import trace
from tpu_lab.backend import executor, recorder, writer


@pytest.fixture
def x():
    return torch.ones(8, 8).to("tpu")


def shared_out(t):
    """Each op that a launch ran is in that launch and in no other."""
    ran = [i for launch in t.launches for i in launch.ops]
    assert ran == [op.index for op in t.ops if op.launch is not None]
    for launch in t.launches:
        assert all(t.ops[i].launch == launch.index for i in launch.ops)
    assert [launch.index for launch in t.launches] == list(range(len(t.launches)))


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_records_can_be_read_while_the_recording_goes_on(x, mode):
    with tpu_lab.profile(mode=mode, peak_flops=1e9) as p:
        y = x + 1
        assert [op.name for op in p.trace.ops] == ["aten.add.Tensor"] and not p.trace.log
        first = p.trace.ops[0]
        z = (y * 2).view(64)
        assert [op.name.split(".")[1] for op in p.trace.ops] == ["add", "mul", "view"]
        total = z.sum().item()
    assert total == 256.0 and p.trace.ops[0] is first and not p.trace.log and p.trace.writer is None
    assert len(p.trace.ops) == p.trace.op_count and [op.index for op in p.trace.ops] == list(range(p.trace.op_count))
    shared_out(p.trace)
    assert all(launch.ready_ns >= launch.time_ns for launch in p.trace.launches)


@pytest.mark.parametrize("mode, words", [("strict", ["fused", "strict"]), ("debug", ["fused", "debug"])])
def test_an_op_that_makes_deferred_ones_run_is_no_part_of_their_launch(x, mode, words):
    with tpu_lab.profile(mode="fused", peak_flops=1e9) as p:
        y = x * 3
        z = y + 1
        with torch.tpu.set_eager_mode({"strict": 1, "debug": 2}[mode]):
            w = z - 2
    assert [(r.mode, r.ops) for r in p.trace.launches] == [(words[0], (0, 1)), (words[1], (2,))]
    assert w.cpu().eq(2).all()
    shared_out(p.trace)


@pytest.mark.parametrize("mode", ["strict", "debug", "fused"])
def test_another_thread_can_read_the_records_at_any_moment(x, mode):
    """The reader may come between an op's note and its launch's: nothing is lost, counted twice or raised in the op."""
    done, read = threading.Event(), []

    def reader(t):
        while not done.is_set():
            read.append(len(t.ops) + len(t.launches))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with tpu_lab.profile(mode=mode, peak_flops=1e9) as p:
            thread = threading.Thread(target=reader, args=(p.trace,), daemon=True)
            thread.start()
            for i in range(400):
                y = x + i
            y.cpu()
            done.set()
            thread.join()
    finally:
        done.set()
        sys.setswitchinterval(interval)
    assert len(read) > 10 and len(p.trace.ops) == p.trace.op_count == 400
    assert all(op.host_ns > 0 and op.launch is not None for op in p.trace.ops)
    shared_out(p.trace)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_read_just_where_the_launch_is_noted(x, when):
    """What another thread does there now and then, here each time."""

    class Log(list):
        def __getitem__(self, at):
            if at == -1 and when == "before":
                p.trace.writer.catch_up()
            found = super().__getitem__(at)
            if at == -1 and when == "after":
                p.trace.writer.catch_up()
            return found

    with tpu_lab.profile(mode="strict", peak_flops=1e9) as p:
        p.trace.log = Log()
        p.trace.note = p.trace.log.append
        for i in range(5):
            y = x + i
    assert y.cpu().eq(5).all() and len(p.trace.ops) == len(p.trace.launches) == 5
    shared_out(p.trace)


def test_a_long_loop_is_cut_between_ops(x):
    with tpu_lab.profile(mode="fused", peak_flops=1e9) as p:
        y = x
        for _ in range(1100):
            y = y * 1.0
        y.cpu()
    first, *_ = p.trace.launches
    assert first.reason == "loop" and len(first.ops) == 1000
    program = p.trace.programs[first.key]
    assert program.flops == sum(p.trace.ops[i].flops for i in first.ops)
    shared_out(p.trace)


def test_the_notes_of_a_full_trace_stay_few(x, monkeypatch):
    monkeypatch.setattr(writer, "BATCH", 20)
    most = 0
    with tpu_lab.profile(mode="strict", limit=10, peak_flops=1e9) as p:
        for _ in range(400):
            y = x * 2
            most = max(most, len(p.trace.log))
        x.requires_grad_().mul(2).sum().backward()
        assert len(recorder._forward) <= 64  # it is looked at every 64th op
    assert most < 20 + 3 * 64 and y is not None
    assert len(p.trace.ops) == len(p.trace.launches) == len(p.trace.live) == 10
    assert p.trace.op_count > 400 and p.trace.dropped > 1100


def test_the_peak_of_memory_knows_what_is_only_noted(x):
    torch.tpu.reset_peak_memory_stats()
    before = torch.tpu.memory_allocated()
    with tpu_lab.profile(mode="debug", peak_flops=1e9):
        (torch.ones(1000, device="tpu") + 1).sum().item()  # gone again
        assert torch.tpu.max_memory_allocated() >= before + 8000
        torch.tpu.reset_peak_memory_stats()
        assert torch.tpu.max_memory_allocated() < before + 8000


def test_what_recording_cost_counts_the_records(x):
    with tpu_lab.profile(mode="strict", peak_flops=1e9) as p:
        for _ in range(5):
            x + 1
    t = p.trace
    each, step = p.metrics.recording
    assert t.writing_ns > 0 and each == pytest.approx((sum(op.record_ns for op in t.ops) + t.writing_ns) / len(t.ops))
    assert step == pytest.approx(each * len(t.ops))


def test_a_trace_without_a_session_has_its_records_too(x):
    active = trace.start()
    y = x + 1
    trace.stop()
    assert [op.name for op in active.ops] == ["aten.add.Tensor"] and len(active.launches) == 1
    executor.flush("synchronize")
    held = [(h.op, h.bytes) for h in active.held]
    del y
    active.close()
    assert (0, 256) in [(h.op, h.bytes) for h in active.held] and (0, 256) not in held
