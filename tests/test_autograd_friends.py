"""What lives around autograd: autocast, GradScaler, checkpointing, torch.func, hooks, gradcheck, anomaly mode, Ctrl-C."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tpu_lab  # noqa: F401


def pair(*size, seed=0, dtype=torch.float32):
    """The same leaf on the CPU and on the device."""
    torch.manual_seed(seed)
    host = torch.randn(size, dtype=dtype)
    return host.clone().requires_grad_(), host.to("tpu").requires_grad_()


def close(there, here, **tolerance):
    torch.testing.assert_close(there.cpu(), here, **({"rtol": 1e-4, "atol": 1e-5} | tolerance))


# --- mixed precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_ops_of_the_lists_and_grads_stay_float32(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5)).to("tpu")
    x, y = torch.randn(2, 3, 4, 4, device="tpu"), torch.tensor([1, 2], device="tpu")
    with torch.autocast("tpu", dtype=dtype):
        assert torch.is_autocast_enabled("tpu")
        out = model(x)
        loss = F.cross_entropy(out, y)
        assert out.dtype is dtype and loss.dtype is torch.float32
        assert F.layer_norm(out, (5,)).dtype is out.softmax(-1).dtype is out.sum().dtype is torch.float32
        assert out.sum(dtype=dtype).dtype is dtype and (out + out).dtype is dtype and out.exp().dtype is torch.float32
        assert torch.addcmul(out.float(), out, out).dtype is torch.float32
        q = torch.randn(1, 2, 3, 4, device="tpu")
        assert F.scaled_dot_product_attention(q, q, q).dtype is dtype
        with torch.autocast("tpu", enabled=False):
            assert (x.flatten(1) @ x.flatten(1).t()).dtype is torch.float32
        assert (x.double().flatten(1) @ x.double().flatten(1).t()).dtype is torch.float64
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.rand(2, device="tpu"), torch.rand(2, device="tpu"))
    loss.backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_autocast_is_bfloat16_by_default_and_agrees_with_the_cpus():
    here, there = pair(8, 8)
    layer = nn.Linear(8, 8)
    with torch.autocast("cpu"):
        expected = layer(here)
    layer.to("tpu")
    with torch.autocast("tpu"):
        out = layer(there)
        assert torch.get_autocast_dtype("tpu") is torch.bfloat16
    close(out.float(), expected.float(), rtol=0.02, atol=0.02)


def test_grad_scaler_steps_and_skips_as_on_the_cpu():
    weights, scales = {}, {}
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=1)
        for value in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 3), value, device=device)).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        weights[device], scales[device] = model.weight.detach().cpu(), scaler.get_scale()
    assert torch.equal(weights["tpu"], weights["cpu"]) and scales["tpu"] == scales["cpu"] == 16.0


# --- checkpointing, saved tensors, hooks ---------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", [torch.tpu.EagerMode.DEFER_NEVER, torch.tpu.EagerMode.DEFER_AND_FUSE])
def test_checkpoint_repeats_the_dropout_mask(reentrant, mode):
    def block(x):
        return F.dropout(x * 1.0, 0.5)

    with torch.tpu.set_eager_mode(mode):
        x = torch.ones(64, device="tpu", requires_grad=True)
        out = checkpoint(block, x, use_reentrant=reentrant)
        out.sum().backward()
        assert torch.equal(x.grad.cpu(), out.detach().cpu())  # the gradient is the mask that the forward drew
        assert 0 < (out == 0).sum().item() < 64


def test_checkpointed_tied_weights_get_their_gradient():
    here, grads = nn.Linear(4, 4), {}
    for device in ("cpu", "tpu"):
        layer = here.to(device)
        layer.zero_grad()
        x = torch.ones(2, 4, device=device)
        y = checkpoint(lambda t, w=layer: w(w(t).relu()), x, use_reentrant=False)
        y.sum().backward()
        grads[device] = layer.weight.grad.cpu()
    close(grads["tpu"], grads["cpu"])


@pytest.mark.parametrize("pin_memory", [False, True])
def test_save_on_cpu(pin_memory):
    here, there = pair(4, 3)
    for x in (here, there):
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            y = (x.t() @ x).exp().sum()
        y.backward()
    close(there.grad, here.grad)


def test_hooks_run_and_change_gradients():
    seen = []
    here, there = pair(3, 3)
    for x in (here, there):
        x.register_hook(lambda g: g * 2)
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device.type))
        (x * 3).sum().backward()
    close(there.grad, here.grad)
    assert seen == ["cpu", "tpu"]
    layer, found = nn.Linear(3, 3).to("tpu"), []
    layer.register_forward_hook(lambda m, i, o: o * 0)
    layer.register_full_backward_hook(lambda m, gi, go: found.append(go[0].device.type))
    assert layer(there).abs().sum().item() == 0
    layer(there).sum().backward()
    assert found == ["tpu"]


def test_custom_functions_and_double_backward():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 3 * x**2

    here, there = pair(3, 3)
    for x in (here, there):
        (grad,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
    close(there.grad, here.grad, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:Anomaly:UserWarning", "ignore:Error detected:UserWarning")
def test_anomaly_mode_finds_the_nan():
    x = torch.zeros(3, device="tpu", requires_grad=True)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"):
        ((x - 1).sqrt()).sum().backward()


# --- torch.func, forward mode, gradcheck ---------------------------------------------------------------------------


def test_function_transforms_agree_with_the_cpu():
    here, there = (t.detach() for t in pair(4))

    def f(x):
        return (x**3 + x.sin()).sum()

    for transform in (
        torch.func.grad(f),
        torch.func.vmap(lambda a: a * a + 1),
        torch.func.jacrev(torch.tanh),
        torch.func.jacfwd(torch.tanh),
        torch.func.hessian(f),
        lambda x: torch.func.jvp(f, (x,), (x,))[1],
        lambda x: torch.func.vjp(torch.tanh, x)[1](x)[0],
        lambda x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, x * 2])),
    ):
        close(transform(there), transform(here))


def test_functional_call_with_other_weights():
    layer = nn.Linear(3, 2)
    weights = {k: torch.full_like(v, 0.5) for k, v in layer.named_parameters()}
    x = torch.ones(1, 3)
    expected = torch.func.functional_call(layer, weights, (x,))
    layer.to("tpu")
    out = torch.func.functional_call(layer, {k: v.to("tpu") for k, v in weights.items()}, (x.to("tpu"),))
    close(out, expected)


def test_forward_mode_gives_tangents():
    here, there = (t.detach() for t in pair(3))
    tangents = []
    for x in (here, there):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            tangents.append(forward_ad.unpack_dual(dual.sin() * dual).tangent)
    close(tangents[1], tangents[0])


def test_gradcheck_and_gradgradcheck_in_float64():
    _, x = pair(2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: torch.tanh(t) * t, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda t: t**3, (x,))


# --- Ctrl-C --------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import random, signal, torch, tpu_lab
torch.manual_seed(0); random.seed(0)
torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_AND_FUSE
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to("tpu")
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
x = torch.randn(32, 8, device="tpu"); y = x.sum(1, keepdim=True)
def step():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss
first = step().item(); step(); step().item()
signal.signal(signal.SIGALRM, lambda *a: signal.raise_signal(signal.SIGINT))
caught = 0
for _ in range(30):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.02))
        for _ in range(2_000):
            step()
    except KeyboardInterrupt:
        caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert all(torch.isfinite(p).all().item() for p in model.parameters())
host = [p.detach().cpu() for p in model.parameters()]
expected = torch.nn.functional.linear(torch.tanh(x.cpu() @ host[0].t() + host[1]), host[2], host[3])
assert torch.allclose(model(x).cpu(), expected, atol=1e-4)
for _ in range(100):
    last = step()
print(caught, last.item() < first)
"""


