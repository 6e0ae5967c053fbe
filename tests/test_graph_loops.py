"""Where a graph that nobody reads is cut: a loop at its period, and not the layers of a model."""

import pytest
import torch
from test_graph import fused, recorded  # noqa: F401  (a fixture)

import tpu_lab  # noqa: F401  registers the device

pytestmark = pytest.mark.usefixtures("fused")


def test_layers_are_not_a_loop(monkeypatch):
    """A deep model's step is one program, however alike its layers are."""
    monkeypatch.setattr("tpu_lab.backend.graph.LOOP_CHECK", 50)
    layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(20)]).to("tpu")
    x = torch.ones(2, 4).to("tpu")
    torch.tpu.synchronize()
    _, t = recorded(lambda: layers(x).sum().backward())
    assert len(t.launches) == 1 and len(t.launches[0].ops) > 100


def test_a_loop_over_batches_is_cut(monkeypatch):
    """Each turn reads another batch, and the same weights."""
    monkeypatch.setattr("tpu_lab.backend.graph.LOOP_CHECK", 50)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to("tpu")
    batches = [torch.full((2, 4), float(i)).to("tpu") for i in range(40)]
    torch.tpu.synchronize()
    with torch.no_grad():
        total, t = recorded(lambda: sum(net(x).sum() for x in batches))
    assert len(t.launches) > 2 and {r.reason for r in t.launches[:-1]} == {"loop"} and len(t.compiles) <= 4
    torch.testing.assert_close(total.cpu(), sum(net.cpu()(x.cpu()).sum() for x in batches))


def test_layers_without_an_end_are_cut_where_they_repeat(monkeypatch):
    monkeypatch.setattr("tpu_lab.backend.graph.LOOP_CHECK", 50)
    monkeypatch.setattr("tpu_lab.backend.graph.SIZE_LIMIT", 100)
    x = torch.ones(3, device="tpu")
    weights = [[torch.full((3,), k / 10 + i / 1000).to("tpu") for k in range(6)] for i in range(100)]
    torch.tpu.synchronize()

    def run(x=x):
        for a, b, c, d, e, f in weights:
            x = ((torch.sin(x + a) * b - c) * d).cos() + e - f
        return x

    y, t = recorded(run)
    assert len(t.launches) > 5 and len(t.compiles) <= 3 and {r.reason for r in t.launches[:-1]} == {"loop"}
    assert len(t.launches[0].ops) >= 100  # at SIZE_LIMIT, not at LOOP_CHECK

    want = x.cpu()
    for a, b, c, d, e, f in [[w.cpu() for w in layer] for layer in weights]:
        want = ((torch.sin(want + a) * b - c) * d).cos() + e - f
    torch.testing.assert_close(y.cpu(), want, rtol=1e-4, atol=1e-4)


LOOPS = {  # what a turn does with a batch of two
    "metric": lambda net, total, x, y: total.add_((x - y).square().mean()),
    "sum": lambda net, total, x, y: total + (x * y).sum(),
    "evaluation": lambda net, total, x, y: total.add_((net(x) - y).square().mean()),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("epochs", [1, 4])
def test_batches_are_no_layers(monkeypatch, loop, epochs):
    """New ones each turn, or the same ones once more: cut at the first look."""
    monkeypatch.setattr("tpu_lab.backend.graph.LOOP_CHECK", 50)
    net = torch.nn.Linear(4, 4).to("tpu")
    batches = [(torch.full((2, 4), float(i)).to("tpu"), torch.full((2, 4), 2.0 * i).to("tpu")) for i in range(80 // epochs)]
    total = torch.zeros((), device="tpu")
    torch.tpu.synchronize()

    def run(total=total):
        with torch.no_grad():
            for _ in range(epochs):
                for x, y in batches:
                    total = LOOPS[loop](net, total, x, y)
        return total

    _, t = recorded(run)
    assert max(len(r.ops) for r in t.launches) < 100 and len(t.compiles) <= 4 and "size limit" not in {r.reason for r in t.launches}


def test_training_by_hand_is_a_loop(monkeypatch):
    """Weights that a turn wrote are no leaves of the graph any more."""
    monkeypatch.setattr("tpu_lab.backend.graph.LOOP_CHECK", 50)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).to("tpu")
    weights = list(net.parameters())
    torch.tpu.synchronize()

    def run():
        for i in range(30):
            x, y = torch.full((2, 4), float(i)).to("tpu"), torch.full((2, 1), 1.0).to("tpu")
            grads = torch.autograd.grad((net(x) - y).square().mean(), weights)
            with torch.no_grad():
                for w, g in zip(weights, grads):
                    w.sub_(g, alpha=0.01)

    _, t = recorded(run)
    assert max(len(r.ops) for r in t.launches) < 130 and len(t.compiles) <= 4


STEPS = (torch.sin, torch.cos, torch.tanh, torch.abs, torch.neg, torch.sigmoid)  # nothing grows


@pytest.mark.parametrize("length, prologue", [(70, 0), (90, 0), (90, 33), (150, 7), (230, 0)])
def test_a_turn_too_long_to_be_seen_three_times_is_found_again(monkeypatch, length, prologue):
    """Its beginning comes again: the graphs that follow are cut so that equal ones come round, however long it runs."""
    monkeypatch.setattr("tpu_lab.backend.graph.LOOP_CHECK", 50)
    monkeypatch.setattr("tpu_lab.backend.graph.SIZE_LIMIT", 200)
    order = torch.randint(len(STEPS), (prologue + length,), generator=torch.Generator().manual_seed(length)).tolist()

    def run(x):
        for n in order[:prologue] + order[prologue:] * 20:
            x = STEPS[n](x)
        return x

    x = torch.ones(3, device="tpu")
    y, t = recorded(lambda: run(x))
    again = [r.key for r in t.launches]
    assert len(t.launches) >= 5 and len(set(again)) <= 5 and len(set(again[len(again) // 3 : -1])) <= 3
    assert max(len(r.ops) for r in t.launches) <= 250
    torch.testing.assert_close(y.cpu(), run(torch.ones(3)), rtol=1e-4, atol=1e-4)


def test_layers_that_were_taken_for_a_loop_are_found_out(monkeypatch):
    """One weight a layer looks like one batch a turn. When the model begins again, it is cut where it begins."""
    monkeypatch.setattr("tpu_lab.backend.graph.LOOP_CHECK", 50)
    weights = [torch.full((3,), i / 100).to("tpu") for i in range(41)]
    torch.tpu.synchronize()

    def run(x):
        for _ in range(12):
            for w in weights:
                x = torch.sin(x + w)
            x = torch.tanh(x)
        return x

    x = torch.ones(3, device="tpu")
    _, t = recorded(lambda: run(x))
    assert len({r.key for r in t.launches}) <= 3 and {len(r.ops) for r in t.launches[:-1]} == {50, 116}
