"""Launches and misses of the three eager modes: how often a program runs, why, what it keeps, what it overwrites."""

import threading
import weakref

import jax
import pytest
import torch

import tpu_lab  # noqa: F401  registers the device
from tpu_lab import trace
from tpu_lab.backend import executor, graph
from tpu_lab.backend.cache import cache

FUSED, STRICT, DEBUG = 0, 1, 2


@pytest.fixture
def fused():
    with torch.tpu.set_eager_mode(FUSED):
        torch.tpu.synchronize()
        yield
        torch.tpu.synchronize()


def recorded(f):
    """(result, trace) of running f under a trace, with whatever it deferred."""
    torch.tpu.synchronize()
    active = trace.start()
    try:
        result = f()
    finally:
        executor.flush("synchronize")
        assert trace.stop() is active
    return result, active


def arange(n):
    return torch.arange(float(n)).to("tpu")


# --- launches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, word", [(STRICT, "strict"), (DEBUG, "debug")])
def test_each_op_is_a_launch(mode, word):
    x = arange(5)
    with torch.tpu.set_eager_mode(mode):
        _, t = recorded(lambda: ((x + 1) * 2).sum().item())
    assert [r.mode for r in t.launches] == [word] * 3 and {r.reason for r in t.launches} == {word}
    assert [len(r.ops) for r in t.launches] == [1, 1, 1]
    assert [t.ops[r.ops[0]].name for r in t.launches] == ["aten.add.Tensor", "aten.mul.Tensor", "aten.sum.default"]


def test_fused_ops_are_one_launch_with_its_reason_and_line(fused):
    x = arange(5)

    def run():
        y = ((x + 1) * 2).sum()
        return y.item()  # here

    value, t = recorded(run)
    assert value == 30.0
    (launch,) = t.launches
    assert (launch.reason, launch.mode, len(launch.ops)) == ("item", "fused", 3)
    assert launch.file == __file__ and launch.code == "return y.item()  # here"


