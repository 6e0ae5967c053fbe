"""Values, sizes and kinds that PyTorch's CPU refuses or takes: the device refuses and takes the same, never a guess."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpu_lab  # noqa: F401  registers the device

VALUES = """
F.multilabel_margin_loss(r(3, 4), t([[9, 0, -1, -1]] * 3)) | F.multilabel_margin_loss(r(3, 4), t([[-2, 0, -1, -1]] * 3))
F.multilabel_margin_loss(r(4), t([3, 0, -1, 9])) | F.max_unpool2d(o(1, 1, 1, 1), t([[[[-1]]]]), 2)
F.max_unpool2d(o(1, 1, 1, 1), t([[[[4]]]]), 2) | F.max_unpool3d(o(1, 1, 1, 1, 1), t([[[[[7]]]]]), 2)
o(3, 4).select_scatter(o(4), 0, -9) | o(3, 4).select_scatter(o(4), 0, -1) | o(3, 4).slice_scatter(o(1, 4), 0, 5, 9)
torch.searchsorted(r(4), o(1), sorter=t([0, 1, 2, 9])) | torch.searchsorted(r(4), o(1), sorter=t([0, 1, 2, 3]))
torch.bernoulli(-o(4)) | torch.bernoulli(o(4) * math.nan) | o(4).bernoulli_(o(4) * 2) | o(4).bernoulli_(1.5) | torch.bernoulli(o(4))
F.embedding_bag(t([0, 1]), o(3, 2), t([0, 5])) | F.embedding_bag(t([0, 1]), o(3, 2), t([1]))
F.embedding_bag(t([0, 1, 2]), o(3, 2), t([0, 2, 1])) | F.embedding_bag(t([0, 1]), o(3, 2), t([0, 2]))
F.embedding(t([9]), o(3, 2), max_norm=1.0) | F.binary_cross_entropy(o(2) * 2, o(2)) | F.binary_cross_entropy(o(2) / 2, o(2))
torch.normal(o(2), -o(2)) | o(3).masked_scatter(t([True, True, True]), o(2)) | torch.cholesky_inverse(0 * o(2, 2))
o(2).__setitem__(0, 1j) | o(2).fill_(1 + 0j) | o(2).half().masked_fill(o(2) > 0, 1j) | (o(2) + 0j).fill_(1e300) | F.pad(o(2).char(), (1, 1), value=300)
c < c | c >= 1 | o(2) > 1j | torch.maximum(c, c) | c.clamp(max=1) | c.sort() | c.max() | c == c | torch.where(o(2) > 0, c, c)
o(2).half().clamp_min(1e10) | o(2).half().clamp_max(7e4) | F.threshold(o(2).half(), 1e10, 1) | F.threshold(o(2).char(), 1j, 1)
o(2).char().masked_fill(o(2) > 0, t(300)) | o(2).char().masked_fill(o(2) > 0, t(3)) | o(2).half().masked_fill_(o(2) > 0, t(1e10))
o(2).half().masked_fill_(o(2) > 0, t(-math.inf)) | torch.index_select(o(3), 0, t([[0]])) | torch.std(t([1, 2])) | o(2).long().char().random_(0, 300) | o(2).bool() - True
t([1.0, 1.0, math.nan, math.nan, math.nan]).mode() | t([2.0, 0.0, 1.0, -0.0]).mode() | t([math.nan, math.nan]).mode()
torch.native_batch_norm(o(1, 4), o(4), o(4), o(4), o(4), True, 0.1, 1e-5) | torch.batch_norm_update_stats(o(1, 4, 1), o(4), o(4), 0.1)
torch.ops.aten._native_batch_norm_legit_functional(o(1, 4, 1, 1), o(4), o(4), o(4), o(4), True, 0.1, 1e-5)
"""
EMPTY = """
F.embedding(t([0]), e(0, 4)) | e(0, 3)[t([0])] | e(3, 0)[t([-9])] | e(3, 0)[t([1])] | e(0, 3)[:, t([9])] | e(3, 0).index_put_((t([9]),), e(1, 0))
e(0, 3).index_add(0, t([0]), o(1, 3)) | e(3, 0).index_add(0, t([9]), e(1, 0)) | e(3, 0).index_fill(0, t([9]), 1.0) | e(0, 3).index_fill(0, t([0]), 1.0)
e(0, 3).max() | e(0, 3).max(0) | e(0, 3).max(1) | e(0, 3).argmax() | e(0, 3).argmin(0) | e(0, 3).amax(0) | e(0, 3).median(0) | e(0, 3).mode(0)
e(0, 3).sum() | e(0, 3).mean(0) | e(0, 3).kthvalue(1, 0) | e(0, 3).aminmax() | torch.multinomial(e(0), 1) | e(0).take(t([0])) | e(0, 3).sort(0)
F.interpolate(e(0, 3, 8, 8), scale_factor=2) | F.interpolate(e(0, 3, 8, 8), size=(3, 3), mode="bicubic") | F.interpolate(e(2, 3, 0, 8), scale_factor=2)
F.max_pool2d(e(0, 3, 4, 4), 2) | F.adaptive_max_pool2d(e(0, 3, 4, 4), 2) | F.adaptive_avg_pool2d(e(1, 3, 0, 0), 2) | F.group_norm(e(0, 4, 2), 2)
F.max_unpool2d(e(0, 1, 1, 1), t([]).long().view(0, 1, 1, 1), 2) | F.conv2d(e(1, 0, 4, 4), e(2, 0, 3, 3)) | F.conv2d(o(1, 2, 4, 4), e(0, 2, 3, 3))
F.grid_sample(e(1, 3, 0, 8), e(1, 2, 2, 2)) | F.batch_norm(e(0, 3), o(3), o(3), training=True) | torch.linalg.solve(torch.eye(2, device=d), e(2, 0))
torch.floor_divide(t([7, 8]), t([2, 3]), out=e(0).long()) | torch.div(t([7]), t([2]), rounding_mode="trunc", out=e(0).long())
torch.fmod(t([7]), t([2]), out=e(0).long()) | torch.remainder(t([7]), t([0]), out=e(0).long()) | torch.linalg.inv(o(1, 1), out=e(0)) | e(0).long() // t([0])
"""
GRADIENTS = """
F.fractional_max_pool2d(g(0, 2, 6, 6), 2, 3) | F.fractional_max_pool3d(g(0, 2, 6, 6, 6), 2, 3) | F.max_pool2d(g(0, 2, 6, 6), 2) | F.max_pool3d(g(2, 0, 6, 6, 6), 2)
F.adaptive_max_pool2d(g(0, 2, 6, 6), 2) | F.adaptive_avg_pool3d(g(0, 2, 6, 6, 6), 4) | F.avg_pool2d(g(0, 2, 6, 6), 2) | F.interpolate(g(0, 2, 6, 6), scale_factor=2, mode="bicubic")
F.group_norm(g(0, 4, 3), 2, g(4), g(4)) | F.group_norm(g(0, 4, 3), 2) | F.group_norm(g(2, 0, 3), 2, g(0), g(0)) | F.layer_norm(g(0, 4), (4,), g(4), g(4))
F.batch_norm(g(0, 3, 4), o(3), o(3), g(3), g(3)) | F.rms_norm(g(0, 4), (4,), g(4)) | F.conv2d(g(0, 2, 5, 5), g(3, 2, 2, 2), g(3)) | F.conv_transpose2d(g(0, 2, 5, 5), g(2, 3, 2, 2), g(3))
F.mse_loss(g(0, 4), g(0, 4)) | F.huber_loss(g(0, 4), g(0, 4)) | F.smooth_l1_loss(g(0, 4), g(0, 4)) | F.l1_loss(g(0, 4), g(0, 4)) | F.binary_cross_entropy(g(0, 4), o(0, 4))
F.cross_entropy(g(0, 4), t([]).long()) | F.nll_loss(g(0, 4, 2), t([]).long().view(0, 2)) | F.soft_margin_loss(g(0, 4), o(0, 4)) | F.kl_div(g(0, 4), o(0, 4), reduction="sum")
g(2, 0) @ g(0, 4) | torch.baddbmm(g(2, 2, 4), g(2, 2, 0), g(2, 0, 4)) | F.scaled_dot_product_attention(g(0, 2, 3, 4), g(0, 2, 3, 4), g(0, 2, 3, 4))
F.embedding_bag(t([[]]).long(), g(4, 3)) | g(3, 4).index_select(0, t([]).long()) | g(3, 4).index_add(0, t([]).long(), g(0, 4)) | F.grid_sample(g(0, 2, 4, 4), g(0, 3, 3, 2))
g(0, 3).prod(0) | g(0, 3).cumprod(0) | g(0, 3).logsumexp(1) | g(0, 3).norm() | g(0, 3).var(1) | torch.cdist(g(2, 0), g(2, 0)) | torch.linalg.inv(g(0, 3, 3)) | g(0, 4).softmax(0)
"""
NUMBERS = """
t([1]) + 2**63 | t([1]) * (2**64 - 1) | 2**63 - t([1]) | t([1]) // 2**63 | t([1]) / 2**63 | t([5]) & 2**63 | t([1]) < 2**63 | t([1]) == 2**63
o(2) + 2**63 | o(2) / 2**63 | o(2) < 2**63 | o(2).half() * 2**63 | o(2).fill_(2**63) | t([1]).fill_(2**63) | t([1]).add_(2**63) | t([1]).char() + 2**63
t([1]).int() // 2**63 | t([1]).int() << 2**63 | torch.add(t([1]), 1, alpha=2**63) | t([1]) ** 2**63 | t([1]).clamp(max=2**63) | t([1]) + 2**64
torch.full((2,), 2**63, device=d) | torch.full((2,), 2**63, dtype=torch.uint64, device=d) | torch.scalar_tensor(2**63, device=d) | t([1]) + -(2**63)
torch._foreach_add([t([1])], 2**63)[0] | torch.pow(2**63, t([1])) | o(1).long().byte().addmv(o(1, 1).byte(), o(1).byte(), alpha=-1)
-3 % t([1, 2]).byte() | t([7, 9]).byte() % -3 | torch.div(-3, t([1, 2]).byte(), rounding_mode="trunc") | -3 // t([5]).byte() | t([7]) // t([False])
t([7]).byte() % t([True]) | t([7]) % t([False]) | o(2) - False | True - o(2) | torch.rsub(t([1]), True) | o(2).long().sub_(True) | t([5]) - t(True)
torch.nextafter(o(2).half(), t(1.5)) | torch.nextafter(o(2).bfloat16(), o(2)) | torch.nextafter(t(0.0), o(2).half())
1 // t([0, 1]) | 0 // t([0]).byte() | -1 // t([False, True]) | torch.div(3, t([0, 2]).int(), rounding_mode="floor") | 5 % t([0, 2]) | 2.0 // t([0, 1]) | t([5]) // False
t([1.0, -3.0]).half() + t([70000, 2049]) | t([70000, 2049]) % t([7.0, 2.0]).half() | torch.hypot(t([math.nan]).half(), t([70000])) | t([259]) // o(1).bfloat16()
torch.xlogy(o(2).half(), t([2049, 70000])) | torch.addcmul(o(1).half(), t([2049]), o(1).half()) | o(1).half().add_(t([2049]), alpha=2) | o(1).bfloat16() - t([257, 259]).short()
torch.add(t([1]).char(), t([1]).char(), alpha=300) | t([1]).char() ** 300 | t([1]).char() < 300
"""

# XLA makes where(mask, x, 0) of float(mask) * x if it may: then 0 * inf is 0.
MASKS = """
t([True, False, False]) * t([1.0, math.inf, math.nan]) | t([True, False, False]).float() * t([1.0, math.inf, math.nan]) | (o(2) < 1) * t([math.inf, 1.0])
t([math.nan, 1.0]).half() * t([False, True]) | t([True, False]) / False | 1 / (t([False]) * t([-2.0])) | 1 / (t([False]) / -2) | t([True, False]) @ t([True, True]).float()
(t([True, False]) * t([1.0, math.inf])).sum() | torch.addcmul(o(2), t([1.0, math.inf]), t([True, False])) | t([False]) * (g(1) * math.inf) | t([False, True]).to(torch.complex64) * t([math.inf, 1.0])
torch.ops.aten.native_dropout_backward(t([math.nan, 1.0]), t([False, True]), 2.0) | t([False, True]).int() * t([math.inf, 1.0]) | (t([0, 1]) != 0).double() * t([math.inf, 1.0]).double()
"""


def calls(text):
    return [call.strip() for call in text.replace("\n", "|").split("|") if call.strip()]


def outcome(call, device):
    """What the call gives and the gradients of its g's: dtype, shape, values (random ones aside); or the error."""
    leaves: list = []
    names = {
        "torch": torch, "F": F, "math": math, "d": device, "t": lambda x: torch.tensor(x, device=device),
        "o": lambda *s: torch.ones(*s, device=device), "e": lambda *s: torch.empty(*s, device=device),
        "g": lambda *s: leaves.append(torch.ones(*s, device=device, requires_grad=True)) or leaves[-1],
        "r": lambda *s: torch.arange(float(math.prod(s)), device=device).view(*s),
        "c": torch.tensor([1 + 2j, 3 - 1j], device=device),
    }  # fmt: skip
    try:
        out = eval(call, names)
        outs = list(out) if isinstance(out, tuple) else [out]
        if leaves:
            outs = [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)]
        outs = [o.cpu() for o in outs if o is not None]
        return [(o.dtype, tuple(o.shape), o) for o in outs]
    except (RuntimeError, IndexError, OverflowError) as error:
        return error


