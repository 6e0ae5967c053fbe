"""An index out of range never gives a guess: debug raises at the op, strict and fused where the host waits next."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.while_loop import while_loop

import tpu_lab
from tpu_lab.backend import bounds
from tpu_lab.backend.state import mode_scope

MODES = ("debug", "strict", "fused")


def dev(values):
    return torch.tensor(values).to("tpu")


def table():
    return torch.arange(12.0).reshape(4, 3).to("tpu")


def put(x, index, **options):
    return torch.ops.aten.index_put(x, [index], torch.ones((), device="tpu"), **options)


def masked(x, index):
    """The first index is masked out."""
    return torch.ops.aten._unsafe_masked_index(x, dev([[False], [True]]), [index], 0)


def masked_put(x, index):
    return torch.ops.aten._unsafe_masked_index_put_accumulate(x, dev([[False], [True]]), [index], torch.ones(2, 3).to("tpu"))


CALLS = {  # name -> (the call with an index that is wrong, one that is right, words of the error)
    "embedding": (lambda i: F.embedding(i, table()), [[1, 4]], [0, 3], "index out of range in self: 4 in a table of 4 rows"),
    "embedding_bag": (lambda i: F.embedding_bag(i, table(), dev([0])), [0, 9], [3, 3], "index out of range in self: 9"),
    "gather": (lambda i: table().gather(1, i), [[3]], [[2]], "index 3 is out of bounds for dimension 1 with size 3"),
    "gather below": (lambda i: table().gather(0, i), [[-1]], [[0]], "index -1 is out of bounds for dimension 0"),
    "index": (lambda i: table()[i], [4], [-4], "index 4 is out of bounds for dimension 0 with size 4"),
    "index below": (lambda i: table()[:, i], [-4], [-3], "index -4 is out of bounds for dimension 1 with size 3"),
    "index_put": (lambda i: put(table(), i), [7], [-1], "index 7 is out of bounds for dimension 0 with size 4"),
    "index_put_": (lambda i: table().index_put_((i,), dev(1.0)), [7], [3], "index 7 is out of bounds"),
    "accumulate": (lambda i: put(table(), i, accumulate=True), [7, 7], [1, 1], "index 7 is out of bounds"),
    "scatter": (lambda i: table().scatter(0, i, 1.0), [[4]], [[3]], "index 4 is out of bounds for dimension 0 with size 4"),
    "scatter_": (lambda i: table().scatter_(1, i, table()), [[0, 3]], [[0, 2]], "index 3 is out of bounds for dimension 1"),
    "scatter_add": (lambda i: table().scatter_add(0, i, table()), [[4]], [[3]], "index 4 is out of bounds"),
    "scatter_reduce": (lambda i: table().scatter_reduce(0, i, table(), "amax"), [[4]], [[0]], "index 4 is out of bounds"),
    "index_select": (lambda i: table().index_select(1, i), [3], [2], "index out of range in self: 3 for dimension 1"),
    "index_add": (lambda i: table().index_add(0, i, table()[:1]), [4], [3], "index out of range in self: 4"),
    "index_copy": (lambda i: table().index_copy(0, i, table()[:1]), [-1], [3], "index out of range in self: -1"),
    "index_fill": (lambda i: table().index_fill(0, i, 0.0), [4], [-4], "index out of range in self: 4"),
    "take": (lambda i: table().take(i), [12], [-12], "tried to access index 12 on a tensor of 12 elements"),
    "put": (lambda i: table().put(i, dev([1.0])), [12], [11], "tried to access index 12"),
    "nll_loss": (lambda i: F.nll_loss(table(), i), [0, 0, 0, 3], [0, 1, 2, -100], "Target 3 is out of bounds"),
    "cross_entropy": (lambda i: F.cross_entropy(table(), i), [0, 0, -1, 0], [0, 1, -100, 2], "Target -1 is out of bounds"),
    "2d": (lambda i: F.nll_loss(table()[None, :, None], i), [[[0, 4, 0]]], [[[0, 3, -100]]], "Target 4 is out of bounds"),
    "masked": (lambda i: masked(table(), i), [9, 4], [9, -4], "index 4 is out of bounds for dimension 0 with size 4"),
    "masked put": (lambda i: masked_put(table(), i), [9, 5], [9, 0], "index 5 is out of bounds for dimension 0 with size 4"),
    "margin": (lambda i: F.multi_margin_loss(table(), i), [0, 0, 3, 0], [0, 1, 2, 0], "Target 3 is out of bounds"),
}  # fmt: skip


@pytest.fixture(params=MODES)
def mode(request):
    bounds._unread.clear()
    with mode_scope(request.param):
        yield request.param
    bounds._unread.clear()


FUSED = (
    "embedding",
    "index",
    "index_put_",
    "scatter_add",
    "take",
    "cross_entropy",
)  # one of each kind: compiles are slow


@pytest.mark.parametrize(
    ("name", "mode"), [(n, m) for n in CALLS for m in MODES if m != "fused" or n in FUSED], indirect=["mode"]
)
def test_each_op_tells_and_lets_the_right_ones_pass(name, mode):
    fn, wrong, right, words = CALLS[name]
    fn(dev(right)).cpu()
    out = None
    with pytest.raises(IndexError) as caught:
        out = fn(dev(wrong))
        out.cpu()
    assert words in str(caught.value)
    assert (out is None) == (mode == "debug")  # at the op, or at the wait
    assert dev(1.0).item() == 1.0  # told once


def test_the_line_is_that_of_the_op_not_of_the_wait(mode):
    if mode == "debug":
        with pytest.raises(
            IndexError, match=r"aten.embedding at .*test_index_errors.py:\d+: F.embedding\(dev\(\[5\]\), table\(\)\)"
        ):
            F.embedding(dev([5]), table())
        return
    bad = F.embedding(dev([5]), table())
    worse = bad.sum() * 2
    with pytest.raises(IndexError, match=r"aten.embedding at .*: bad = F.embedding"):
        worse.item()


@pytest.mark.parametrize("wait", ["item", "cpu", "synchronize", "print", "bool", "accelerator"])
def test_every_wait_looks(wait, mode):
    if mode == "debug":
        return
    out = table().take(dev([99]))
    with pytest.raises(IndexError, match="index 99"):
        {
            "item": lambda: out.item(),
            "cpu": lambda: out.cpu(),
            "synchronize": torch.tpu.synchronize,
            "print": lambda: repr(out),
            "bool": lambda: bool(out > 1),
            "accelerator": torch.accelerator.synchronize,
        }[wait]()


def test_it_is_both_of_pytorchs_kinds():
    with pytest.raises(RuntimeError), mode_scope("debug"):
        table().gather(0, dev([[9]]))


def test_the_first_wrong_op_of_a_graph_is_named():
    with mode_scope("fused"):
        a = table()[dev([1])]
        b = table().index_select(0, dev([17]))
        c = table()[dev([33])]
        with pytest.raises(IndexError, match="17"):
            (a + b + c).cpu()


def test_a_result_that_nobody_holds_is_not_silent():
    with mode_scope("strict"):
        table()[dev([50])]
        gc.collect()
        with pytest.raises(IndexError, match="index 50"):
            torch.tpu.synchronize()


def test_compiled_graphs_name_the_line_in_the_graph():
    @torch.compile(backend="tpu")
    def f(w, i):
        x = w * 2
        return F.embedding(i, x).sum()  # the op

    assert f(table(), dev([1])).item() == 24
    with pytest.raises(IndexError, match=r"(?s)index out of range in self: 8.*aten.embedding at .*# the op"):
        f(table(), dev([8])).item()
    w = table().requires_grad_()
    f(w, dev([3])).backward()
    assert w.grad.sum().item() == 6


def test_inside_a_branch_of_a_compiled_graph():
    @torch.compile(backend="tpu")
    def f(x, i, sign):
        return torch.cond(sign > 0, lambda x, i: x[i].sum(), lambda x, i: x[i - 4].sum(), (x, i))  # branches

    assert f(table(), dev([1]), dev(1)).item() == 12
    assert f(table(), dev([4]), dev(-1)).item() == 3  # right in the branch that runs
    with pytest.raises(IndexError, match=r"(?s)index 4 is out of bounds for dimension 0.*aten.index.Tensor at .*# branches"):
        f(table(), dev([4]), dev(1)).item()
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        f(table(), dev([9]), dev(-1)).item()


def test_inside_a_loop_of_a_compiled_graph():
    x = table()

    @torch.compile(backend="tpu")
    def f(n, start):
        def body(k, total):
            return k + 1, total + x[k.reshape(1)].sum()

        return while_loop(lambda k, total: k < n, body, (start, torch.zeros((), device="tpu")))[1]

    assert f(dev(4), dev(0)).item() == 66
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):  # the first of 4, 5, 6
        f(dev(7), dev(0)).item()


def test_inside_the_condition_of_a_loop():
    x = table()

    @torch.compile(backend="tpu")
    def f(n, start):
        def go_on(k, total):
            return (k < n) & (x[k.reshape(1)].sum() >= 0)

        return while_loop(go_on, lambda k, total: (k + 1, total + 2), (start, torch.zeros((), device="tpu")))[1]

    assert f(dev(3), dev(0)).item() == 6
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):  # after the last turn
        f(dev(4), dev(0)).item()
    with pytest.raises(IndexError, match="index 9 is out of bounds"):  # before the first
        f(dev(3), dev(9)).item()
    assert f(dev(1), dev(0)).item() == 2


def test_backward_of_an_indexed_table_is_as_always(mode):
    w = table().detach().requires_grad_()
    loss = w[dev([0, 0, -1])].sum() + F.embedding(dev([2]), w).sum()
    loss.backward()
    assert w.grad.cpu().tolist() == [[2.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]


def test_no_launch_more_and_no_wait():
    with mode_scope("fused"):
        for _ in range(2):
            with tpu_lab.profile() as p:
                (table()[dev([1])] + 1).sum().item()
        assert [r.reason for r in p.trace.launches] == ["item"]
    with mode_scope("strict"):
        with tpu_lab.profile() as p:
            out = F.embedding(dev([1]), table())
        launched = [p.trace.ops[i].name for r in p.trace.launches for i in r.ops]
        assert launched.count("aten.embedding.default") == 1 and len(p.trace.launches) == len(launched)
        assert {w.what for w in p.trace.waits} == {"to tpu"}
        assert out.shape == (1, 3)


def test_what_is_unread_stays_bounded():
    bounds._unread.clear()
    x, i = table(), dev([1])
    with mode_scope("strict"):
        for _ in range(2 * bounds.LIMIT + 5):
            x.take(i)
    assert len(bounds._unread) <= bounds.LIMIT + 1
    torch.tpu.synchronize()
    assert not bounds._unread


def test_empty_indices_and_one_hot_are_right():
    empty = torch.zeros(0, dtype=torch.int64, device="tpu")
    assert table()[empty].cpu().shape == (0, 3) and F.embedding(empty, table()).cpu().shape == (0, 3)
    assert F.one_hot(dev([0, 2]), 3).cpu().tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(RuntimeError):
        F.one_hot(dev([0, 3]), 3).cpu()


def test_one_error_names_all_that_was_wrong_and_none_is_forgotten():
    a = torch.ones(3, device="tpu")[torch.tensor([7], device="tpu")]
    b = torch.nn.functional.embedding(torch.tensor([9], device="tpu"), torch.ones(3, 2, device="tpu"))
    with pytest.raises(IndexError, match=r"index 7 is out of bounds(.|\n)*also: index out of range in self: 9"):
        torch.tpu.synchronize()
    many = [torch.ones(3, device="tpu")[torch.tensor([10 + i], device="tpu")] for i in range(6)]
    with pytest.raises(IndexError, match=r"index 10 (.|\n)*index 13 (.|\n)*and 2 more"):
        torch.tpu.synchronize()
    del a, b, many
    torch.tpu.synchronize()


def test_the_smallest_integer_is_out_of_range_too():
    lowest = torch.tensor([-(1 << 63)], device="tpu")  # what a float NaN becomes on many CPUs
    torch.ones(3, device="tpu")[lowest]
    with pytest.raises(IndexError, match="is out of bounds for dimension 0 with size 3"):
        torch.tpu.synchronize()


def test_a_threads_index_is_told_who_waits_first_and_the_thread_itself():
    launched, told, answers = threading.Event(), threading.Event(), []

    def wrong():
        result = torch.ones(3, device="tpu")[torch.tensor([7], device="tpu")]
        launched.set()
        told.wait(60)
        try:
            answers.append(result.tolist())
        except IndexError as error:
            answers.append(str(error))

    thread = threading.Thread(target=wrong)
    thread.start()
    assert launched.wait(60)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):  # it might be about to read the thread's result
        torch.tpu.synchronize()
    torch.tpu.synchronize()  # once is enough
    told.set()
    thread.join()
    assert "index 7 is out of bounds" in answers[0]
    torch.tpu.synchronize()


def test_a_thread_hears_of_its_index_also_when_another_ran_the_graph():
    recorded, ran, answers = threading.Event(), threading.Event(), []

    def wrong():
        with mode_scope("fused"):
            result = torch.ones(3, device="tpu")[torch.tensor([8], device="tpu")]
            recorded.set()
            ran.wait(60)
            for _ in range(2):
                try:
                    answers.append(result.tolist())
                except IndexError as error:
                    answers.append(str(error))

    thread = threading.Thread(target=wrong)
    thread.start()
    assert recorded.wait(60)
    with mode_scope("fused"), pytest.raises(IndexError, match="index 8 is out of bounds"):
        torch.ones(2, device="tpu").add(1).tolist()
    ran.set()
    thread.join()
    assert "index 8 is out of bounds" in answers[0] and isinstance(answers[1], list)  # once
    torch.tpu.synchronize()


def test_a_program_that_ends_without_waiting_is_told(tmp_path):
    script = tmp_path / "ends.py"
    script.write_text('import torch, tpu_lab\nx = torch.ones(4, device="tpu")\ny = x[torch.tensor([1, 9]).to("tpu")]\n')
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0
    assert "IndexError, found when the program ended, as nothing had waited: index 9 is out of bounds" in ran.stderr
    assert f"{script}:3: y = x[" in ran.stderr and "Traceback" not in ran.stderr
