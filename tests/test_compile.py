"""torch.compile on "tpu" against eager PyTorch on the CPU: training, gradients, and what is written to."""

import copy
import importlib

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpu_lab  # noqa: F401
from tpu_lab.backend import fallback
from tpu_lab.backend.cache import cache


@pytest.fixture(autouse=True)
def fresh():
    """Dynamo forgets its code caches, so one test's guards do not meet another's."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=tolerance, atol=tolerance)


def train(model, inputs, steps=3, make=None, compiled=False, device="cpu"):
    """(losses, parameters, buffers) of a few training steps."""
    model = copy.deepcopy(model).to(device)
    inputs = [x.to(device) for x in inputs]
    if hasattr(model, "tie"):
        model.tie()  # moving a module to another device type makes new parameters
    optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)))(model.parameters())
    forward = torch.compile(model, backend="tpu") if compiled else model
    losses = []
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):  # the optimizer in one program: less to compile
        for _ in range(steps):
            optimizer.zero_grad()
            loss = forward(*inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, list(model.parameters()), list(model.buffers())


def agrees(model, *inputs, **options):
    want, got = train(model, inputs, **options), train(model, inputs, compiled=True, device="tpu", **options)
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    for a, b in zip(got[1] + got[2], want[1] + want[2], strict=True):
        close(a, b, 1e-4)


@pytest.mark.parametrize("name", ["mingpt", "resnet", "dlrm", "unet"])
def test_the_four_models_train(name, monkeypatch):
    monkeypatch.setattr(fallback, "policy", "error")
    module = importlib.import_module(f"tpu_lab.models.{name}")
    config = module.Config.tiny()
    model, batches = module.Model(config), [module.batch(config, 4, seed) for seed in range(4)]
    runs = []
    for device in ("cpu", "tpu"):
        replica = copy.deepcopy(model).to(device)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.02, momentum=0.9)
        loss_of = torch.compile(module.loss) if device == "tpu" else module.loss
        losses = []
        with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
            for batch in batches:
                optimizer.zero_grad()
                loss = loss_of(replica, *(x.to(device) for x in batch))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        runs.append((losses, list(replica.parameters())))
    (want, ours), (got, theirs) = runs
    assert got == pytest.approx(want, rel=1e-5)
    for a, b in zip(theirs, ours, strict=True):
        close(a, b, 1e-4)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.view(2, 6, 4, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(2, 6, 16))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embed.weight

    def forward(self, i):
        return self.head(torch.tanh(self.embed(i)))


@pytest.mark.parametrize("make", [None, lambda p: torch.optim.AdamW(p, lr=1e-2)], ids=["SGD", "AdamW"])
def test_mlp(make):
    agrees(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 3)), torch.randn(5, 6), make=make)


def test_conv_batchnorm_buffers_mutate_once():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 2)
    )
    agrees(model, torch.randn(2, 3, 8, 8))


def test_attention():
    agrees(Attention(), torch.randn(2, 6, 16))


def test_tied_weights():
    agrees(Tied(), torch.randint(0, 11, (3, 4)))


def test_dropout_masks_agree_between_forward_and_backward_and_differ_between_calls():
    drop = torch.compile(lambda x: F.dropout(x, 0.5) * 1.0, backend="tpu")
    x = torch.ones(64, device="tpu", requires_grad=True)
    first = drop(x)
    first.sum().backward()
    assert torch.equal(first.detach().cpu(), x.grad.cpu())
    misses = cache.misses
    assert not torch.equal(drop(x).cpu(), first.cpu())
    assert cache.misses == misses
    torch.manual_seed(7)
    a = drop(x).cpu()
    torch.manual_seed(7)
    assert torch.equal(a, drop(x).cpu())


def test_checkpoint_inside_keeps_its_masks():
    layer = nn.Linear(8, 8).to("tpu")

    def block(y):
        return F.dropout(torch.relu(layer(y)), 0.5) * 1.0

    f = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), backend="tpu")
    out = f(torch.rand(4, 8).to("tpu").requires_grad_())
    out.sum().backward()
    close(layer.bias.grad, (out.detach().cpu() != 0).float().sum(0) * 2)


def test_input_mutation():
    @torch.compile(backend="tpu")
    def f(x, y):
        x.add_(y)
        x[1].mul_(2)
        return x.sum()

    x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    tx, ty = x.to("tpu"), y.to("tpu")
    for _ in range(2):
        x.add_(y)
        x[1].mul_(2)
        close(f(tx, ty), x.sum())
        close(tx, x)


def test_mutation_through_views_of_inputs():
    @torch.compile(backend="tpu")
    def f(a, scale):
        b = a.t()
        b.mul_(1.0)
        b[0].add_(scale)
        return b, a[:, 1:]

    a = torch.arange(6.0).view(2, 3).to("tpu")
    b, tail = f(a, 2.0)
    want = torch.tensor([[2.0, 1, 2], [5, 4, 5]])
    close(a, want)
    close(b, want.t())
    close(tail, want[:, 1:])
    b.zero_()  # it is a view of the input
    close(a, torch.zeros(2, 3))


def test_slices_of_one_buffer_at_other_offsets():
    f = torch.compile(lambda x: x * 2 + 1, backend="tpu")
    whole = torch.arange(12.0)
    on_tpu = whole.to("tpu")
    for start in (0, 3, 6, 2):
        close(f(on_tpu[start : start + 3]), whole[start : start + 3] * 2 + 1)
    g = torch.compile(lambda x: x.add_(1), backend="tpu")
    for start in (0, 3, 6):
        g(on_tpu[start : start + 3])
    close(on_tpu, torch.cat([whole[:9] + 1, whole[9:]]))


def test_two_arguments_on_one_storage():
    f = torch.compile(lambda x, y: x.mul_(2).sum() + y.sum(), backend="tpu")
    base = torch.ones(4).to("tpu")
    close(f(base[:2], base[2:]), torch.tensor(6.0))
    close(f(base[:3], base[1:]), torch.tensor(17.0))  # overlapping: y sees x's new values
    close(base, torch.tensor([4.0, 4, 2, 1]))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_compiled_optimizer_step(name):
    start = [torch.randn(4, 3), torch.randn(3)]
    runs = []
    for device, compiled in (("cpu", False), ("tpu", True)):
        params = [nn.Parameter(p.clone().to(device)) for p in start]
        optimizer = getattr(torch.optim, name)(params, lr=0.1, weight_decay=0.01)
        step = torch.compile(optimizer.step, backend="tpu") if compiled else optimizer.step
        for i in range(4):
            for p in params:
                p.grad = (p.detach() + i).square()
            step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        close(b, a.detach())


def test_learning_rate_tensor_is_an_input():
    p = nn.Parameter(torch.ones(3).to("tpu"))
    optimizer = torch.optim.SGD([p], lr=torch.tensor(0.5))
    step = torch.compile(optimizer.step, backend="tpu")
    p.grad = torch.ones_like(p)
    step()
    misses = cache.misses
    optimizer.param_groups[0]["lr"].fill_(0.25)
    step()
    assert cache.misses == misses
    close(p, torch.full((3,), 0.25))


def test_no_grad_and_inference_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(copy.deepcopy(model).to("tpu"))
    x = torch.randn(5, 4)
    with torch.no_grad():
        close(compiled(x.to("tpu")), model(x))
    model.eval()
    compiled.eval()
    with torch.inference_mode():
        close(compiled(x.to("tpu")), model(x))


def test_autocast_inside():
    def f(x, w):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return x @ w

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    out = torch.compile(f, backend="tpu")(x.to("tpu"), w.to("tpu"))
    assert out.dtype == torch.bfloat16
    close(out.float(), f(x, w).float(), 2e-2)


def test_retain_graph_runs_backward_twice():
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).to("tpu"))
    x = torch.randn(4, 4).to("tpu").requires_grad_()
    out = model(x).sum()
    out.backward(retain_graph=True)
    once = x.grad.cpu().clone()
    out.backward()
    close(x.grad, 2 * once)


def test_written_arguments_give_their_memory_back():
    f = torch.compile(lambda x: x.mul_(2), backend="tpu")
    x = torch.ones(1000).to("tpu")
    f(x)
    old = x.untyped_storage()._tpu.value
    assert isinstance(old, jax.Array)
    kept = x.detach()  # the same storage: no second holder of the value
    f(x)  # `old` is held here: it must stay whole
    assert float(old[0]) == 2.0 and float(kept[0].cpu()) == 4.0
    del old
    f(x)
    newest = max(cache.programs.values(), key=lambda p: p.used if p.view.kind == "compiled" else 0)
    assert newest.view.donated == (0,)
    close(x, torch.full((1000,), 8.0))


def test_no_memory_is_taken_for_a_gradient_that_is_handed_through(recwarn):
    """The gradient of `a + 1` is the one that came in: no result of the backward graph is made in a saved tensor's place."""
    w = torch.rand(5, 5).to("tpu")
    f = torch.compile(lambda a, b: ((a + 1).t(), (((b @ w).tanh() @ w).tanh() @ w).tanh()), backend="tpu", fullgraph=True)
    a, b = (torch.rand(5, 5).to("tpu").requires_grad_() for _ in range(2))
    torch.autograd.backward(f(a, b), [torch.ones(5, 5).to("tpu")] * 2)
    assert not [w for w in recwarn if "donated" in str(w.message)]
    close(a.grad, torch.ones(5, 5))
