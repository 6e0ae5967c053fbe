"""Elementwise ops, reductions, scans, products and factories against PyTorch's CPU kernels."""

import math

import pytest
import torch
from lowering_check import answered, call, check, check_batches

from tpu_lab.backend import registry
from tpu_lab.backend.ops import compare, unary
from tpu_lab.backend.state import mode_scope

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
SINGLE_AND_HALF = (torch.float32, torch.bfloat16)
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, -3.0, 6.0, 20.5, 1e-3, INF, -INF, NAN])
LEFT, RIGHT = (v.contiguous() for v in torch.broadcast_tensors(SPECIAL[:, None], SPECIAL[None]))
INTS, INTS2 = torch.tensor([0, 1, 2, 3, -1, -2, 7, -8]), torch.tensor([1, -1, 3, -2, 5, 2, -3, 4])


def pair(name, dtype, seed=0):
    """A gradient and an input for a backward op, both with special values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([SPECIAL[:11], torch.linspace(-8, 8, 33)]).to(dtype)
    return torch.randn(x.shape, generator=generator).to(dtype), x


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
def test_unary(dtype):
    values = SPECIAL.to(dtype) if dtype.is_floating_point else torch.tensor([0, 1, 2, 3]).to(dtype)
    calls = [call(getattr(aten, n).default, values) for n in (*unary.FLOAT, *unary.SAME)]
    calls += [call(getattr(aten, n).default, x) for n in ("exp", "floor", "neg") for x in (values[2], values[:0])]
    check_batches(answered(calls))


def test_unary_complex():
    x = torch.complex(torch.linspace(-2, 2, 6), torch.linspace(1, -3, 6))
    names = ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "tanh", "abs", "neg", "sgn", "angle", "conj_physical")
    check_batches(call(getattr(aten, n).default, x) for n in names)


BINARY = (
    "add sub mul div rsub remainder fmod floor_divide pow atan2 hypot copysign nextafter heaviside logaddexp logaddexp2 "
    "xlogy maximum minimum fmax fmin logical_and logical_or logical_xor special_xlog1py"
).split()


def overloads(name):
    """The functional overloads of two operands that have a lowering, each with the kinds of its operands."""
    for overload in (getattr(getattr(aten, name), n) for n in getattr(aten, name).overloads()):
        if registry.find(overload) and not registry.writes(overload) and "mode" not in overload._overloadname:
            yield overload, tuple(str(a.type) for a in overload._schema.arguments[:2])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary(dtype):
    a, b = LEFT.to(dtype), RIGHT.to(dtype)
    calls = []
    for name in [*BINARY, *compare.COMPARISONS]:
        for overload, kinds in overloads(name):
            if kinds == ("Tensor", "Tensor"):
                calls.append(call(overload, a, b))
            elif kinds[0] == "Tensor":
                calls += [call(overload, a, v) for v in (2, 0.1)]
            else:
                calls.append(call(overload, 0.1, b[0]))
    calls += [call(aten.pow.Tensor_Scalar, a[0], v) for v in (-2, 0.5, -0.5, 3.0, 1.5, INF)]
    check_batches(answered(calls))


def test_binary_of_mixed_dtypes():
    """Integers, truth values, and 0-dim tensors, which count only if they are of a higher category."""
    bfloat = LEFT[:2].bfloat16()
    pairs = [
        (INTS, INTS2),
        (INTS.int(), INTS2),
        (INTS > 0, INTS2 > 0),
        (INTS, torch.tensor(2.5)),
        (INTS.float(), INTS2),
    ]
    pairs.append((bfloat, torch.tensor(0.3, dtype=torch.float64)))
    calls = []
    for name in [n for n in (*BINARY, *compare.COMPARISONS) if n not in ("heaviside", "nextafter")]:
        for overload, kinds in overloads(name):
            if kinds == ("Tensor", "Tensor"):
                calls += [call(overload, *p) for p in pairs]
            elif kinds[0] == "Tensor":
                calls += [call(overload, INTS, v) for v in (2, 2.5)]
    check_batches(answered(calls))


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
def test_division_with_rounding(mode):
    calls = [call(aten.div.Tensor_mode, LEFT.to(d), RIGHT.to(d), rounding_mode=mode) for d in FLOATS]
    calls.append(call(aten.div.Tensor_mode, INTS, INTS2, rounding_mode=mode))
    calls.append(call(aten.div.Scalar_mode, INTS, 3, rounding_mode=mode))
    calls.append(call(aten.div.Scalar_mode, LEFT, 0.3, rounding_mode=mode))
    check_batches(calls)


def test_integers_to_negative_powers():
    base = torch.tensor([1, -1, -1, 2, 3, -2])
    check(aten.pow.Tensor_Tensor, base, torch.tensor([-3, -2, -3, -1, 4, 3]))


def test_integers_to_large_powers_wrap():
    base = torch.tensor([0, 1, -1, 2, 3, -5, 2**62])
    powers = [0, 1, 63, 64, 65, 127, 128, 1000, 2**40 + 3, 2**63 - 1]
    calls = [call(aten.pow.Tensor_Scalar, base, p) for p in powers] + [call(aten.pow.Scalar, 3, torch.tensor(powers))]
    calls += [call(aten.pow.Tensor_Tensor, base.to(d), torch.full((7,), 100, dtype=d)) for d in (torch.int8, torch.uint8, torch.int32)]
    check_batches(calls)


def test_bits_and_shifts():
    counts = torch.tensor([0, 1, 3, 31, 32, 63, 64, -1])
    calls = [call(getattr(aten, n).Tensor, x, y) for n in ("bitwise_and", "bitwise_or", "bitwise_xor")
             for x, y in ((INTS, INTS2), (INTS > 0, INTS2 > 0))]  # fmt: skip
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
            calls.append(call(getattr(aten, name).Tensor, INTS.to(dtype), counts.to(dtype)))
        calls.append(call(getattr(aten, name).Tensor_Scalar, INTS, 2))
    calls += [
        call(getattr(aten, n).Scalar, INTS, 2) for n in ("__lshift__", "__rshift__", "__ilshift__", "__irshift__")
    ]
    calls += [call(aten.gcd.default, INTS, INTS2), call(aten.lcm.default, INTS, INTS2)]
    check_batches(calls)


@pytest.mark.parametrize("dtype", SINGLE_AND_HALF, ids=str)
def test_clamp_where_lerp(dtype):
    g, x = pair("clamp", dtype)
    x[0] = NAN
    calls = []
    for low, high in ((None, 0.5), (-0.3, None), (-0.3, 0.5), (2.0, 1.0), (NAN, 1.0), (0, 1)):
        calls.append(call(aten.clamp.default, x, low, high))
        calls.append(call(aten.clamp.Tensor, x, *(None if v is None else torch.full_like(x, v) for v in (low, high))))
    calls += [
        call(aten.clamp_min.default, x, 0.2),
        call(aten.clamp_max.Tensor, x, g),
        call(aten.clamp_min.Tensor, x, g),
    ]
    calls += [call(aten.where.self, x > 0, x, o) for o in (g, torch.tensor(2.0, dtype=torch.float64), torch.tensor(2))]
    calls += [call(aten.lerp.Scalar, x, g, w) for w in (0.3, 0.8, 1)] + [
        call(aten.lerp.Tensor, x, g, torch.rand_like(x))
    ]
    calls += [call(aten.addcmul.default, x, g, g, value=1.003), call(aten.addcdiv.default, x, g, g + 1, value=-0.1)]
    calls += [
        call(getattr(aten, n).default, x) for n in ("isnan", "isinf", "isposinf", "isneginf", "signbit", "nan_to_num")
    ]
    calls += [call(aten.nan_to_num.default, x, 1.0, 2.0, 3.0), call(aten.logical_not.default, x)]
    calls += [call(aten.fill.Scalar, x, 3.7), call(aten.fill.Tensor, x, torch.tensor(2)), call(aten.zero.default, x)]
    calls += [call(aten.copy.default, x, torch.tensor([1.5])), call(aten.clone.default, x)]
    calls += [call(aten.clamp.default, INTS, 0.5, None), call(aten.clamp.default, INTS, -1, 2)]
    check_batches(calls)


def test_a_number_added_to_a_half_tensor_is_rounded_first():
    x = torch.full((4,), 0.1, dtype=torch.bfloat16)
    assert float(aten.sub.Scalar(x, 0.1)[0]) == 0
    check(aten.sub.Scalar, x, 0.1)
    check(aten.mul.Scalar, x, 1.003)


@pytest.mark.parametrize("dtype", SINGLE_AND_HALF, ids=str)
def test_activations(dtype):
    g, x = pair("activations", dtype)
    names = (
        "relu silu mish gelu hardswish hardsigmoid hardtanh leaky_relu elu celu softplus hardshrink softshrink logit"
    )
    calls = [call(getattr(aten, n).default, v) for n in names.split() for v in (x, x[3], x[:0])]
    calls += [
        call(aten.log_sigmoid_forward.default, x),
        call(aten.threshold.default, x, 0.1, 2.0),
        call(aten.hardtanh.default, x, -0.3, 0.4),
        call(aten.leaky_relu.default, x, 0.2),
        call(aten.elu.default, x, 1.5, 0.9, 0.7),
        call(aten.softplus.default, x, 0.5, 3.0),
        call(aten.gelu.default, x, approximate="tanh"),
        call(aten.logit.default, x, 0.1),
        call(aten.glu.default, x.reshape(4, 11)[:, :10].contiguous()),
        call(aten.glu_backward.default, g[:20].reshape(4, 5), x.reshape(4, 11)[:, :10].contiguous(), 1),
        call(aten._prelu_kernel.default, x, g),
        call(aten._prelu_kernel_backward.default, g, x, g),
        call(aten.threshold_backward.default, g, x, 0),
        call(aten.threshold_backward.default, g, x, 0.5),
        call(aten.hardtanh_backward.default, g, x, -1.0, 2.0),
        call(aten.leaky_relu_backward.default, g, x, 0.1, False),
        call(aten.elu_backward.default, g, 1.5, 0.9, 0.7, False, x),
        call(aten.elu_backward.default, g, 1.0, 1, 1, True, x),
        call(aten.sigmoid_backward.default, g, x),
        call(aten.tanh_backward.default, g, x),
        call(aten.gelu_backward.default, g, x, approximate="tanh"),
        call(aten.softplus_backward.default, g, x, 0.5, 3.0),
        call(aten.log_sigmoid_backward.default, g, x, torch.exp(-x.abs())),
        call(aten.hardshrink_backward.default, g, x, 0.5),
        call(aten.softshrink_backward.default, g, x, 0.5),
        call(aten.logit_backward.default, g, x.abs()),
        call(aten.native_dropout_backward.default, g, x > 0, 2.0),
    ]
    names = "silu mish gelu hardswish hardsigmoid".split()
    check_batches([*calls, *(call(getattr(aten, f"{n}_backward").default, g, x) for n in names)])


def test_conversions_truncate_and_wrap():
    x = torch.tensor([0.0, -0.7, 1.9, -1.9, 100.5, -3.0, 255.0, 300.7])
    kinds = (*FLOATS, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    calls = [call(aten._to_copy.default, x.to(a), dtype=b) for a in FLOATS for b in (*kinds, torch.complex64)]
    calls.append(call(aten._to_copy.default, INTS * 2**33, dtype=torch.int32))
    calls += [call(aten.copy.default, INTS, x), call(aten.fill.Scalar, INTS, 3.7), call(aten.polar.default, x, x)]
    calls += [
        call(aten.complex.default, x, x), call(aten.complex.default, x[:4], x.reshape(2, 4)),
        call(aten.polygamma.default, 1, x),
        call(aten.round.decimals, x, decimals=1),
    ]
    check_batches(calls)


REDUCED = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(3))
REDUCED[0, 1, 2] = NAN


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", SINGLE_AND_HALF, ids=str)
def test_reductions(dtype):
    calls = []
    for x in (REDUCED.to(dtype), REDUCED[1, 1, 1].to(dtype)):
        for dim, keep in ((None, True), ([0], False), ([0, -1], True)) if x.ndim else ((None, False), ([0], True)):
            calls += [call(aten.sum.dim_IntList, x, dim, keep), call(aten.mean.dim, x, dim, keep)]
            calls += [call(aten.amax.default, x, dim or [], keep), call(aten.logsumexp.default, x, dim or [0], keep)]
            calls += [call(aten.all.dims, x, dim, keep), call(aten.any.dims, x, dim, keep)]
            calls.append(call(aten.var_mean.correction, x, dim, correction=0, keepdim=keep))
            calls.append(call(aten.std.correction, x, dim, keepdim=keep))
        for order in (2, 1, 0, INF, -INF, 3, 0.5):
            calls.append(call(aten.linalg_vector_norm.default, x, order, [0]))
        calls += [call(aten.max.dim, x, 0, True), call(aten.min.dim, x, -1), call(aten.aminmax.default, x, dim=0)]
        calls += [call(aten.argmax.default, x, None, True), call(aten.argmin.default, x, 0), call(aten.all.dim, x, 0)]
        calls += [
            call(aten.prod.dim_int, x, 0),
            call(aten.norm.ScalarOpt_dim, x, 3.0, [0]),
            call(aten.norm.Scalar, x, 2),
        ]
        names = "sum mean prod all any max min count_nonzero".split()
        calls += [call(getattr(aten, n).default, x) for n in names]
        calls += [
            call(getattr(aten, n).default, x, 0) for n in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
        ]
    empty = torch.zeros(0, 3, dtype=dtype)
    calls += [call(aten.sum.default, empty), call(aten.mean.dim, empty, [0]), call(aten.prod.default, empty)]
    calls += [call(aten.var.correction, empty, [0]), call(aten.cumsum.default, empty, 0)]
    check_batches(calls)


@pytest.mark.parametrize("mode", ["strict", "fused", "compiled"])
def test_what_lies_close_together_far_from_zero_keeps_its_digits(mode):
    """Spread 1 around 100,000: squares of the numbers themselves would leave nothing. Measured against float64.

    Variances are as exact as sums are; what is normalised is as exact as a mean in float32 can be.
    """
    x = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0)) + 1e5
    flat = torch.nn.functional
    calls = {
        "var": (lambda x: x.var((0, 2, 3)), 2e-5),
        "std": (lambda x: x.std((1, 2, 3)), 2e-5),
        "var_mean": (lambda x: torch.var_mean(x, (2, 3))[0], 2e-5),
        "batch": (lambda x: flat.batch_norm(x, None, None, training=True), 0.1),
        "group": (lambda x: flat.group_norm(x, 3), 0.1),
        "layer": (lambda x: flat.layer_norm(x, x.shape[1:]), 0.1),
        "instance": (flat.instance_norm, 0.1),
    }

    def every(x):
        return [function(x) for function, _ in calls.values()]

    with mode_scope("strict" if mode == "strict" else "fused"):
        got = (torch.compile(every) if mode == "compiled" else every)(x.to("tpu"))
        off = [(a.cpu().double() - b).abs().max().item() for a, b in zip(got, every(x.double()), strict=True)]
    assert all(error < allowed for error, (_, allowed) in zip(off, calls.values(), strict=True)), dict(zip(calls, off))


def test_reductions_of_integers_and_truth():
    calls = []
    for x in (
        torch.arange(-5, 7).reshape(3, 4),
        torch.arange(12).reshape(3, 4) % 3 == 0,
        torch.arange(12, dtype=torch.uint8),
    ):
        calls += [call(getattr(aten, n).default, x) for n in "sum prod all any amax amin max min count_nonzero".split()]
        calls += [call(getattr(aten, n).default, x, 0) for n in ("cumsum", "cumprod", "cummax", "cummin")]
        calls += [call(aten.sum.dim_IntList, x, [0]), call(aten.all.dims, x, []), call(aten.any.dims, x, [])]
        calls += [call(aten.max.dim, x, 0), call(aten.sum.default, x, dtype=torch.float32)]
    check_batches(calls)


def test_running_extrema_take_the_last_of_equals():
    x = torch.tensor([1.0, 1, 2, 2, NAN, 0, NAN, 3])
    check(aten.cummax.default, x, 0)
    check(aten.cummin.default, -x, 0)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.complex64], ids=str)
def test_products(dtype):
    generator = torch.Generator().manual_seed(5)

    is_int = not (dtype.is_floating_point or dtype.is_complex)

    def some(*shape):
        whole = torch.randint(-9, 9, shape, generator=generator).to(dtype)
        return whole if is_int else whole / 4

    a, b, batch_a, batch_b, v = some(4, 5), some(5, 3), some(2, 4, 5), some(2, 5, 3), some(5)
    calls = [call(aten.mm.default, a, b), call(aten.bmm.default, batch_a, batch_b), call(aten.mv.default, a, v)]
    calls += [call(aten.dot.default, v, v), call(aten.vdot.default, v, v), call(aten.mm.default, a[:, :0], b[:0])]
    scales = [{}, {"beta": 2, "alpha": 3}] + ([{"beta": 0.5, "alpha": 0.25}] if dtype.is_floating_point else [])
    for scale in scales:
        calls += [call(aten.addmm.default, some(3), a, b, **scale), call(aten.addmv.default, some(4), a, v, **scale)]
        calls.append(call(aten.baddbmm.default, some(2, 4, 3), batch_a, batch_b, **scale))
        calls.append(call(aten.addbmm.default, some(4, 3), batch_a, batch_b, **scale))
        calls.append(call(aten.addr.default, some(4, 5), some(4), v, **scale))
    if not is_int:
        calls.append(call(aten.addmm.default, some(4, 3) * NAN, a, b, beta=0))
    check_batches(calls, **({"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}))


def test_int8_products_are_exact():
    generator = torch.Generator().manual_seed(6)
    a = torch.randint(-128, 128, (32, 16), dtype=torch.int8, generator=generator)
    check(aten._int_mm.default, a, a.t()[:, :8].contiguous())


@pytest.mark.parametrize("dtype", [None, *FLOATS, torch.int64, torch.bool], ids=str)
def test_factories(dtype):
    options, x, value = (
        {} if dtype is None else {"dtype": dtype},
        torch.randn(2, 3),
        True if dtype == torch.bool else 2.7,
    )
    calls = [
        call(aten.zeros.default, [2, 3], **options),
        call(aten.ones.default, [], **options),
        call(aten.full.default, [2], value, **options),
        call(aten.scalar_tensor.default, 2.7, **options),
        call(aten.zeros_like.default, x, **options),
        call(aten.full_like.default, x, 3, **options),
        call(aten.new_full.default, x, [2], 4.5, **options),
        call(aten.new_ones.default, x, [2], **options),
        call(aten.eye.m, 3, 5, **options),
    ]
    if dtype != torch.bool:
        calls += [call(aten.arange.default, 4.5, **options), call(aten.arange.start, 2, 7, **options)]
        calls += [call(aten.arange.start_step, 10, 0, -3, **options)]
        if dtype != torch.int64:
            calls.append(call(aten.arange.start_step, 0, 1, 0.1, **options))
        calls += [
            call(aten.linspace.default, *a, **options) for a in ((0, 1, 7), (-3.0, 10.0, 5), (1, 2, 1), (0, 1, 0))
        ]
        calls.append(call(aten.logspace.default, 0, 3, 5, **options))
    for a in ((3, 4), (4, 3, 1), (4, 3, -1), (0, 3)):
        calls += [call(aten.tril_indices.default, *a), call(aten.triu_indices.default, *a)]
    calls += [call(f.default, REDUCED, k) for f in (aten.tril, aten.triu) for k in (0, 1, -2)]
    check_batches(calls)
