"""torch.compile on "tpu" and what is around a compiled graph: calls, shapes, breaks, modes, options, profiles, interrupts."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import tpu_lab  # noqa: F401
from tpu_lab import FallbackWarning, trace
from tpu_lab.backend import compile as tpu_compile
from tpu_lab.backend import fxgraph, launches
from tpu_lab.backend.cache import cache


@pytest.fixture(autouse=True)
def fresh():
    """Dynamo forgets its code caches, so one test's guards do not meet another's."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=tolerance, atol=tolerance)


def test_second_call_compiles_nothing_and_is_one_launch_each_way():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to("tpu")
    step, x = torch.compile(model), torch.randn(3, 4).to("tpu")
    step(x).sum().backward()
    model.zero_grad(set_to_none=True)
    misses = cache.misses
    step(x).sum().backward()  # sum's backward may be new to eager mode only on the first pass
    assert cache.misses == misses
    recorded = trace.start()
    try:
        step(x).sum().backward()
    finally:
        trace.stop()
    launches.drain()
    compiled = [launch for launch in recorded.launches if launch.mode == "compiled"]
    assert [launch.cache for launch in compiled] == ["hit", "hit"]
    assert all(launch.file.endswith("test_compile_calls.py") for launch in compiled)  # backward takes its forward's line
    forward, backward = ([recorded.ops[i] for i in launch.ops] for launch in compiled)
    assert {op.phase for op in forward} == {"forward"} and {op.phase for op in backward} == {"backward"}
    assert [op.name for op in forward if op.kind == "matmul"] == ["aten.addmm.default"] * 2
    assert forward[-1].module == "2" and forward[-1].inputs[:2] == ("f32[2]", "f32[3,8]")
    assert sum(launch.flops for launch in compiled) > 2 * (3 * 4 * 8 + 3 * 8 * 2)
    grads = [op for op in backward if op.name == "aten.mm.default"]
    assert grads and all(recorded.ops[op.forward].phase == "forward" for op in grads)


def test_control_flow_is_part_of_the_program():
    def branch(x, w):
        return torch.cond(x.sum() > 0, lambda x: (x @ w).t(), lambda x: (x - 1).t(), (x,))

    w = torch.randn(3, 3)
    f = torch.compile(branch, backend="tpu", fullgraph=True)
    for sign in (1.0, -1.0):
        x = torch.full((2, 3), sign)
        close(f(x.to("tpu"), w.to("tpu")), branch(x, w))

    def halve(x):
        return torch._higher_order_ops.while_loop(
            lambda n, x: x.sum() > 1,
            lambda n, x: (n + 1, x / 2),
            (torch.zeros((), dtype=torch.int64, device=x.device), x),
        )

    turns, rest = torch.compile(halve, backend="tpu", fullgraph=True)(torch.full((4,), 3.0).to("tpu"))
    assert turns.item() == 4
    close(rest, torch.full((4,), 3 / 16))


def test_a_graph_that_cannot_be_one_program_runs_op_by_op_and_says_so():
    f = torch.compile(lambda x: torch.linalg.eigvals(x * 2).real + 1, backend="tpu", fullgraph=True)
    x = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    with pytest.warns(FallbackWarning, match="ops runs op by op on 'tpu'.*eig"):
        close(f(x.to("tpu")), torch.linalg.eigvals(x * 2).real + 1)
    close(f(x.to("tpu") / 2), torch.linalg.eigvals(x).real + 1)


def test_graph_break_with_item():
    @torch.compile(backend="tpu")
    def f(x):
        y = x.sum()
        if y.item() > 0:
            return x + 1
        return x - 1

    for sign in (1.0, -1.0):
        close(f(torch.full((3,), sign).to("tpu")), torch.full((3,), 2 * sign))


def test_dynamic_shapes_compile_once_a_shape():
    f = torch.compile(lambda x: (x.reshape(-1, 2) * x.shape[0]).sum(0), backend="tpu", dynamic=True)
    for rows in (4, 6, 8, 4):
        x = torch.randn(rows, 4)
        close(f(x.to("tpu")), (x.reshape(-1, 2) * rows).sum(0))
    misses = cache.misses
    f(torch.randn(6, 4).to("tpu"))
    assert cache.misses <= misses + 1  # randn's copy is no program; at most the sum of the reference
    model = nn.Linear(4, 2)
    step = torch.compile(copy.deepcopy(model).to("tpu"), dynamic=True)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 4)
        a, b = x.to("tpu").requires_grad_(), x.clone().requires_grad_()
        step(a).square().sum().backward()
        model(b).square().sum().backward()
        close(a.grad, b.grad)


def test_kwargs_and_nested_containers():
    @torch.compile(backend="tpu", fullgraph=True)
    def f(x, *, more, scale=2.0):
        return {"sum": x + more["a"][0] * scale, "same": x}

    x = torch.ones(2).to("tpu")
    out = f(x, more={"a": [x * 3]})
    close(out["sum"], torch.full((2,), 7.0))
    assert out["same"] is x


