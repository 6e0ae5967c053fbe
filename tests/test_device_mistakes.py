"""Wrong calls say what the CPU says, layouts and ops that are missing say it in one sentence; random numbers repeat."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpu_lab  # noqa: F401

SAME_DEVICE = "Expected all tensors to be on the same device"

# --- mistakes ------------------------------------------------------------------------------------------------------

MISTAKES = [
    lambda r, d: r(2, 3) @ r(2, 3), lambda r, d: r(2, 3) + r(2, 4), lambda r, d: torch.cat([r(2, 3), r(3, 2)]),
    lambda r, d: r(2, 3).view(7), lambda r, d: r(2, 3).reshape(4), lambda r, d: r(2, 3).sum(5), lambda r, d: r(2, 3)[5],
    lambda r, d: r(2, 3).transpose(0, 3), lambda r, d: torch.ones(2, device=d, dtype=torch.long).mean(),
    lambda r, d: F.conv2d(r(1, 3, 4, 4), r(2, 4, 3, 3)), lambda r, d: F.linear(r(2, 3), r(4, 5)),
    lambda r, d: torch.mm(r(2, 3), r(3, 2).double()), lambda r, d: r(2, 3).gather(0, torch.zeros(1, device=d)),
    lambda r, d: r(2, 3).expand(4, 4), lambda r, d: F.cross_entropy(r(2, 3), torch.zeros(3, dtype=torch.long, device=d)),
    lambda r, d: F.embedding(torch.zeros(2, device=d), r(3, 2)), lambda r, d: torch.stack([r(2), r(3)]),
    lambda r, d: r(3).item(), lambda r, d: bool(r(3)), lambda r, d: torch.bmm(r(1, 2, 3), r(1, 2, 3)),
    lambda r, d: torch.ones(2, dtype=torch.long, device=d).div_(2), lambda r, d: r(2, 3).add_(r(4, 2, 3)),
    lambda r, d: F.softmax(r(2), dim=3), lambda r, d: torch.ones(2, dtype=torch.int, device=d).add_(1.5),
    lambda r, d: ~r(2), lambda r, d: F.nll_loss(r(2, 3), torch.zeros(2, device=d)), lambda r, d: F.layer_norm(r(2, 3), (4,)),
    lambda r, d: r(4).topk(9), lambda r, d: torch.randint(3, 1, (2,), device=d), lambda r, d: r(2, 3).backward(),
    lambda r, d: r(3).requires_grad_().add_(1), lambda r, d: torch.dot(r(2, 2), r(2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_wrong_call_raises_what_the_cpu_raises(number):
    raised = []
    for device in ("cpu", "tpu"):
        with pytest.raises(Exception) as info:
            MISTAKES[number](lambda *size, d=device: torch.ones(size, device=d), device)
        raised.append((info.type, str(info.value)))
    assert raised[0] == raised[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, c: x + c, lambda x, c: c + x, lambda x, c: torch.cat([x, c]), lambda x, c: x @ c, lambda x, c: x.add_(c),
        lambda x, c: c.add_(x), lambda x, c: F.linear(c, x.view(1, 2)), lambda x, c: F.mse_loss(x, c), lambda x, c: torch.equal(x, c),
        lambda x, c: torch.add(x, x, out=c), lambda x, c: torch.addcmul(x, x, c), lambda x, c: torch._foreach_add([x], [c]),
    ],
)  # fmt: skip
def test_tensors_of_two_devices_do_not_mix(call):
    with pytest.raises(RuntimeError, match=SAME_DEVICE):
        call(torch.ones(2, device="tpu"), torch.ones(2))


def test_numbers_and_index_tensors_of_the_cpu_do_mix():
    x = torch.tensor([1.0, 2.0], device="tpu")
    assert (x + torch.tensor(2.0)).tolist() == (torch.tensor(2.0) + x).tolist() == [3, 4]
    assert x[torch.tensor([1])].tolist() == [2] and x[torch.tensor([True, False])].tolist() == [1]
    x[0] = torch.tensor(5.0)
    assert x.tolist() == [5, 2]


@pytest.mark.filterwarnings("ignore")
def test_layouts_the_device_does_not_hold_are_one_sentence():
    dense = torch.eye(3)
    for make in (lambda: dense.to_sparse().to("tpu"), lambda: dense.to("tpu").to_sparse(), lambda: dense.to("tpu").to_sparse_csr(),
                 lambda: torch.empty(3, 3, layout=torch.sparse_coo, device="tpu"),
                 lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8).to("tpu")):  # fmt: skip
        with pytest.raises(RuntimeError, match="device 'tpu' holds dense tensors"):
            make()


@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
def test_an_op_without_lowering_names_the_call_and_the_line(monkeypatch):
    from tpu_lab.backend import fallback

    library = torch.library.Library("mistakes", "DEF")  # every op of PyTorch with a dense kernel has a lowering
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    x = torch.tensor([0.5, 1.0])
    assert torch.ops.mistakes.twice(x.to("tpu")).tolist() == [1, 2]
    monkeypatch.setattr(fallback, "policy", "error")
    with pytest.raises(
        NotImplementedError, match=r"mistakes::twice has no TPU lowering at .*test_device_mistakes.py:\d+: .*\n.*x\.cpu"
    ):
        torch.ops.mistakes.twice(x.to("tpu"))


# --- random numbers ------------------------------------------------------------------------------------------------


def test_manual_seed_seeds_the_device_and_states_restore():
    def draw():
        return torch.rand(4, device="tpu").tolist()

    torch.manual_seed(3)
    first = draw()
    state = torch.tpu.get_rng_state()
    second = draw()
    torch.manual_seed(3)
    assert draw() == first and draw() == second != first
    torch.tpu.set_rng_state(state)
    assert draw() == second
    torch.tpu.set_rng_state(state)
    with torch.random.fork_rng(device_type="tpu"):
        draw()
    assert draw() == second
    with pytest.raises(ValueError, match="16 bytes"):
        torch.tpu.set_rng_state(torch.zeros(3, dtype=torch.uint8))


@pytest.mark.parametrize("mode", ["strict", "debug", "fused", "compiled"])
def test_the_counter_of_random_ops_comes_round(mode):
    """A state may be any 16 bytes: no number of ops after it is an error, or a loss of what else is deferred."""
    before = torch.tpu.get_rng_state()
    end = torch.tensor([7, 2**63 - 2]).view(torch.uint8)

    def run(x):
        return x * 2, torch.rand(2, device=x.device), torch.rand(2, device=x.device), torch.rand(2, device=x.device)

    try:
        seen = []
        for _ in range(2):
            torch.tpu.set_rng_state(end)
            with torch.tpu.set_eager_mode("strict" if mode == "compiled" else mode):
                double, *drawn = (torch.compile(run) if mode == "compiled" else run)(torch.ones(3, device="tpu"))
            assert double.tolist() == [2, 2, 2] and torch.tpu.get_rng_state().view(torch.int64).tolist() == [7, 1 - 2**63]
            seen.append([r.tolist() for r in drawn])
        assert seen[0] == seen[1] and seen[0][0] != seen[0][1] != seen[0][2]
    finally:
        torch.tpu.set_rng_state(before)


def test_generators_of_the_cpu_serve_and_repeat():
    calls = (
        lambda g: torch.randn(4, generator=g, device="tpu"), lambda g: torch.empty(4, device="tpu").bernoulli_(generator=g),
        lambda g: torch.empty(4, device="tpu").normal_(generator=g), lambda g: torch.randperm(5, generator=g, device="tpu"),
        lambda g: torch.randint(0, 9, (4,), generator=g, device="tpu"),
        lambda g: torch.multinomial(torch.ones(5, device="tpu"), 3, generator=g),
    )  # fmt: skip
    for call in calls:
        g = torch.Generator().manual_seed(7)
        first, second = call(g), call(g)
        assert torch.equal(first, call(torch.Generator().manual_seed(7)))
        assert first.shape == second.shape
    with pytest.raises(RuntimeError, match="CPU generator"):
        torch.Generator(device="tpu")
    assert isinstance(torch.default_generator, torch.Generator)


def test_initialisers_fill_parameters_of_the_device():
    torch.manual_seed(0)
    w = torch.empty(64, 64, device="tpu")
    nn.init.kaiming_uniform_(w)
    assert w.abs().max().item() <= (6 / 64) ** 0.5 and abs(w.mean().item()) < 0.02
    nn.init.normal_(w, 1.0, 0.5)
    assert abs(w.mean().item() - 1) < 0.05 and abs(w.std().item() - 0.5) < 0.05
    nn.init.trunc_normal_(w, std=1.0, a=-0.5, b=0.5)
    assert w.abs().max().item() <= 0.5
    nn.init.orthogonal_(w)
    torch.testing.assert_close((w @ w.t()).cpu(), torch.eye(64), rtol=1e-4, atol=1e-4)
    for fill in (nn.init.xavier_uniform_, nn.init.xavier_normal_, nn.init.kaiming_normal_, nn.init.uniform_):
        assert torch.isfinite(fill(w)).all() and w.std().item() > 0
    assert nn.init.constant_(w, 3.0).mean().item() == 3 and nn.init.zeros_(w).sum().item() == 0