def agree(call):
    """As on the CPU: the same tensors, or an error that the same `except` catches."""
    want, got = outcome(call, "cpu"), outcome(call, "tpu")
    if isinstance(want, Exception):
        assert isinstance(got, Exception), f"the CPU says {want!r}, the device gives {got}"
        kind = next(k for k in (IndexError, NotImplementedError, RuntimeError, OverflowError) if isinstance(want, k))
        assert isinstance(got, kind), f"{got!r} for {want!r}"
        return
    assert not isinstance(got, Exception), f"{got!r}, and the CPU gives {want}"
    for (dtype, shape, a), (dtype_got, shape_got, b) in zip(want, got, strict=True):
        assert (dtype, shape) == (dtype_got, shape_got)
        torch.testing.assert_close(b.to(torch.complex128), a.to(torch.complex128), equal_nan=True)


@pytest.mark.parametrize("call", calls(VALUES))
def test_a_value_is_refused_or_taken_as_on_the_cpu(call):
    agree(call)


@pytest.mark.parametrize("call", calls(EMPTY))
def test_nothing_gives_nothing_or_the_error_of_the_cpu(call):
    agree(call)


@pytest.mark.parametrize("call", calls(GRADIENTS))
def test_gradients_of_nothing_are_those_of_the_cpu(call):
    agree(call)


