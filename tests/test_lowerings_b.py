"""Convolutions, pooling, norms, losses, distances, recurrent cells and attention against PyTorch's CPU kernels."""

import copy
import itertools
import math

import pytest
import torch
from lowering_calls import Calls, randint, randn
from lowering_check import check, lowered

import tpu_lab  # noqa: F401  registers the device
from tpu_lab.backend import state, trial

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CLOSE, ROUGH = {"rtol": 1e-4, "atol": 1e-4}, {"rtol": 3e-2, "atol": 6e-2}  # sums in another order; 8 bits of mantissa


# --- convolutions --------------------------------------------------------------------------------------------------

CONVOLUTIONS = [  # input, weight, stride, padding, dilation, transposed, output_padding, groups
    ((2, 4, 8, 8), (6, 4, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ((2, 4, 9, 7), (6, 2, 3, 2), [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
    ((2, 4, 2, 2), (6, 4, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ((2, 4, 1, 1), (6, 2, 3, 3), [2, 2], [1, 1], [1, 1], False, [0, 0], 2),
    ((2, 4, 2, 1), (6, 4, 3, 3), [1, 1], [2, 2], [2, 2], False, [0, 0], 1),
    ((2, 8, 5, 5), (4, 8, 1, 1), [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
    ((2, 4, 5, 5), (4, 3, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ((2, 4, 5, 5), (4, 3, 3, 2), [2, 3], [1, 0], [1, 2], True, [1, 0], 2),
    ((2, 4, 9), (6, 4, 3), [2], [1], [1], False, [0], 1),
    ((2, 4, 9), (4, 1, 3), [1], [1], [1], False, [0], 4),
    ((1, 2, 4, 5, 6), (3, 2, 2, 3, 1), [1, 2, 1], [0, 1, 0], [1, 1, 1], False, [0, 0, 0], 1),
    ((1, 2, 4, 3, 3), (2, 2, 2, 2, 2), [2, 1, 2], [0, 1, 0], [1, 1, 1], True, [1, 0, 0], 1),
]


def convolutions(dtype, cases):
    calls = Calls()
    for shape, kernel, *settings in cases:
        x, w = randn(*shape, dtype=dtype), randn(*kernel, dtype=dtype, seed=1)
        bias = randn(kernel[1] * settings[-1] if settings[3] else kernel[0], dtype=dtype)
        y = calls(aten.convolution.default, x, w, bias, *settings)
        grad = randn(*y.shape, dtype=dtype, seed=2)
        calls(aten.convolution_backward.default, grad, x, w, [bias.numel()], *settings, [True, True, True])
    calls(aten.convolution_backward.default, grad, x, w, [0], *settings, [False, True, False])
    return calls


def test_convolutions_and_their_gradients():
    convolutions(F32, CONVOLUTIONS).check(**CLOSE)
    convolutions(BF16, CONVOLUTIONS[::3]).check(**ROUGH)


# --- pooling -------------------------------------------------------------------------------------------------------


def test_max_pooling_with_ties_nan_and_only_minus_infinity():
    ties = randint(3, 2, 3, 9, 8).float()
    nans = ties.clone()
    nans[0, 0, 3:6, 3:6] = NAN
    calls = Calls()
    for x in (ties, nans, ties[0], torch.full((1, 1, 6, 6), -INF)):
        for kernel, *rest in (
            ([2, 2],),
            ([3, 3], [2, 2], [1, 1]),
            ([3, 2], [1, 2], [1, 0], [2, 1]),
            ([3, 3], [2, 2], [1, 1], [1, 1], True),
            ([2, 2], [3, 3], [0, 0], [1, 1], True),
        ):
            y, at = calls(aten.max_pool2d_with_indices.default, x, kernel, *rest)
            stride, pad, dilation, ceil = rest + [kernel, [0, 0], [1, 1], False][len(rest) :]
            grad = randn(*y.shape)
            calls(aten.max_pool2d_with_indices_backward.default, grad, x, kernel, stride, pad, dilation, ceil, at)
    wide = randint(9, 1, 2, 20, 20).float()
    wide[0, 0, 5, 5] = NAN
    y, at = calls(
        aten.max_pool2d_with_indices.default, wide, [9, 9], [3, 3], [4, 4]
    )  # more taps than slices are cut for
    settings = [9, 9], [3, 3], [4, 4], [1, 1], False
    calls(aten.max_pool2d_with_indices_backward.default, randn(*y.shape), wide, *settings, at)
    calls(aten.max_pool2d_with_indices.default, ties.long(), [2, 2])
    y, at = calls(aten.max_pool2d_with_indices.default, randn(2, 3, 8, 8), [2, 2])
    calls(aten.max_unpool2d.default, y, at, [8, 8])
    x, settings = randn(2, 3, 5, 6, 7), ([3, 2, 3], [2, 1, 2], [1, 1, 1], [1, 1, 1], True)
    y, at = calls(aten.max_pool3d_with_indices.default, x, *settings)
    calls(aten.max_pool3d_with_indices_backward.default, randn(*y.shape), x, *settings, at)
    calls.check()


def test_average_pooling():
    calls, x = Calls(), randn(2, 3, 9, 8)
    for kernel, stride, pad, ceil in (
        ([2, 2], [2, 2], [0, 0], False),
        ([3, 2], [2, 1], [1, 0], False),
        ([3, 3], [2, 2], [1, 1], True),
    ):
        for settings in ((True, None), (False, None), (True, 3)):
            y = calls(aten.avg_pool2d.default, x, kernel, stride, pad, ceil, *settings)
            calls(aten.avg_pool2d_backward.default, randn(*y.shape), x, kernel, stride, pad, ceil, *settings)
    calls(aten.avg_pool2d.default, randn(1, 1, 70, 70), [66, 66], [2, 2])
    x = randn(2, 3, 5, 6, 7)
    settings = [3, 2, 3], [2, 1, 2], [1, 1, 1], True, False, None
    y = calls(aten.avg_pool3d.default, x, *settings)
    calls(aten.avg_pool3d_backward.default, randn(*y.shape), x, *settings)
    calls.check()


def test_adaptive_pooling_into_even_and_uneven_windows():
    calls, x = Calls(), randn(2, 3, 9, 8)
    nans = x.clone()
    nans[0, 0, 4, 4] = NAN
    for size in ([1, 1], [3, 4], [4, 3], [12, 9], [9, 8]):
        y = calls(aten._adaptive_avg_pool2d.default, nans, size)
        calls(
            aten._adaptive_avg_pool2d_backward.default,
            randn(*y.shape),
            x,
        )
        y, at = calls(aten.adaptive_max_pool2d.default, nans, size)
        calls(aten.adaptive_max_pool2d_backward.default, randn(*y.shape), x, at)
    x = randn(2, 3, 5, 6, 7)
    y = calls(aten._adaptive_avg_pool3d.default, x, [2, 3, 4])
    calls(aten._adaptive_avg_pool3d_backward.default, y, x)
    y, at = calls(aten.adaptive_max_pool3d.default, x, [2, 3, 4])
    calls(aten.adaptive_max_pool3d_backward.default, y, x, at)
    calls.check()


# --- softmax, norms, losses ----------------------------------------------------------------------------------------


def test_softmax_with_infinities_nan_and_nothing():
    calls = Calls()
    odd = torch.tensor([[1.0, -INF], [-INF, -INF], [INF, 1.0], [NAN, 0.0]])
    for x in (randn(3, 4, 5), randn(3, 4, 5, dtype=BF16), odd, randn(0, 3), randn(3, 0), torch.tensor(2.0)):
        for dim in (0, -1):
            for forward, backward in (
                (aten._softmax, aten._softmax_backward_data),
                (aten._log_softmax, aten._log_softmax_backward_data),
            ):
                y = calls(forward.default, x, dim, False)
                calls(backward.default, randn(*x.shape, dtype=x.dtype), y, dim, x.dtype)
    calls.check()


def norms(dtype):
    calls = Calls()
    for x, shape in ((randn(4, 5, 6), [6]), (randn(4, 5, 6), [5, 6]), (randn(0, 6), [6])):
        x, w = x.to(dtype), randn(*shape, dtype=dtype)
        for weight, bias in ((w, w + 1), (w, None), (None, None)):
            _, mean, rstd = calls(aten.native_layer_norm.default, x, shape, weight, bias, 1e-5)
            mask = [True, weight is not None, bias is not None]
            calls(aten.native_layer_norm_backward.default, x + 1, x, shape, mean, rstd, weight, bias, mask)
    x, w, var = randn(2, 6, 3, 4, dtype=dtype), randn(6, dtype=dtype), randn(6, dtype=dtype).abs()
    for weight, bias in ((w, w + 1), (None, None)):
        mask = [True, weight is not None, bias is not None]
        for groups in (1, 3, 6):
            _, mean, rstd = calls(aten.native_group_norm.default, x, weight, bias, 2, 6, 12, groups, 1e-5)
            calls(aten.native_group_norm_backward.default, x + 1, x, mean, rstd, weight, 2, 6, 12, groups, mask)
        for data, running, train in itertools.product((x, x[:, :, 0, 0]), ((w, var), (None, None)), (True, False)):
            if not train and running[0] is None:
                continue
            _, mean, invstd = aten.native_batch_norm(data, weight, bias, *_copied(running), train, 0.1, 1e-5)
            if train:  # in evaluation the CPU saves nothing, the meta kernel says otherwise: compared below
                calls(aten.native_batch_norm.default, data, weight, bias, *running, train, 0.1, 1e-5)
            saved = (*running, mean, invstd, train, 1e-5, mask)
            calls(aten.native_batch_norm_backward.default, data + 1, data, weight, *saved)
    return calls


def _copied(values):
    return [None if v is None else v.clone() for v in values]


def test_norms_and_their_gradients():
    norms(F32).check(**CLOSE)
    norms(BF16).check(**ROUGH)


def test_batch_norm_in_evaluation_leaves_the_statistics():
    x, mean, var = randn(4, 3, 2), randn(3), randn(3).abs()
    y = aten.native_batch_norm(x, None, None, mean, var, False, 0.1, 1e-5)[0]
    got = lowered(aten.native_batch_norm.default, x, None, None, mean, var, False, 0.1, 1e-5)
    torch.testing.assert_close(got[0], y)
    torch.testing.assert_close(got[-2:], [mean, var])


def test_weight_norm_and_renorm():
    calls, v = Calls(), randn(4, 5, 3)
    for dim, g in ((0, randn(4, 1, 1)), (2, randn(1, 1, 3))):
        w, norm = calls(aten._weight_norm_interface.default, v, g, dim)
        calls(aten._weight_norm_interface_backward.default, w + 1, v, g, norm, dim)
    for p in (1, 2, 2.5, INF):
        calls(aten.renorm.default, randn(4, 5), p, 0, 1.5)
    calls.check()


def test_nll_ignores_classes_and_minus_infinity():
    calls = Calls()
    blocked = randn(5, 4)
    blocked[:, 3] = -INF
    target, image = torch.tensor([0, 1, 2, 2, 1]), randn(2, 4, 3, 3)
    for reduction, ignored, weight in itertools.product((0, 1, 2), (-100, 1), (None, torch.rand(4))):
        for forward, backward, x, t in (
            (aten.nll_loss_forward, aten.nll_loss_backward, blocked, target),
            (aten.nll_loss_forward, aten.nll_loss_backward, randn(4), torch.tensor(2)),
            (aten.nll_loss_forward, aten.nll_loss_backward, randn(0, 4), torch.zeros(0, dtype=torch.long)),
            (aten.nll_loss_forward, aten.nll_loss_backward, randn(5, 4), torch.full((5,), ignored % 4)),
            (aten.nll_loss2d_forward, aten.nll_loss2d_backward, image, randint(4, 2, 3, 3)),
        ):
            loss, total = calls(forward.default, x, t, weight, reduction, ignored)
            calls(backward.default, torch.ones_like(loss), x, t, weight, reduction, ignored, total)
    calls.check()


def test_losses_on_probabilities_distances_and_margins():
    calls = Calls()
    p, q = torch.tensor([[0.0, 1.0, 0.3], [0.9, 1.0, 0.2]]), torch.tensor([[0.4, 0.0, 0.3], [0.5, 1.0, 0.1]])
    for reduction in (0, 1, 2):
        for x, y in ((p, q), (randn(0), randn(0))):
            for name, extra in (
                ("mse_loss", ()),
                ("smooth_l1_loss", (0.5,)),
                ("smooth_l1_loss", (0.0,)),
                ("huber_loss", (0.5,)),
                ("soft_margin_loss", ()),
            ):
                loss = calls(getattr(aten, name).default, x, y, reduction, *extra)
                calls(getattr(aten, f"{name}_backward").default, torch.ones_like(loss), x, y, reduction, *extra)
        for weight in (None, q):
            loss = calls(aten.binary_cross_entropy.default, p, q, weight, reduction)
            calls(aten.binary_cross_entropy_backward.default, torch.ones_like(loss), p, q, weight, reduction)
        for x, t in ((randn(5, 4), torch.tensor([0, 1, 3, 2, 1])), (randn(4), torch.tensor([2]))):
            for settings in ((1, 0.7, None), (2, 1, torch.rand(4))):
                loss = calls(aten.multi_margin_loss.default, x, t, *settings, reduction)
                calls(aten.multi_margin_loss_backward.default, torch.ones_like(loss), x, t, *settings, reduction)
        x, t = randn(3, 4), torch.tensor([[0, 2, -1, 1], [-1, 0, 0, 0], [3, 2, 1, 0]])
        loss, is_target = calls(aten.multilabel_margin_loss_forward.default, x, t, reduction)
        calls(aten.multilabel_margin_loss_backward.default, torch.ones_like(loss), x, t, reduction, is_target)
    calls.check()


def test_ctc_with_repeats_empty_targets_and_impossible_ones():
    log_probs, targets = randn(12, 4, 6).log_softmax(2), randint(5, 4, 4) + 1
    targets[0] = 2
    lengths, sizes = [12, 10, 5, 3], [4, 3, 0, 4]
    flat = torch.cat([row[:n] for row, n in zip(targets, sizes)])
    for t, zero in itertools.product((targets, flat), (False, True)):
        args = log_probs, t, lengths, sizes
        nll, alpha = aten._ctc_loss(*args, 0, zero)
        got = lowered(aten._ctc_loss.default, *args, 0, zero)
        torch.testing.assert_close(got[0], nll)
        for row in range(4):  # the rest of alpha is not defined
            used = row, slice(lengths[row]), slice(2 * sizes[row] + 1)
            torch.testing.assert_close(got[1][used], alpha[used])
        check(aten._ctc_loss_backward.default, torch.ones(4), *args, nll, alpha, 0, zero, **CLOSE)


def test_distances():
    calls, a, b = Calls(), randn(2, 4, 3), randn(2, 5, 3, seed=1)
    b[0, 0] = a[0, 0]
    for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, INF):
        d = calls(aten._cdist_forward.default, a, b, p, 2)
        calls(aten._cdist_backward.default, d + 1, a, b, p, d)
        d = calls(aten._pdist_forward.default, b[0], p)
        calls(aten._pdist_backward.default, d + 1, b[0], p, d)
    calls.check(**CLOSE)


# --- recurrent cells: no CPU kernel, so against the formulas of torch.nn.LSTMCell and GRUCell -------------------------


def test_lstm_cell_and_its_gradient():
    gates, hidden, cx, bias = (randn(*s).requires_grad_() for s in ((3, 16), (3, 16), (3, 4), (16,)))
    i, f, g, o = (gates + hidden + bias).chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    hy = o.sigmoid() * cy.tanh()
    got = lowered(aten._thnn_fused_lstm_cell.default, gates, hidden, cx, bias, torch.zeros(16))
    torch.testing.assert_close(got[:2], [hy.detach(), cy.detach()])
    grads = randn(3, 4, seed=1), randn(3, 4, seed=2)
    want = torch.autograd.grad([hy, cy], [gates, cx, bias], grads)
    backward = aten._thnn_fused_lstm_cell_backward_impl.default
    torch.testing.assert_close(lowered(backward, *grads, cx, got[1], got[2], True), list(want))


def test_gru_cell_and_its_gradient():
    gates, hidden, hx, b1, b2 = (randn(*s).requires_grad_() for s in ((3, 12), (3, 12), (3, 4), (12,), (12,)))
    (ir, iz, ic), (hr, hz, hc) = (gates + b1).chunk(3, 1), (hidden + b2).chunk(3, 1)
    z, n = (iz + hz).sigmoid(), (ic + (ir + hr).sigmoid() * hc).tanh()
    hy = n + z * (hx - n)
    got = lowered(aten._thnn_fused_gru_cell.default, gates, hidden, hx, b1, b2)
    torch.testing.assert_close(got[0], hy.detach())
    grad = randn(3, 4, seed=1)
    want = torch.autograd.grad(hy, [gates, hidden, hx, b1, b2], grad)
    torch.testing.assert_close(lowered(aten._thnn_fused_gru_cell_backward.default, grad, got[1], True), list(want))


# --- attention -----------------------------------------------------------------------------------------------------


def test_softmax_of_rows_without_scores():
    calls, x = Calls(), randn(3, 4)
    x[1], x[0, 0] = -INF, -INF
    calls(aten._safe_softmax.default, x, -1)
    calls(aten._safe_softmax.default, x, 0, F64)
    calls.check()


def test_attention_layers_at_inference():
    calls, x, w = Calls(), randn(2, 5, 8), (randn(24, 8), randn(24), randn(8, 8), randn(8))
    padding = torch.tensor([[False, False, False, True, True], [False] * 5])
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    rest = (randn(8) + 1, randn(8), randn(8) + 1, randn(8), randn(16, 8), randn(16), randn(8, 16), randn(8))
    for masks in ((), (causal, 0), (padding, 1)):
        for need, average in ((True, True), (True, False), (False, True)):
            mask, kind = masks or (None, None)
            calls(aten._native_multi_head_attention.default, x, x, x, 8, 2, *w, mask, need, average, kind)
        for gelu, first in itertools.product((True, False), (True, False)):
            calls(aten._transformer_encoder_layer_fwd.default, x, 8, 2, *w, gelu, first, 1e-5, *rest, *masks)
    calls(aten._native_multi_head_attention.default, x, x + 1, x + 2, 8, 2, *w)
    calls(aten._transform_bias_rescale_qkv.default, randn(2, 5, 24), randn(24), 2)
    y = calls(aten._masked_softmax.default, randn(2, 2, 5, 5), causal, 3, 0)
    calls(aten._masked_softmax.default, randn(2, 2, 5, 5), padding, 3, 1)
    calls(aten._masked_softmax_backward.default, randn(2, 2, 5, 5), y, causal.expand(2, 2, 5, 5).contiguous(), 3)
    calls.check(**CLOSE)


@pytest.mark.parametrize("name", [n for n in dir(torch.special) if "_polynomial_" in n])
def test_polynomials_take_a_number_for_the_point_or_the_degree(name):
    f, x, n = getattr(torch.special, name), torch.linspace(-1.5, 1.5, 7), torch.tensor([0, 1, 2, 3, 4, 5, 6])
    for args in ((x, 5), (0.5, n), (2, n), (x, 2.0), (x.reshape(7, 1), n)):
        got = f(*(a.to("tpu") if isinstance(a, torch.Tensor) else a for a in args)).cpu()
        torch.testing.assert_close(got, f(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["strict", "fused"])
def test_attention_whose_weights_nobody_needs_gives_none_and_shifts_nothing(mode):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    moved, want, got = copy.deepcopy(layer).to("tpu"), randn(2, 3, 8), randn(2, 3, 8).to("tpu")
    with torch.no_grad(), torch.tpu.set_eager_mode(state.EagerMode(state.NAMES[mode])):
        for _ in range(3):
            want, got = layer(want, want, want, need_weights=False)[0] + 1, moved(got, got, got, need_weights=False)
            assert got[1] is None
            got = got[0] + 1
        torch.testing.assert_close(got.cpu(), want)


def test_a_lowering_that_gives_too_few_arrays_is_refused_where_it_is_called():
    x = torch.ones(2, device="tpu")
    with trial.lowered(aten.aminmax, lambda x, dim=None, keepdim=False: x.min()), pytest.raises(RuntimeError, match="gives 1 arrays .* gives 2"):
        torch.aminmax(x)
    assert [t.item() for t in torch.aminmax(x)] == [1, 1]