def test_ctrl_c_in_the_middle_of_steps_loses_nothing():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    caught, learned = done.stdout.split()
    assert (caught, learned) == ("30", "True"), done.stdout + done.stderr[-2000:]


WAITING = """
import os, signal, threading, time, torch, tpu_lab
torch.ones(2).to("tpu")
assert type(signal.getsignal(signal.SIGINT)).__name__ == "Gate"
def spin():
    while True:
        pass
for wait in (spin, lambda: time.sleep(60), threading.Event().wait):
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        wait()
    except KeyboardInterrupt as error:
        print(repr(error))
pid = os.fork()
if pid == 0:
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


DROPPED = """
import gc, os, signal, threading, torch, tpu_lab
torch.ones(2).to("tpu")
asked = []
def callback(phase, info):
    if not asked:
        asked.append(signal.raise_signal(signal.SIGINT))
        for _ in range(10_000_000):  # it comes in here, where CPython can only drop it
            if len(asked) > 1:
                break
gc.callbacks.append(callback)
try:
    gc.collect()
    threading.Event().wait(20)
except KeyboardInterrupt:
    print("once")
from tpu_lab.backend import interrupts
try:
    with interrupts.hold():
        signal.raise_signal(signal.SIGINT)
        for _ in range(1000):
            pass
        print("held")
    threading.Event().wait(20)
except KeyboardInterrupt:
    print("then raised")
try:
    with interrupts.hold():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        print("not reached")
except KeyboardInterrupt:
    print("the second at once")
threading.Event().wait(0.5)
print("and no third")
"""


def test_ctrl_c_is_not_dropped_in_a_callback_and_waits_while_jax_works_on_a_program():
    done = subprocess.run(
        [sys.executable, "-c", DROPPED], capture_output=True, text=True, check=False, env=dict(os.environ), timeout=120
    )
    said = ["once", "held", "then raised", "the second at once", "and no third"]
    assert done.stdout.splitlines() == said, done.stdout + done.stderr[-2000:]
    assert "Exception ignored" not in done.stderr


def test_ctrl_c_reaches_python_code_blocking_calls_and_forked_children():
    done = subprocess.run(
        [sys.executable, "-c", WAITING], capture_output=True, text=True, check=False, env=dict(os.environ), timeout=50
    )
    assert done.stdout.split() == ["KeyboardInterrupt()"] * 3 + ["7"], done.stderr[-2000:]
