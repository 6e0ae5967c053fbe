"""Convolutions, pooling, norms, losses, embeddings, indexing, sorting, movement and resizing against PyTorch's CPU kernels."""

import itertools
import math

import torch
from lowering_check import check, check_all, lowered

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CLOSE, ROUGH = {"rtol": 1e-4, "atol": 1e-4}, {"rtol": 3e-2, "atol": 6e-2}  # sums in another order; 8 bits of mantissa
SPECIAL = torch.tensor([3.0, NAN, -0.0, 0.0, 1.0, -INF, INF, 1.0, NAN, -2.0])


def randn(*shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=F64).to(dtype)


def randint(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Calls(list):
    """Calls to compare, each answered by PyTorch at once so that a backward gets what its forward saved."""

    def __call__(self, overload, *args, **kwargs):
        self.append((overload, args, kwargs))
        return overload(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)

    def check(self, size=60, **tolerance):
        assert self
        for i in range(0, len(self), size):
            check_all(self[i : i + size], **tolerance)


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


def convolutions(dtype):
    calls = Calls()
    for shape, kernel, *settings in CONVOLUTIONS:
        x, w = randn(*shape, dtype=dtype), randn(*kernel, dtype=dtype, seed=1)
        bias = randn(kernel[1] * settings[-1] if settings[3] else kernel[0], dtype=dtype)
        y = calls(aten.convolution.default, x, w, bias, *settings)
        grad = randn(*y.shape, dtype=dtype, seed=2)
        for mask in ([True, True, True], [False, True, False]):
            calls(aten.convolution_backward.default, grad, x, w, [bias.numel()], *settings, mask)
    return calls


def test_convolutions_and_their_gradients():
    convolutions(F32).check(**CLOSE)
    convolutions(BF16).check(**ROUGH)


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


# --- embeddings ----------------------------------------------------------------------------------------------------


def test_embedding_and_its_gradient():
    calls, w, i = Calls(), randn(10, 4), randint(10, 3, 5)
    for indices in (i, i.int(), torch.zeros(0, 3, dtype=torch.long)):
        y = calls(aten.embedding.default, w, indices)
        for padding, by_frequency in itertools.product((-1, 2), (False, True)):
            calls(aten.embedding_dense_backward.default, y, indices, 10, padding, by_frequency)
    for p in (1.0, 2.0, INF):
        calls(aten.embedding_renorm_.default, w * 3, i, 1.5, p)
    calls.check()


def test_bags_give_all_four_outputs_and_gradients():
    calls, w, i = Calls(), randn(6, 3, dtype=F64), torch.tensor([1, 2, 2, 5, 0, 1])
    for mode, padding in itertools.product((0, 1, 2), (-1, 2)):
        for offsets, last in (([0, 2, 2, 5], False), ([0, 2, 2, 6], True), ([0, 0, 6], False)):
            offsets = torch.tensor(offsets)
            for each in (None, torch.rand(6, dtype=F64)) if mode == 0 else (None,):
                settings = (False, mode, False, each, last, padding)
                calls(aten._embedding_bag_forward_only.default, w, i, offsets, *settings)
                y, bag, size, largest = calls(aten._embedding_bag.default, w, i, offsets, *settings)
                saved = (i, offsets, bag, size, largest, 6, False, mode, False, each, padding)
                calls(aten._embedding_bag_backward.default, y + 1, *saved)
                if bag.numel():
                    dense = (i, bag, size, largest, 6, False, mode, each, padding)
                    calls(aten._embedding_bag_dense_backward.default, y + 1, *dense)
                if each is not None:
                    backward = aten._embedding_bag_per_sample_weights_backward.default
                    calls(backward, y + 1, w, i, offsets, bag, mode, padding)
        calls(aten._embedding_bag.default, w, i[:0], torch.tensor([0, 0]), False, mode)
    calls.check()


def test_bag_gradient_scaled_by_frequency():
    # By the documentation; PyTorch's CPU kernel takes the count of another row when an earlier one repeats.
    i, bag = torch.tensor([1, 2, 2, 5]), torch.tensor([0, 0, 1, 1])
    got = lowered(
        aten._embedding_bag_dense_backward.default, torch.ones(2, 1), i, bag, bag[:0], bag[:0], 6, True, 0, None
    )
    assert got[0].flatten().tolist() == [0, 1, 1, 0, 0, 1]


# --- indexing ------------------------------------------------------------------------------------------------------


def test_index_and_index_put_place_dimensions_as_pytorch_does():
    calls, x = Calls(), randn(4, 5, 6)
    a, b = torch.tensor([0, -1, 2]), torch.tensor([[1], [3]])
    empty = torch.zeros(0, dtype=torch.long)
    for indices in ([a], [None, a], [a, a], [a, None, a], [None, None, b], [b, a], [None, b, a], [b[0, 0]], [empty]):
        y = calls(aten.index.Tensor, x, indices)
        calls(aten.index_put.default, x, indices, torch.tensor(1.5))
        for overload in (aten.index_put.default, aten._unsafe_index_put.default):
            calls(overload, x, indices, y + 1, True)
    calls.check()


def test_index_families():
    calls, two, three = Calls(), torch.tensor([0, 4]), torch.tensor([0, 4, 4])
    for dtype in (F32, torch.int64, torch.bool):
        x, mask = (randn(4, 5, 6) * 3).to(dtype), randn(5, 6) > 0
        calls(aten.index_select.default, x, 1, three)
        calls(aten.index_copy.default, x, 1, two, x[:, 1:3])
        calls(aten.index_fill.int_Scalar, x, 1, two, 1)
        calls(aten.index_fill.int_Tensor, x, 0, torch.tensor(2), torch.tensor(1).to(dtype))
        calls(aten.take.default, x, torch.tensor([[0, -1], [5, 7]]))
        calls(aten.put.default, x, torch.tensor([0, -1]), x[0, 0, :2])
        calls(aten.masked_fill.Scalar, x, mask, 1)
        calls(aten.masked_fill.Tensor, x, mask, torch.tensor(1).to(dtype))
        calls(aten.masked_scatter.default, x, mask, x.flip(0))
        if dtype != torch.bool:
            calls(aten.index_add.default, x, 1, three, x[:, :3], alpha=2)
            calls(aten.put.default, x, torch.tensor([0, 0]), x[0, 0, :2], True)
            for reduce, include in itertools.product(("prod", "mean", "amax", "amin"), (True, False)):
                calls(aten.index_reduce.default, x, 1, three, x[:, :3] + 1, reduce, include_self=include)
    calls(aten.index_select.default, torch.tensor(3.0), 0, torch.tensor([0]))
    calls(aten.index_add.default, x.float(), 1, three, x[:, :3].float(), alpha=2.5)
    calls(aten.masked_fill.Scalar, randn(5, 1), randn(1, 6) > 0, -INF)
    calls(aten.masked_scatter_backward.default, randn(4, 5), randn(4, 5) > 0, [20])
    calls.check()


def test_gather_and_scatter():
    calls = Calls()
    for dtype, dim in itertools.product((F32, torch.int64), (0, -1)):
        x, src = (randn(4, 5) * 3).to(dtype), (randn(4, 5, seed=1) * 3).to(dtype)
        for i in (
            randint(4, 2, 3),
            randint(4, 4, 1),
            randint(4, 1, 5),
            torch.zeros(0, 3).long(),
            torch.zeros(4, 5).long(),
        ):
            calls(aten.gather.default, x, dim, i)
            calls(aten.scatter.value, x, dim, i, 1)
            calls(aten.scatter_add.default, x, dim, i, src)
            calls(aten.scatter.value_reduce, x, dim, i, 2, reduce="multiply")
            for reduce, include in itertools.product(("sum", "prod", "mean", "amax", "amin"), (True, False)):
                calls(aten.scatter_reduce.two, x, dim, i, src, reduce, include_self=include)
        calls(aten.scatter.src, x, dim, torch.tensor([[2, 0, 1], [0, 1, 2]]) if dim else randint(4, 1, 5), src)
    nans = randn(3, 4)
    nans[0, 0] = NAN
    calls(aten.scatter_reduce.two, randn(3, 4), 0, torch.zeros(3, 4).long(), nans, "amax")
    calls(aten.scatter.value, randn(3, 4), 1, torch.tensor([[0], [1], [2]]), 2.5)
    calls(aten.scatter.src, torch.tensor(1.0), 0, torch.tensor([0]), torch.tensor([3.0]))
    calls(aten.gather.default, torch.tensor([1.0, 2.0]), 0, torch.tensor(1))
    calls.check(80)


def test_blocks_written_into_copies():
    calls, x = Calls(), randn(4, 5, 6)
    for a, b, step in ((1, 4, 1), (0, 5, 2), (-3, 5, 1), (0, -1, 1), (3, 2, 1), (0, 100, 1)):
        y = calls(aten.slice_copy.Tensor, x, 1, a, b, step)
        calls(aten.slice_scatter.default, x, y + 1, 1, a, b, step)
        calls(aten.slice_backward.default, y, [4, 5, 6], 1, a, b, step)
    calls(aten.select_scatter.default, x, randn(4, 6), 1, -2)
    calls(aten.select_backward.default, randn(4, 6), [4, 5, 6], 1, -2)
    for settings in ((0, 0, 1), (1, 0, 2), (-2, 2, 1), (9, 0, 1)):
        y = calls(aten.diagonal_copy.default, x, *settings)
        calls(aten.diagonal_scatter.default, x, y + 1, *settings)
        calls(aten.diagonal_backward.default, y, [4, 5, 6], *settings)
    for settings in ((0, -2, -1), (1, 0, 2), (-2, 2, 0)):
        calls(aten.diag_embed.default, randn(3, 4), *settings)
    calls(aten.as_strided_scatter.default, x, randn(3, 2), [3, 2], [7, 2], 1)
    calls.check()


# --- sorting -------------------------------------------------------------------------------------------------------


def test_sort_is_stable_with_nan_largest():
    calls = Calls()
    ints = randint(10, 3, 50) - 5
    kinds = (ints, ints.to(torch.int8), ints > 0, ints.double(), (ints + 5).to(torch.uint8))
    for x in (*(SPECIAL.to(d) for d in (F32, F64, BF16, torch.half)), *kinds, torch.tensor(2.0), randn(0, 3)):
        for dim, descending in itertools.product((0, -1), (False, True)):
            calls(aten.sort.stable, x, stable=True, dim=dim, descending=descending)
    calls.check()


def test_order_statistics():
    """Values as PyTorch's; indices, which are free among ties, must point at them."""
    for x in (
        SPECIAL,
        SPECIAL.to(BF16),
        randn(3, 50),
        randn(3, 50, dtype=F64),
        randint(10, 3, 50) - 5,
        torch.tensor(2.0),
    ):
        n = x.shape[-1] if x.dim() else 1
        for k in {1, min(3, n), n}:
            _points(x, aten.topk.default, x, k, -1, True)
            _points(x, aten.topk.default, x, k, -1, False)
            _points(x, aten.kthvalue.default, x, k, -1, True)
        for overload in (aten.median.dim, aten.nanmedian.dim, aten.mode.default):
            whole = overload is not aten.mode.default or not x.is_floating_point()
            _points(x, overload, x if whole else x.nan_to_num(), -1, True)
    calls = Calls()
    for x in (SPECIAL, randn(7), randint(9, 4, 2), randn(0)):
        calls(aten.median.default, x)
        calls(aten.nanmedian.default, x)
    calls.check()


def _points(x, overload, *args):
    truth = overload(*args)
    values, at = lowered(overload, *args, outputs=[(t.shape, t.dtype) for t in truth])
    torch.testing.assert_close(values, truth[0], equal_nan=True)
    torch.testing.assert_close(args[0].gather(-1, at) if x.dim() else x, values, equal_nan=True)


def test_bins():
    calls, edges = Calls(), torch.tensor([1.0, 2.0, 2.0, 3.0])
    x = torch.tensor([[0.0, 1.0, 2.0], [2.5, 3.0, NAN]])
    for right in (False, True):
        calls(aten.searchsorted.Tensor, edges, x, right=right)
        calls(aten.searchsorted.Scalar, edges, 2, right=right)
        calls(aten.searchsorted.Tensor, edges.flip(0), x, sorter=torch.tensor([3, 2, 1, 0]), right=right)
        calls(aten.bucketize.Tensor, x, edges, right=right, out_int32=True)
        calls(aten.bucketize.Scalar, 2.0, edges, right=right)
    calls(aten.searchsorted.Tensor, edges.expand(2, 4).contiguous(), x, side="right")
    calls(aten.histc.default, randn(3, 50), 5, -1, 1)
    calls(aten.histc.default, randn(3, 50), 5)
    calls.check()


# --- movement, padding, resizing -----------------------------------------------------------------------------------


def test_movement():
    calls, x = Calls(), randn(2, 8, 4, 6)
    calls(aten.cat.default, [randn(2, 3), randn(2, 1, dtype=F64), randint(3, 2, 2)], 1)
    calls(aten.cat.default, [randn(0), randn(2, 3)], -1)
    calls(aten.cat.default, [randn(2, dtype=BF16), randn(3).half()])
    calls(aten.stack.default, [randn(2, 3), randn(2, 3)], -1)
    calls(aten.block_diag.default, [randn(2, 3), randn(2), torch.tensor(1.0)])
    calls(aten.flip.default, x, [0, -1])
    calls(aten.rot90.default, x, 3, [1, 2])
    calls(aten.roll.default, x, [1, -2], [0, 2])
    calls(aten.roll.default, x, [5])
    for repeats in ([3, 1, 2], [0, 2], [2, 2]):
        calls(aten.repeat.default, randn(2, 3), repeats)
    calls(aten.trace.default, randn(3, 5))
    calls(aten.channel_shuffle.default, x, 4)
    calls(aten.pixel_shuffle.default, x, 2)
    calls(aten.pixel_unshuffle.default, x[0], 2)
    for settings in (([3, 2], [1, 1], [0, 0], [1, 1]), ([3, 3], [1, 2], [1, 2], [2, 1])):
        y = calls(aten.im2col.default, x, *settings)
        calls(aten.col2im.default, y, [4, 6], *settings)
        calls(aten.col2im.default, y[0], [4, 6], *settings)
    for size, step in ((3, 1), (2, 2), (2, 3), (4, 5)):
        y = calls(aten.unfold_copy.default, x, 1, size, step)
        calls(aten.unfold_backward.default, y, [2, 8, 4, 6], 1, size, step)
    calls(aten.split_with_sizes_copy.default, x, [3, 5], 1)
    calls(aten.unsafe_split.Tensor, x, 3, 1)
    calls(aten.unbind_copy.int, x, -2)
    for dtype in (F64, torch.uint8, torch.int32):
        calls(aten.view_copy.dtype, x, dtype)
    calls(aten._unsafe_view.default, x, [16, -1])
    calls(aten.expand_copy.default, randn(1, 3), [2, 4, -1])
    calls(aten.permute_copy.default, x, [3, 1, -4, 2])
    calls(aten.narrow_copy.default, x, 1, -3, 2)
    calls.check()


def test_padding():
    calls, x = Calls(), randn(2, 8, 4, 6)
    calls(aten.constant_pad_nd.default, x, [1, 2, -1, 3], 2.5)
    calls(aten.constant_pad_nd.default, randint(4, 3, 4), [1, -2], 7)
    for n, kind, batch in itertools.product((1, 2, 3), ("reflection", "replication"), ((2,), ())):
        x, padding = randn(*batch, 3, *(4, 5, 6)[:n]), [2, 1, 0, 3, 1, 1][: 2 * n]
        y = calls(getattr(aten, f"{kind}_pad{n}d").default, x, padding)
        calls(getattr(aten, f"{kind}_pad{n}d_backward").default, y, x, padding)
    calls.check()


def test_resizing():
    for n, shape in ((1, (2, 3, 7)), (2, (1, 2, 6, 5)), (3, (1, 2, 4, 5, 3))):
        calls = Calls()
        for scale in (2.0, 0.6, 1.7):
            size = [math.floor(i * scale) for i in shape[2:]]
            for scales in ((), (scale,) * n):
                for name in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
                    y = calls(getattr(aten, name).default, randn(*shape), size, *scales)
                    calls(getattr(aten, f"{name}_backward").default, y, size, list(shape), *scales)
                names = {
                    1: ["upsample_linear1d"],
                    2: ["upsample_bilinear2d", "upsample_bicubic2d"],
                    3: ["upsample_trilinear3d"],
                }
                names[2] += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]
                for name, corners in itertools.product(names[n], (True, False)):
                    y = calls(getattr(aten, name).default, randn(*shape), size, corners, *scales)
                    calls(getattr(aten, f"{name}_backward").default, y, size, list(shape), corners, *scales)
        calls.check(**CLOSE)


def test_grid_sampling():
    calls = Calls()
    for image, grid, name in (
        (randn(2, 3, 5, 6), randn(2, 4, 3, 2), "grid_sampler_2d"),
        (randn(2, 2, 3, 4, 5), randn(2, 2, 3, 2, 3), "grid_sampler_3d"),
    ):
        for settings in itertools.product((0, 1, 2) if image.dim() == 4 else (0, 1), (0, 1, 2), (True, False)):
            y = calls(getattr(aten, name).default, image, grid * 0.8, *settings)
            calls(getattr(aten, f"{name}_backward").default, y, image, grid * 0.8, *settings, [True, True])
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