@pytest.mark.parametrize(
    "reason, force",
    [
        ("item", lambda y: y.sum().item()),
        ("cpu", lambda y: y.cpu()),
        ("print", lambda y: repr(y)),
        ("bool", lambda y: bool((y > 0).all())),
        ("synchronize", lambda y: torch.tpu.synchronize()),
        ("cpu", lambda y: y.tolist()),
        ("data-dependent", lambda y: torch.nonzero(y)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_why_a_graph_was_flushed(fused, reason, force):
    x = arange(5)

    def run():
        y = x + 1
        force(y)
        return y

    _, t = recorded(run)
    assert t.launches[0].reason in (reason, "item" if reason == "bool" else reason)
    assert t.launches[0].code.startswith(("(", "force"))


def test_results_nobody_holds_are_not_outputs(fused):
    x = arange(5)

    def run():
        a = x + 1
        b = a * 2  # dies with the function
        c = b - 3
        return c

    _, t = recorded(run)
    (launch,) = t.launches
    assert launch.outputs == 1 and launch.inputs == 1 and len(launch.ops) == 3
    _, t = recorded(lambda: (x + 1, None)[1])
    assert not t.launches and len(t.ops) == 1  # recorded, and nothing to run


# --- donation ------------------------------------------------------------------------------------------------------


def test_an_update_in_place_donates_the_old_buffer(fused):
    w = arange(64)
    torch.tpu.synchronize()
    _, t = recorded(lambda: (w.mul_(2), None)[1])
    assert t.launches[-1].donated == 1
    assert w.tolist() == [2.0 * i for i in range(64)]


@pytest.mark.parametrize("hold", ["alias", "clone", "detach", "data"])
def test_a_buffer_that_somebody_holds_is_never_overwritten(fused, hold):
    w = arange(64)
    torch.tpu.synchronize()
    other = {"alias": lambda: w[:], "clone": w.clone, "detach": w.detach, "data": lambda: w.data}[hold]()
    old = other.tolist() if hold == "clone" else None
    _, t = recorded(lambda: (w.mul_(2), None)[1])
    assert w.tolist() == [2.0 * i for i in range(64)]
    if hold == "clone":
        assert other.tolist() == old
    else:  # the same storage: it sees the write, and the old buffer is nobody's
        assert other.tolist() == w.tolist() and t.launches[-1].donated == 1


def test_a_raw_array_that_the_user_took_is_safe(fused):
    w = arange(64)
    torch.tpu.synchronize()
    held = w.untyped_storage()._tpu.value
    _, t = recorded(lambda: (w.add_(1), None)[1])
    assert t.launches[-1].donated == 0 and float(held[5]) == 5.0 and w[5].item() == 6.0


def test_two_cells_over_one_array_are_safe(fused):
    """x.data.clone() of a value that is the same array must not be overwritten by an update of x."""
    x = arange(64)
    torch.tpu.synchronize()
    y = torch.empty(64, device="tpu")
    y.copy_(x)
    torch.tpu.synchronize()
    x.add_(1)
    y.mul_(3)
    torch.tpu.synchronize()
    assert x.tolist() == [i + 1.0 for i in range(64)] and y.tolist() == [i * 3.0 for i in range(64)]


# --- hits and misses ------------------------------------------------------------------------------------------------


def misses(f):
    return [c for c in recorded(f)[1].compiles]


def test_a_second_identical_step_is_a_hit(fused):
    x = arange(7)
    assert len(misses(lambda: (x.sin() + 1).sum().item())) == 1
    assert not misses(lambda: (x.sin() + 1).sum().item())


@pytest.mark.parametrize("mode", [FUSED, STRICT])
def test_numbers_are_inputs_of_the_program(mode):
    x = arange(9)
    with torch.tpu.set_eager_mode(mode):
        misses(lambda: x.mul(0.5).add(x, alpha=2.0).add(3).mul(3).tolist())
        assert not misses(lambda: x.mul(0.25).add(x, alpha=-1.0).add(4).mul(5).tolist())
    assert x.mul(0.25).add(x, alpha=-1.0).add(4).mul(5).tolist() == [(i * 0.25 - i + 4) * 5 for i in range(9)]


@pytest.mark.parametrize("mode", [FUSED, STRICT])
def test_another_shape_is_one_miss_that_says_which(mode):
    w = torch.ones(17, 3, device="tpu")
    with torch.tpu.set_eager_mode(mode):
        for rows in [torch.ones(n, 17, device="tpu") for n in (32, 31)]:
            (miss,) = misses(lambda rows=rows: torch.mm(rows, w).cpu())
    assert miss.cause == "shape" and "f32[31,17], was f32[32,17]" in miss.why and miss.why.startswith("self")
    assert miss.site.startswith(__file__) and "drop_last=True" in miss.why


def model():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)).to("tpu")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    x, y = torch.randn(32, 8).to("tpu"), torch.randint(0, 4, (32,)).to("tpu")

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    return step


def test_a_long_training_loop_compiles_in_its_first_steps_only(fused):
    step, losses, made = model(), [], []
    for number in range(200):
        before = cache.misses
        losses.append(step().item())
        if cache.misses > before:
            made.append((number, cache.misses - before))
    assert sum(n for _, n in made) <= 3 and all(number < 3 for number, _ in made), made
    assert losses[-1] < losses[0]


def test_a_loop_that_reads_nothing_keeps_memory_and_graph_small(fused):
    step = model()
    for _ in range(5):
        step()
    torch.tpu.synchronize()
    before, live, nodes = cache.misses, len(jax.live_arrays()), []
    for _ in range(40):
        step()
        nodes.append(len(executor.graph.nodes))
    torch.tpu.synchronize()
    assert len(jax.live_arrays()) <= live and max(nodes) < 200 and cache.misses - before <= 1


def test_a_loop_without_an_optimizer_is_cut_at_its_period(fused, monkeypatch):
    monkeypatch.setattr("tpu_lab.backend.graph.LOOP_CHECK", 50)
    x = torch.zeros(3, device="tpu")
    torch.tpu.synchronize()  # the next graph looks for a loop after 50 ops
    active = trace.start()
    for _ in range(400):
        x = x * 0.5 + 1
    trace.stop()
    assert {r.reason for r in active.launches} == {"loop"} and len(active.launches) >= 10
    assert len(active.compiles) <= 2 and len(executor.graph.nodes) < 60
    assert x.tolist() == pytest.approx([2.0] * 3)


# --- reports of users ---------------------------------------------------------------------------------------------


def test_a_view_is_still_a_view_after_the_graph_ran(fused):
    """R5."""
    x = arange(6)
    view = x[2:4]
    view.add_(1)
    torch.tpu.synchronize()
    view.add_(10)
    torch.tpu.synchronize()
    x.mul_(2)
    assert view.tolist() == [26.0, 28.0] and x.tolist() == [0.0, 2.0, 26.0, 28.0, 8.0, 10.0]


def test_a_slice_assignment_is_seen_by_the_next_op_of_the_graph(fused):
    """R6."""
    buffer = torch.zeros(8, device="tpu")
    for i in range(4):
        buffer[2 * i : 2 * i + 2] = float(i + 1)
    total = buffer.sum()
    assert total.item() == 20.0 and buffer.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]


