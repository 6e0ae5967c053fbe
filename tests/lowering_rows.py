"""Calls of ops by family, as rows: to test an op, add a line to its family, and it is checked against the CPU.

A family is a function that yields (overload, args, kwargs). `test_lowerings_rows.py` compares each row's lowering, and then
the call on the device with its in-place and `out=` forms. TOLERANCE: families whose values come by another way.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from lowering_calls import randn
from lowering_check import call

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
T = torch.tensor
FAMILIES: dict = {}
TOLERANCE: dict[str, dict] = {}
PRODUCTS = {"rtol": 1e-4, "atol": 1e-4}  # sums in another order


def family(*function, **tolerance):
    """Register a family under its function's name: `@family`, or `@family(rtol=..., atol=...)` with the reason beside."""

    def register(function):
        FAMILIES[function.__name__], TOLERANCE[function.__name__] = function, tolerance
        return function

    return register(*function) if function else register


@family(rtol=1e-3, atol=1e-4)  # degrees of hundreds add up rounding; inside (-1, 1) both take cosines of arccosines
def polynomials():
    x = torch.cat([T([0.0, -0.0, 1, -1, 0.5, 2, -2, INF, -INF, NAN]), torch.linspace(-1.5, 1.5, 13)])
    n = T([-2.0, 0, 1, 2, 3, 5, 6, 7, 9, 20, 130])
    x, n = (v.contiguous() for v in torch.broadcast_tensors(x[:, None], n[None]))
    chebyshev = [f"{s}chebyshev_polynomial_{k}" for s in ("", "shifted_") for k in "tuvw"]
    for name in [*chebyshev, "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"]:
        op = getattr(aten, f"special_{name}").default
        yield call(op, x, n)
        yield call(op, x.double(), n.double())
        yield call(op, T(2), T(4))


@family(rtol=1e-4, atol=2e-5)  # PyTorch's tables of J, Y and Ai are off by 4e-7 near 5.5, and by 2e-6 for Ai near -2
def bessel():
    x = torch.cat([T([0.0, -0.0, 1, -1, 2, -2, 8, INF, -INF, NAN, 1e-3, 1e-20, 2.09]), torch.linspace(-12, 12, 40)])
    names = "bessel_j0 bessel_j1 bessel_y0 bessel_y1 airy_ai modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
    for name in (names + "modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1").split():
        op = getattr(aten, f"special_{name}").default
        for values in (x, x.double(), T(3)):
            yield call(op, values)


@family
def fake_quantization():
    x = torch.cat([randn(20) * 3, T([NAN, INF, -INF, 100.0, -100, 0.05, 0.15])])
    for dtype, (scale, zero, low, high) in itertools.product(
        (F32, F64, BF16), ((0.1, 0, -128, 127), (0.05, 3, 0, 15))
    ):
        yield call(aten.fake_quantize_per_tensor_affine_cachemask.default, x.to(dtype), scale, zero, low, high)
        for on in (0, 1):
            settings = (T([scale]), T([zero], dtype=torch.int32), T([on]), low, high)
            yield call(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default, x.to(dtype), *settings)
    y, g = randn(3, 4, 5) * 3, randn(3, 4, 5, seed=3)
    for axis, (low, high) in itertools.product((0, 1, 2), ((-128, 127), (0, 15))):
        n = y.shape[axis]
        scale, zero = torch.linspace(0.05, 1, n), torch.arange(n, dtype=torch.int32)
        for dtype in (F32, BF16):
            settings = (scale, zero, axis, low, high)
            yield call(aten.fake_quantize_per_channel_affine_cachemask.default, y.to(dtype), *settings)
        learned = (y, scale, zero + 0.4, axis, low, high, 0.7)
        yield call(aten._fake_quantize_learnable_per_channel_affine.default, *learned)
        yield call(aten._fake_quantize_learnable_per_channel_affine_backward.default, g, *learned)
    for zero in (0.0, 2.5, 3.4, -2.5, -2.6):
        learned = (y, T([0.1]), T([zero]), -8, 7, 0.7)
        yield call(aten._fake_quantize_learnable_per_tensor_affine.default, *learned)
        yield call(aten._fake_quantize_learnable_per_tensor_affine_backward.default, g, *learned)
    yield call(aten.dequantize.self, y)
    for row, symmetric, (low, high), (on, fake), first in itertools.product(
        (False, True), (False, True), ((-128, 127), (0, 15)), ((1, 1), (1, 0), (0, 1)), (INF, -1.0)
    ):
        size = 1.0 if first == INF or row else 1e-6  # the second is under the smallest scale
        n = 3 if row else 1
        state = (torch.full((n,), first), torch.full((n,), -first), torch.ones(n), torch.zeros(n, dtype=torch.int32))
        settings = (0.01, low, high, 0, row, symmetric)
        yield call(aten._fused_moving_avg_obs_fq_helper.default, y * size, T([on]), T([fake]), *state, *settings)