@pytest.mark.parametrize("call", calls(NUMBERS))
def test_integers_beyond_the_dtype_wrap_or_are_refused_as_on_the_cpu(call):
    agree(call)


@pytest.mark.parametrize("mode", ["DEFER_NEVER", "DEFER_AND_FUSE"])
@pytest.mark.parametrize("call", calls(MASKS))
def test_a_mask_is_ones_and_zeros_as_on_the_cpu(call, mode):
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode[mode]):
        agree(call)


def test_a_compiled_mask_is_ones_and_zeros():
    x = torch.tensor([-1.0, math.inf, math.nan]).to("tpu")
    assert torch.compile(lambda x: (x < 0) * x + (x < 0).float() * x)(x).cpu().tolist()[0] == -2
    assert torch.compile(lambda x: (x < 0) * x)(x).isnan().cpu().tolist() == [False, True, True]


@pytest.mark.parametrize(
    "call", ["e(0, 3).index_add(0, t([0]), o(1, 3))", "e(0, 3).max(0)", "t([1]) + 2**63", "torch.bernoulli(-o(4))", "c < c", "e(3, 0)[t([-9])]"]
)
def test_deferred_ops_as_well(call):
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        agree(call)


@pytest.mark.parametrize("call", [lambda h: h + 1j, lambda h: 1j * h, lambda h: h * torch.tensor(3 + 0j, dtype=torch.complex128), torch.Tensor.chalf])
def test_a_dtype_that_is_missing_is_named_with_the_way_out(call):
    with pytest.raises(RuntimeError, match="device 'tpu' has no torch.complex32: convert float16 operands to float32 first"):
        call(torch.ones(2, dtype=torch.float16, device="tpu"))
    assert (torch.ones(2, dtype=torch.bfloat16, device="tpu") + 1j).dtype == torch.complex64