@pytest.mark.parametrize("cut", [1, 3, 100])
def test_a_ring_buffer_of_losses_has_one_write_a_slot(fused, cut):
    """R7."""
    ring, x = torch.zeros(4, device="tpu"), torch.ones((), device="tpu")
    for i in range(10):
        x = x * 1.5
        ring[i % 4] = x
        if i % cut == 0:
            torch.tpu.synchronize()
    assert ring.tolist() == [1.5**9, 1.5**10, 1.5**7, 1.5**8]


# --- errors and threads --------------------------------------------------------------------------------------------


def test_a_failing_compile_leaves_the_graph_usable(fused, monkeypatch):
    x = arange(11)
    y = x.cos() + 1
    original = cache.add

    def fail(*args, **kwargs):
        raise RuntimeError("no room to compile")

    monkeypatch.setattr(cache, "add", fail)
    with pytest.raises(RuntimeError, match="no room"):
        y.sum().item()
    monkeypatch.setattr(cache, "add", original)
    torch.testing.assert_close(y.cpu(), torch.arange(11.0).cos() + 1)


def test_a_wrong_call_does_not_spoil_what_is_recorded(fused):
    x = arange(6)
    y = x + 1
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.mm(y.view(2, 3), y.view(2, 3))
    assert y.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_threads_record_at_once():
    results, errors = {}, []

    def work(number):
        try:
            with torch.tpu.set_eager_mode(FUSED if number % 2 else STRICT):
                x = torch.full((4,), float(number), device="tpu")
                for _ in range(30):
                    x = x + 1
                    x.mul_(1.0)
                results[number] = x.tolist()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and results == {n: [n + 30.0] * 4 for n in range(4)}


def test_a_program_holds_no_tensor_alive(fused):
    x = arange(13)
    (x * 2).sum().item()
    held = weakref.ref(x.untyped_storage()._tpu)
    del x
    assert held() is None


def test_an_op_that_a_finalizer_records_in_the_middle_of_another_does_not_take_its_place(fused, monkeypatch):
    real, meanwhile = graph.Node, []

    def node(*args):
        if not meanwhile:
            meanwhile.append(None)
            meanwhile[0] = torch.full((3,), 7.0, device="tpu")
        return real(*args)

    x = torch.ones(2, device="tpu")
    monkeypatch.setattr(graph, "Node", node)
    y = x + 1
    z = y * 3
    assert z.tolist() == [6.0, 6.0] and meanwhile[0].tolist() == [7.0] * 3