def _named_convolutions(bias):
    x, w, bias = randn(2, 3, 7, 6), randn(4, 3, 3, 2), randn(4) if bias else None
    for stride, padding in (([1, 1], [0, 0]), ([2, 1], [1, 1])):
        plain = (x, w, [3, 2], bias, stride, padding)
        yield call(aten._slow_conv2d_forward.default, *plain)
        yield call(aten.slow_conv_dilated2d.default, *plain, [2, 1])
        for transposed in (x, x[0]):
            settings = ([3, 2], bias, [2, 2], padding, [1, 0], [2, 1])
            yield call(aten.slow_conv_transpose2d.default, transposed, randn(3, 4, 3, 2), *settings)
        grad = aten._slow_conv2d_forward.default(*plain)
        for mask in ([True] * 3, [True, False, True]):
            yield call(aten._slow_conv2d_backward.output_mask, grad, x, w, [3, 2], stride, padding, mask)
        outs = {"grad_input": x.clone(), "grad_weight": w.clone(), "grad_bias": torch.zeros(4)}
        yield call(aten._slow_conv2d_backward.grad_input, grad, x, w, [3, 2], stride, padding, **outs)
    x, w, kernel, rest = randn(2, 3, 5, 5, 4), randn(4, 3, 2, 3, 2), [2, 3, 2], ([1, 2, 1], [0, 1, 1])
    yield call(aten.slow_conv3d_forward.default, x, w, kernel, bias, *rest)
    yield call(aten.slow_conv_dilated3d.default, x, w, kernel, bias, *rest, [2, 1, 1])
    yield call(aten.slow_conv_transpose3d.default, x, randn(3, 4, 2, 3, 2), kernel, bias, *rest, [0, 1, 0], [1, 1, 1])


@family(**PRODUCTS)
def named_convolutions():
    for bias in (False, True):
        yield from _named_convolutions(bias)


@family
def fractional_pooling():
    x = randn(2, 3, 9, 8)
    x[0, 0, 3, 3], x[0, 1] = NAN, 1.0
    for dtype, size in itertools.product((F32, F64), ([4, 3], [1, 1], [7, 6])):
        settings = ([2, 3], size, (randn(2, 3, 2).abs() % 1).to(dtype))
        yield call(aten.fractional_max_pool2d.default, x.to(dtype), *settings)
        y, at = aten.fractional_max_pool2d.default(x.to(dtype), *settings)
        yield call(aten.fractional_max_pool2d_backward.default, y * 2, x.to(dtype), *settings[:2], at)
    x, settings = randn(2, 3, 6, 7, 8), ([2, 3, 2], [3, 4, 5], randn(2, 3, 3).abs() % 1)
    yield call(aten.fractional_max_pool3d.default, x, *settings)
    y, at = aten.fractional_max_pool3d.default(x, *settings)
    yield call(aten.fractional_max_pool3d_backward.default, y * 2, x, *settings[:2], at)
    yield call(aten.adaptive_avg_pool3d_backward.grad_input, y[:, :, :2], randn(2, 3, 4, 5, 6), grad_input=torch.zeros(0))


@family(rtol=1e-4, atol=1e-5)
def lanczos():
    for dtype, size in itertools.product((F32, F64), ([3, 5], [12, 9], [7, 6])):
        yield call(aten._upsample_lanczos2d_aa.default, randn(2, 3, 7, 6, dtype=dtype), size, False, None, None)
        settings = (size, [2, 3, 7, 6], False, None, None)
        yield call(aten._upsample_lanczos2d_aa_backward.default, randn(2, 3, *size, dtype=dtype), *settings)


