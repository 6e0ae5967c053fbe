"""The tools that exchange what ops go through, in several threads: each waits for its turn, and none is inside another."""

import threading

import pytest
import torch

import tpu_lab
from tpu_lab.backend import executor
from tpu_lab.backend.rehearsal import rehearse
from tpu_lab.kept import kept


def all_of(*functions):
    """Call each in a thread of its own, at once; their results."""
    results: list = [None] * len(functions)
    gate = threading.Barrier(len(functions))

    def call(n, function):
        gate.wait()
        try:
            results[n] = function()
        except Exception as error:
            results[n] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def test_rehearsals_searches_and_counts_in_threads_take_turns():
    model = torch.nn.Linear(8, 8).to("tpu")
    x = torch.ones(4, 8, device="tpu")
    before = executor.run, executor.peek, executor.resolve

    def step():
        model(x).sum().backward()

    def rehearsed():
        with rehearse() as trace, kept(step, (), {}):
            step()
            executor.flush("synchronize")
        return [len(r.ops) for r in trace.launches]

    def searched():
        return tpu_lab.find_nonfinite(lambda: (model(x) * 0).log().sum())

    def counted():
        return len(tpu_lab.coverage(model, x).rows)

    first, *rest, found, count = all_of(rehearsed, rehearsed, rehearsed, searched, counted)
    assert first == rest[0] == rest[1] and sum(first) > 4
    assert "log" in found.title and count > 0, count
    assert (executor.run, executor.peek, executor.resolve) == before and not executor.watched
    assert model.weight.grad is None and (x + 1).sum().item() == 64  # values are values again


ADD = torch.nn.ReLU()
TOOLS = {
    "compile_for": lambda fn: _rehearse(fn),
    "find_nonfinite": lambda fn: tpu_lab.find_nonfinite(fn, torch.ones(2, device="tpu")),
    "coverage": lambda fn: tpu_lab.coverage(fn, torch.ones(2)),
}


def _rehearse(fn):
    with rehearse():
        fn(torch.ones(2, device="tpu"))


@pytest.mark.parametrize("inner", TOOLS)
@pytest.mark.parametrize("outer", TOOLS)
def test_one_inside_another_on_one_thread_is_refused(outer, inner):
    def nested(x):
        TOOLS[inner](ADD)
        return ADD(x)

    with pytest.raises(RuntimeError, match=f"{inner} inside .*they do not nest, call one after the other"):
        TOOLS[outer](nested)
    TOOLS[inner](ADD)  # the turn was given back
