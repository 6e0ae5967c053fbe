"""The tools that exchange what ops go through, in several threads: each waits for its turn, and none is inside another."""

import subprocess
import sys
import threading

import pytest
import torch

import tpu_lab
from tpu_lab import session
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


def test_ends_of_blocks_are_found_in_threads(tmp_path):
    file = tmp_path / "long.py"
    nested = "v = [[(1 + 2) * 3 for _ in range(4)] for _ in range(2)]\n"
    file.write_text(nested * 800 + "with a as b:\n    c\n    d\n" + nested * 800)
    assert all_of(*[lambda: [session._block_end(str(file), 801) for _ in range(3)]] * 4) == [[803] * 3] * 4


def test_profiles_in_threads_are_refused_in_words_or_whole(tmp_path):
    x = torch.ones(3, device="tpu")

    def work():
        said = []
        for _ in range(5):
            try:
                with tpu_lab.profile(peak_flops=1e12) as p:
                    x + 1
                said.append(len(p.trace.ops) >= 1 and p.trace.meta["end_line"] > p.trace.meta["line"])
            except RuntimeError as error:
                said.append("a profile is already active" in str(error))
        return said

    assert all_of(work, work, work) == [[True] * 5] * 3


def test_what_pytorch_imports_once_is_in_no_profile():
    code = """
import sys, torch, tpu_lab
x = torch.ones(3, device="tpu")
assert "torch._dynamo" not in sys.modules
with tpu_lab.profile(peak_flops=1e12) as p:
    assert "torch._dynamo" in sys.modules
    before = set(sys.modules)
    (x @ x).exp()
print(sum(m.startswith("torch._dynamo") for m in set(sys.modules) - before), len(p.trace.ops))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", "2"], done.stderr


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