@family(rtol=1e-4, atol=1e-5)
def resizing_by_scales():
    """Bytes, whose rounding is exact; sizes that a scale factor keeps (5 * 1.1) or doubles (5 * 2.1): some kernels copy then."""
    linear, cubic = ("upsample_bilinear2d", "_upsample_bilinear2d_aa"), ("upsample_bicubic2d", "_upsample_bicubic2d_aa")
    x, image = randn(1, 2, 5, 5), (randn(1, 3, 5, 5) * 1e4).to(torch.int64).to(torch.uint8)
    for scales in ((1.1, 1.1), (1.1, 1.7), (2.1, 0.6)):
        size = [math.floor(5 * s) for s in scales]
        for name in (*linear, *cubic, "_upsample_lanczos2d_aa"):
            yield call(getattr(aten, name).default, image, size, False, *scales)
            yield call(getattr(aten, name).default, x, size, False, *scales)
            yield call(getattr(aten, f"{name}_backward").default, randn(1, 2, *size), size, [1, 2, 5, 5], False, *scales)
        for v in (x, image):
            yield call(aten.upsample_nearest2d.default, v, size, *scales)
        yield call(aten.upsample_nearest2d_backward.default, randn(1, 2, *size), size, [1, 2, 5, 5], *scales)
        yield call(aten.upsample_nearest1d_backward.default, randn(1, 2, size[0]), size[:1], [1, 2, 5], scales[0])


@family(rtol=2e-2, atol=1e-3)  # half types
def segments():
    x = randn(10, 3)
    x[2, 1], x[6, 0], x[4], x[5, 0] = NAN, NAN, 0, 0
    for kind, first in itertools.product(("sum", "mean", "max", "min", "prod"), (None, 2.0, 1)):
        for where in ({"lengths": T([3, 0, 2, 5])}, {"offsets": T([0, 3, 3, 5, 10])}):
            for data in (x, x.double()) if kind == "prod" else (x, x.bfloat16()):
                y = aten.segment_reduce.default(data, kind, **where, initial=first)
                yield call(aten.segment_reduce.default, data, kind, **where, initial=first)
                settings = {**where, "axis": 0, "initial": first}
                yield call(aten._segment_reduce_backward.default, torch.ones_like(y), y, data, kind, **settings)
        data, where = randn(2, 6, 3), {"lengths": T([[1, 0, 5], [2, 2, 2]]), "axis": 1}
        yield call(aten.segment_reduce.default, data, kind, **where, initial=first)
        y = aten.segment_reduce.default(data, kind, **where, initial=first)
        yield call(aten._segment_reduce_backward.default, y + 1, y, data, kind, **where, initial=first)
    offsets = [T([0, 3, 3, 7])]
    for longest in (2, 5):
        yield call(aten._jagged_to_padded_dense_forward.default, randn(7, 4), offsets, [longest], -1.5)
    yield call(aten._padded_dense_to_jagged_forward.default, randn(3, 5, 4), offsets, 7)


@family
def histograms():
    for dtype, weighted, density in itertools.product((F32, F64), (False, True), (False, True)):
        x = torch.cat([randn(30), T([0.0, 1.0, 1.0, -1, 0.25])]).to(dtype)
        options = {"weight": (randn(35).abs()).to(dtype) if weighted else None, "density": density}
        yield call(aten.histogram.bin_ct, x, 7, **options)
        yield call(aten.histogram.bin_ct, torch.cat([x[:-2], T([NAN, INF])]).to(dtype), 8, range=[-1.0, 1.0], **options)
        yield call(aten.histogram.bins_tensor, x, T([-1.0, -0.5, 0.25, 1.0]).to(dtype), **options)
        points = randn(7, 5, 2, dtype=dtype)
        if weighted:
            options["weight"] = options["weight"].reshape(7, 5)
        for ends in ({}, {"range": [-1.0, 1.0, 0.0, 2.0]}):
            yield call(aten._histogramdd_bin_edges.default, points, [3, 4], **ends, **options)
            yield call(aten._histogramdd_from_bin_cts.default, points, [3, 4], **ends, **options)
        edges = [T([-1.0, 0, 2]).to(dtype), T([0.0, 0.5, 1.0]).to(dtype)]
        yield call(aten._histogramdd_from_bin_tensors.default, points, edges, **options)
    for x in (torch.zeros(0), torch.ones(3), T(2.0)):
        yield call(aten.histogram.bin_ct, x, 4)
    for ends in ((10,), (5, -1, 1), (5, -1.0, 0.5)):
        yield call(aten.histc.default, randn(40), *ends)