@pytest.mark.parametrize("mode", ["strict", "debug", "fused"])
def test_around_every_eager_mode(mode):
    f = torch.compile(lambda x, w: torch.relu(x @ w), backend="tpu")
    x, w = torch.randn(3, 4), torch.randn(4, 2)
    from tpu_lab.backend import state

    with torch.tpu.set_eager_mode(state.as_mode(mode)):
        a = x.to("tpu") + 1
        b = f(a, w.to("tpu")) * 3
        c = f(a, w.to("tpu")).sub_(b)
        close(b, torch.relu((x + 1) @ w) * 3)
        close(c, torch.relu((x + 1) @ w) * -2)


def test_eager_and_compiled_on_one_kv_cache():
    kv = torch.zeros(1, 8, 2).to("tpu")

    def put(kv, at, value):
        kv[:, at] = value
        return kv.sum()

    step = torch.compile(put, backend="tpu", dynamic=False)
    for at in range(6):
        value = torch.full((1, 2), float(at + 1)).to("tpu")
        (step if at % 2 else put)(kv, torch.tensor(at).to("tpu"), value)
    close(kv[0, :, 0], torch.tensor([1.0, 2, 3, 4, 5, 6, 0, 0]))


def test_equal_functions_share_a_program():
    x = torch.ones(7).to("tpu")
    make = lambda: torch.compile(lambda x: torch.sin(x) * 3, backend="tpu")  # noqa: E731
    make()(x)
    misses, hits = cache.misses, cache.hits
    torch._dynamo.reset()
    make()(x)
    assert (cache.misses, cache.hits) == (misses, hits + 1)


def test_tensors_made_on_the_cpu_inside():
    @torch.compile(backend="tpu")
    def f(x):
        table = torch.arange(4, dtype=torch.float32)  # on the CPU
        return x + table.sum(), table * 2

    a, b = f(torch.ones(2).to("tpu"))
    close(a, torch.full((2,), 7.0))
    assert b.device.type == "cpu" and b.tolist() == [0, 2, 4, 6]


def test_functions_of_a_notebook_cell():
    scope = {"torch": torch}
    exec("def cell(x):\n    return torch.exp(x).sum()", scope)
    close(torch.compile(scope["cell"])(torch.zeros(3).to("tpu")), torch.tensor(3.0))


def test_default_backend_and_modes():
    x = torch.ones(3).to("tpu")
    for mode in ("default", "reduce-overhead", "max-autotune"):
        torch._dynamo.reset()
        close(torch.compile(lambda x: x + 1, mode=mode)(x), torch.full((3,), 2.0))
        close(torch.compile(lambda x: x + 2, mode=mode, backend="tpu")(x), torch.full((3,), 3.0))
    close(torch.compile(lambda x: x + 3, backend="inductor")(x), torch.full((3,), 4.0))
    close(torch.compile(lambda x: x + 4, options={"name": "four", "num_dynamic_buckets": 2})(x), torch.full((3,), 5.0))


def test_options():
    seen = []
    options = {"async_compile": False, "serializable": True, "debug_callback": seen.append, "name": "named_program"}
    f = torch.compile(lambda x: x * 5, backend="tpu", options=options)
    close(f(torch.ones(2).to("tpu")), torch.full((2,), 5.0))
    assert len(seen) == 1
    newest = max(cache.programs.values(), key=lambda p: p.used if p.view.kind == "compiled" else 0)
    assert "named_program" in newest.hlo()
    with pytest.raises(
        tpu_compile.UnknownOption, match="no option 'fast'.*num_dynamic_buckets.*custom_compiler_options"
    ):
        torch.compile(lambda x: x, backend="tpu", options={"fast": 1})
    with pytest.raises(RuntimeError, match="Unexpected optimization option fast"):
        torch.compile(lambda x: x, options={"fast": 1})
    assert tpu_compile.check({"bucket-size": 64}) == {"bucket_size": 64}


def test_cpu_users_see_no_change(monkeypatch):
    called = []
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **_: called.append(1) or gm.forward)
    assert torch.compile(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    assert called == [1]
    assert torch.compile(lambda x: x + 1, backend="tpu")(torch.ones(2)).tolist() == [2, 2]


def test_miss_is_explained():
    f = torch.compile(lambda x: torch.cos(x) * 2, backend="tpu", dynamic=False)
    f(torch.ones(32, 3).to("tpu"))
    f(torch.ones(31, 3).to("tpu"))
    newest = max(cache.programs.values(), key=lambda p: p.used)
    assert newest.cause == "shape" and "expected 32, actual 31" in newest.why and "drop_last" in newest.why
    assert "test_compile_calls.py:" in newest.site


def test_a_profile_breaks_no_graph_and_dynamo_leaves_our_code_alone():
    model = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to("tpu"))
    before = dict(counters["graph_break"]), counters["frames"]["total"]
    with tpu_lab.profile() as profile:
        model(torch.ones(2, 3).to("tpu"))
    assert (dict(counters["graph_break"]), counters["frames"]["total"]) == (before[0], before[1] + 1)
    assert [launch.mode for launch in profile.trace.launches] == ["compiled"]


