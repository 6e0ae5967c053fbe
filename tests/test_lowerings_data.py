"""Embeddings, indexing, sorting, movement, padding and resizing against PyTorch's CPU kernels."""

import itertools
import math

import torch
from lowering_calls import Calls, randint, randn
from lowering_check import expected, lowered, lowered_all

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # sums in another order
SPECIAL = torch.tensor([3.0, NAN, -0.0, 0.0, 1.0, -INF, INF, 1.0, NAN, -2.0])


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


def test_masked_indices_let_anything_stand_where_the_mask_is_false():
    calls, x, far = Calls(), torch.arange(24.0).reshape(2, 3, 4), torch.tensor([[1, 99], [-77, 0]])
    mask = torch.tensor([[True, False], [False, True]])
    cases = [
        ([None, far % 3], torch.ones(1, dtype=torch.bool)),
        ([None, far], mask[None, :, :, None]),
        ([far, None, far], mask[:, :, None]),
        ([far.clamp(0, 1)], torch.tensor([True, False, True, True])),
        ([None, None, torch.tensor([3, -4])], torch.tensor([True, False])),
    ]
    for indices, mask in cases:
        calls(aten._unsafe_masked_index.default, x, mask, indices, -1)
        values = torch.ones(aten._unsafe_masked_index(x, mask, indices, 0).shape)
        calls(aten._unsafe_masked_index_put_accumulate.default, x, mask, indices, values)
        calls(aten._unsafe_masked_index_put_accumulate.default, x.long(), mask, indices, values.long())
    calls(aten._unsafe_masked_index.default, x[:0], mask, [None, None, torch.tensor([3, -4])], 1)
    calls.check()


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


def test_truths_add_up_by_or_and_multiply_by_and():
    calls, x, src, i = Calls(), randn(4, 5) > 0, randn(4, 5, seed=1) > 0, randint(4, 4, 5)
    calls(aten.put.default, x, torch.tensor([0, 1, 1]), src[0, :3], True)
    calls(aten.index_put.default, x, [torch.tensor([0, 0])], src[:2], True)
    calls(aten.scatter_add.default, x, 0, i, src)
    for word in ("add", "multiply"):
        calls(aten.scatter.reduce, x, 0, i, src, reduce=word)
        calls(aten.scatter.value_reduce, x, 0, i, word == "add", reduce=word)
    for reduce, include in itertools.product(("sum", "prod", "amax", "amin"), (True, False)):
        calls(aten.scatter_reduce.two, x, 0, i, src, reduce, include_self=include)
        if reduce != "sum" and include:  # the CPU has no more
            calls(aten.index_reduce.default, x, 0, torch.tensor([0, 0]), src[:2], reduce, include_self=include)
    calls.check()


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
    calls, dims, some = Calls(), Calls(), randint(10, 3, 50) - 5
    for x in (SPECIAL, SPECIAL.to(BF16), randn(3, 50), randn(3, 50, dtype=F64), some, torch.tensor(2.0)):
        n = x.shape[-1] if x.dim() else 1
        for k in {1, min(3, n), n}:
            dims(aten.topk.default, x, k, -1, True)
            dims(aten.topk.default, x, k, -1, False)
            dims(aten.kthvalue.default, x, k, -1, True)
        dims(aten.median.dim, x, -1, True)
        dims(aten.nanmedian.dim, x, -1, True)
        dims(aten.mode.default, x.nan_to_num() if x.is_floating_point() else x, -1, True)
    truths = [expected(*call) for call in dims]
    answers = lowered_all(dims, [[(t.shape, t.dtype) for t in truth] for truth in truths])
    for (_, (x, *_), _), (want, _), (values, at) in zip(dims, truths, answers):
        torch.testing.assert_close(values, want, equal_nan=True)
        torch.testing.assert_close(x.gather(-1, at) if x.dim() else x, values, equal_nan=True)
    for x in (SPECIAL, randn(7), randint(9, 4, 2), randn(0)):
        calls(aten.median.default, x)
        calls(aten.nanmedian.default, x)
    calls.check()


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
    calls(aten.searchsorted.Tensor, torch.tensor([[1.0, NAN], [NAN, NAN]]), torch.tensor([[0.0, NAN], [NAN, NAN]]))
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
        for settings in itertools.product((0, 1, 2) if image.dim() == 4 else (0,), (0, 1, 2), (True, False)):
            y = calls(getattr(aten, name).default, image, grid * 0.8, *settings)
            calls(getattr(aten, f"{name}_backward").default, y, image, grid * 0.8, *settings, [True, True])
    calls.check(**CLOSE)