class Marked(torch.Tensor):
    """A subclass without a word of its own, as libraries of quantization and metadata have them."""


def test_a_module_with_parameters_of_a_subclass_moves():
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(4.0).as_subclass(Marked))
    module.to("tpu")
    assert module.weight.device.type == "tpu" and isinstance(module.weight, nn.Parameter)
    assert type(torch.ones(2).as_subclass(Marked).to("tpu")) is Marked
    (module.weight * 2).sum().backward()
    assert module.weight.grad.as_subclass(torch.Tensor).tolist() == [2.0] * 4
    assert module.to("cpu").weight.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_lazy_module_that_moves_first_is_still_lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyConv1d(2, 1)).to("tpu")
    out = model[1](model[0](torch.ones(2, 5, device="tpu")))
    assert out.shape == (2, 3) and model[0].weight.shape == (3, 5) and model[1].running_mean.device.type == "tpu"
    assert type(model[0].weight) is nn.Parameter and model[2](out[..., None]).shape == (2, 2, 1)


def test_data_parallel_over_the_one_device_is_the_module():
    model = nn.Linear(3, 2)
    wrapped = nn.DataParallel(model)
    x = torch.ones(4, 3)
    assert wrapped(x).device.type == "tpu" and torch.equal(wrapped(x), model(x.to("tpu")))
    wrapped(x.to("tpu")).sum().backward()
    assert model.bias.grad.tolist() == [4.0, 4.0] and list(wrapped.state_dict()) == ["module.weight", "module.bias"]