@family(rtol=2e-2, atol=1e-2)  # half types and float8
def products():
    for dtype in (F32, F64):
        yield call(aten._compute_linear_combination.default, randn(3, 4, 5, dtype=dtype), randn(2, 3, dtype=dtype))
    whole = torch.arange(-64, 64).reshape(4, 32).to(torch.int8)
    for dtype in (F32, BF16):
        yield call(aten._weight_int8pack_mm.default, randn(4, 32, dtype=dtype), whole, randn(4, dtype=dtype).abs() / 100)
    a, b = randn(32, 64).to(torch.float8_e4m3fn), randn(48, 64).to(torch.float8_e4m3fn).t()
    one, each = (T(0.5), T(0.3)), (randn(32, 1).abs(), randn(1, 48).abs())
    for dtype, (recipe, scales) in itertools.product((F32, BF16), ((0, one), (1, each))):
        yield call(aten._scaled_mm.default, a, b, *scales, out_dtype=dtype)
        lists = [v for s in scales for v in ([s], [recipe], [0])]
        yield call(aten._scaled_mm_v2.default, a, b, *lists, None, dtype)
    yield call(aten._scaled_mm.default, a, b, *one, bias=randn(48, dtype=BF16), out_dtype=BF16)


@family(rtol=2e-2, atol=1e-2)  # half types
def products_in_groups():
    ends = T([3, 3, 24], dtype=torch.int32)  # an empty group; what lies behind the last end is anything on the CPU
    for dtype in (F32, BF16, F16):
        rows, columns, three = randn(24, 16, dtype=dtype), randn(16, 24, dtype=dtype), randn(3, 16, 8, dtype=dtype)
        yield call(aten._grouped_mm.default, rows, three, ends)
        yield call(aten._grouped_mm.default, columns, rows, ends)
        yield call(aten._grouped_mm.default, three.mT, columns.mT.contiguous().mT, ends)
        yield call(aten._grouped_mm.default, three.mT.contiguous(), three)


@family
def sparse_indices():
    for narrow in (False, True):
        yield call(aten._convert_indices_from_coo_to_csr.default, T([0, 0, 2, 2, 5]), 7, out_int32=narrow)
        for swap in (False, True):
            options = {"out_int32": narrow, "transpose": swap}
            yield call(aten._convert_indices_from_csr_to_coo.default, T([0, 2, 2, 4]), T([1, 2, 0, 3]), **options)
            both = (T([[0, 2, 2, 4], [0, 1, 2, 4]]), T([[1, 2, 0, 3], [0, 1, 1, 2]]))
            yield call(aten._convert_indices_from_csr_to_coo.default, *both, **options)
    for x in (T([[0, 1, 2], [3, 0, NAN]]), T([True, False, True]), T(3.0), torch.zeros(0, 3), torch.zeros(2, 0)):
        for size in (0, 2, 6):
            yield call(aten.nonzero_static.default, x, size=size, fill_value=7)
    for x in (randn(3, 4), randn(3, 4, dtype=F64), randn(3, 4, dtype=BF16), T([[-1, 2], [3, 4]]), T([[True, False]]), T(2.5)):
        for dim in ([], [0], [-1], [0, 1]) if x.dim() else ([],):
            yield call(aten.hash_tensor.default, x, dim, keepdim=True)


@family(rtol=1e-3, atol=1e-5)  # PyTorch's own values are approximations to about 1e-3
def gradients_of_samples():
    random = np.random.default_rng(0)
    alpha, beta = torch.tensor(10 ** random.uniform(-1.5, 2, (2, 60)))
    x = torch.tensor(random.beta(alpha.numpy(), beta.numpy())).clamp(1e-6, 1 - 1e-6)
    yield call(aten._dirichlet_grad.default, x, alpha, alpha + beta)
    samples = torch.tensor(random.gamma(alpha.numpy())).clamp(1e-20)
    keep = (alpha > 0.3) & (samples > 1e-4)
    yield call(aten._standard_gamma_grad.default, alpha[keep], samples[keep])


@family(rtol=1e-4, atol=1e-5)
def activations_and_statistics():
    for dtype, dim in itertools.product((F32, F64), (1, -1)):
        x, dx, grad, dgrad = (randn(3, 4, 6, dtype=dtype, seed=i) for i in range(4))
        y = torch.nn.functional.glu(x, dim)
        grad, dgrad = (v.narrow(dim, 0, y.shape[dim]).contiguous() for v in (grad, dgrad))
        yield call(aten.glu_jvp.default, y, x, dx, dim)
        yield call(aten.glu_backward_jvp.default, aten.glu_backward.default(grad, x, dim), grad, x, dgrad, dx, dim)
        yield call(aten._aminmax.default, x)
        yield call(aten._aminmax.dim, x, dim, True)
    for dtype in (F32, F64):
        x, running = randn(5, 3, 4, dtype=dtype), (torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype))
        affine = (randn(3, dtype=dtype), randn(3, dtype=dtype, seed=1))
        yield call(aten._batch_norm_with_update.default, x, *affine, *running, 0.1, 1e-5)
        yield call(aten.batch_norm_update_stats.default, x, *running, 0.1)
        outs = {"out": x.clone(), "save_mean": running[0].clone(), "save_invstd": running[0].clone()}
        yield call(aten._native_batch_norm_legit.out, x, *affine, *running, True, 0.1, 1e-5, **outs)
        outs["reserve"] = torch.zeros(0, dtype=torch.uint8)
        yield call(aten._batch_norm_with_update.out, x, *affine, *running, 0.1, 1e-5, **outs)