def test_between_two_graphs_only_user_code_is_traced():
    @torch.compile(backend="tpu")
    def f(x):
        y = x * 1.25
        torch._dynamo.graph_break()
        z = torch.linspace(0, 1, 5, device="cpu").to("tpu")  # eager kernels, new to this process
        torch._dynamo.graph_break()
        return y + z

    frames = counters["frames"]["total"]
    close(f(torch.ones(5).to("tpu")), 1.25 + torch.linspace(0, 1, 5))
    assert counters["frames"]["total"] <= frames + 3


def test_an_interrupt_in_a_compile_passes_and_the_next_call_works(monkeypatch):
    f = torch.compile(lambda x: torch.atan(x) + 2, backend="tpu")
    x = torch.zeros(9).to("tpu")
    real = fxgraph.execute

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fxgraph, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        f(x)
    monkeypatch.setattr(fxgraph, "execute", real)
    close(f(x), torch.full((9,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("copy", [lambda x: x.copy_(x), lambda x: x.copy_(x.clone()), lambda x: x.add_(0), lambda x: x[:].copy_(x)])
def test_an_input_written_with_its_own_value_stays(copy, dtype):
    def f(x):
        copy(x)
        return x + 1

    torch._dynamo.reset()
    run = torch.compile(f)
    x = torch.arange(3).to(dtype).to("tpu")
    for _ in range(2):
        assert run(x).tolist() == [1, 2, 3]
        assert x.tolist() == [0, 1, 2]


def given(device, grad):
    """(x, a view of it, y)."""
    x = torch.arange(6.0).reshape(2, 3).to(device)
    return x, x.view(6), torch.ones(2, 3, device=device, requires_grad=grad)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("new", ["y.detach() * 2", "torch.cat([y, y]).detach()", "y.detach()"])
def test_an_input_that_is_given_other_memory_has_it_afterwards(new, grad, mode):
    """`x.data = ...` in the graph: x is the new tensor from then on, and its old views keep the old memory."""
    source = f"def f(x, y):\n    kept = x.sum() * y\n    x.data = {new}\n    return kept\n"
    names: dict = {"torch": torch}
    exec(source, names)
    answers = []
    for device in ("cpu", "tpu"):
        x, view, y = given(device, grad)
        run = names["f"] if device == "cpu" else torch.compile(names["f"])
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode(mode)):
            outs = [run(x, y) for _ in range(2)]
            if grad:
                outs[-1].sum().backward()
                outs.append(y.grad)
            x.add_(1)
        answers.append([t.tolist() for t in (*outs, x, view, y)])
    assert answers[0] == answers[1]


def doubled(x, y):
    return x * 2, x * y


def written(x, y):
    x.add_(y)
    return x * 2


def handed_out(x, y):
    return x, x.view(-1), y.conj()


def negated(x, y):
    return x + 1, x.neg(), x


@pytest.mark.parametrize("function", [doubled, written, handed_out, negated])
@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_lazy_conjugates_and_negatives_go_in_and_come_out(function, kind):
    answers = []
    for device in ("cpu", "tpu"):
        base = torch.complex(torch.arange(6.0).reshape(2, 3), torch.arange(1.0, 7.0).reshape(2, 3)).to(device)
        x = base.conj() if kind == "conjugate" else base.conj().imag
        y = base * 2 if kind == "conjugate" else torch.ones(2, 3, device=device)
        out = function(x, y) if device == "cpu" else torch.compile(function)(x, y)
        answers.append([t.tolist() for t in torch.utils._pytree.tree_leaves((out, base, x))])
    assert answers[0] == answers[1]


def correlation(q, k):
    return torch.fft.irfft(torch.fft.rfft(q, dim=1) * torch.conj(torch.fft.rfft(k, dim=1)), n=q.shape[1], dim=1)


def parts(q, k):
    product = torch.complex(q, 2 * q) * torch.complex(k, k / 2).conj()
    return product.real + product.imag.square()


def mirrored(q, k):
    return torch.view_as_real(torch.complex(k, q).conj().resolve_conj()).sum(-1)


@pytest.mark.parametrize("function", [correlation, parts, mirrored])
def test_gradients_that_come_out_as_lazy_views(function):
    given = [torch.randn(2, 6, 4) for _ in range(3)]
    answers = []
    for device in ("cpu", "tpu"):
        q, k = [t.clone().to(device).requires_grad_() for t in given[:2]]
        out = function(q, k) if device == "cpu" else torch.compile(function)(q, k)
        (out * given[2].to(device)).sum().backward()
        answers.append((out, q.grad, k.grad))
    for here, there in zip(answers[1], answers[0], strict=True):
        close(here, there)