@family(rtol=2e-2, atol=1e-2)  # bfloat16 rounds at 0.4 %
def half_statistics():
    x, zeros, ones = randn(5, 3, 4, dtype=BF16), torch.zeros(3), torch.ones(3)  # parameters in float32, as autocast has them
    yield call(aten._batch_norm_with_update.default, x, ones, zeros, zeros, ones, 0.1, 1e-5)


@family(rtol=1e-3, atol=1e-4)
def factorisations():
    for dtype in (F64, torch.complex64):
        wide = torch.complex128 if dtype.is_complex else F64

        def matrix(*shape, seed=0, wide=wide, dtype=dtype):
            return randn(*shape, dtype=wide, seed=seed).to(dtype)

        for shape in ((5, 3), (3, 5), (4, 4), (2, 5, 3), (0, 3), (3, 0)):
            yield call(aten.geqrf.default, matrix(*shape))
        for shape, left, transpose in itertools.product(((5, 3), (2, 5, 3)), (True, False), (True, False)):
            reflectors, tau = aten.geqrf.default(matrix(*shape))
            other = matrix(*shape[:-2], *((5, 2) if left else (2, 5)), seed=3)
            yield call(aten.ormqr.default, reflectors, tau, other, left, transpose)
        for shape, b in (((5, 3), (5, 2)), ((5, 3), (5,)), ((3, 5), (3, 2)), ((2, 5, 3), (2, 5, 2)), ((2, 5, 3), (2, 5))):
            for driver in (None, "gels", "gelsd"):
                yield call(aten.linalg_lstsq.default, matrix(*shape), matrix(*b, seed=5), None, driver=driver)


@family(rtol=1e-3, atol=1e-4)  # pivots and info are equal; the float32 values went through as many steps as there are columns
def indefinite():
    """Pivots alone and in pairs: a zero diagonal wants pairs, zeros have no pivot."""
    for dtype, hermitian in ((F64, False), (torch.complex64, False), (torch.complex64, True)):
        whole = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
        paired = whole - torch.diag_embed(torch.diagonal(whole, dim1=1, dim2=2))
        for a in (whole, paired, 0 * whole, whole[:, :0, :0], whole[:0]):
            yield call(aten.linalg_ldl_factor_ex.default, a, hermitian=hermitian)
        ld, pivots, _ = torch.linalg.ldl_factor_ex(paired, hermitian=hermitian)
        yield call(aten.linalg_ldl_solve.default, ld, pivots, whole[:, :, :3].clone(), hermitian=hermitian)
        yield call(aten.linalg_ldl_solve.default, ld[0], pivots[0], whole[:, :, :3].clone(), hermitian=hermitian)


@family(rtol=1e-3, atol=1e-4)
def attention():
    for dtype in (F32, F64):
        q, k, v = (randn(2, 3, 5, 8, dtype=dtype, seed=i) for i in range(3))
        for causal, mask in ((False, None), (True, None), (False, randn(1, 1, 5, 5, dtype=dtype))):
            out, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, attn_mask=mask)
            saved = (q + 1, q, k, v, out, sums, 0.0, causal)
            yield call(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, *saved, attn_mask=mask)


@family
def probes():
    for op in (aten._test_optional_intlist.default, aten._test_optional_filled_intlist.default):
        yield call(op, T([1, 2], dtype=torch.int32), [3, 4])
        yield call(op, T([1, 2], dtype=torch.int32), None)
    yield call(aten._test_optional_floatlist.default, T([1.0, 2.0]), [3.0, 4.0])
    yield call(aten._test_functorch_fallback.default, T([1.0, 2.0]), T([5.0, 6.0]))
    yield call(aten._foobar.default, T([1.0, 2.0]))
    yield call(aten.range.out, 0.0, 5.0, 1.5, out=torch.zeros(4))
