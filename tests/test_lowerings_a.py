"""Elementwise ops, reductions, scans, products, factories, lists, optimizers and linear algebra against PyTorch's CPU kernels."""

import math

import pytest
import torch
from lowering_check import check, check_all, lowered

from tpu_lab.backend import registry
from tpu_lab.backend.ops import compare, foreach, unary

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, -3.0, 6.0, 20.5, 1e-3, INF, -INF, NAN])
LEFT, RIGHT = (v.contiguous() for v in torch.broadcast_tensors(SPECIAL[:, None], SPECIAL[None]))
INTS, INTS2 = torch.tensor([0, 1, 2, 3, -1, -2, 7, -8]), torch.tensor([1, -1, 3, -2, 5, 2, -3, 4])
BATCH = 60  # calls compiled in one program


def call(overload, *args, **kwargs):
    return overload, args, kwargs


def answered(calls):
    """Those calls that PyTorch's CPU kernels have at all."""
    for overload, args, kwargs in calls:
        try:
            overload(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            continue
        yield overload, args, kwargs


def check_batches(calls, **tolerance):
    calls = list(calls)
    assert calls
    for i in range(0, len(calls), BATCH):
        check_all(calls[i : i + BATCH], **tolerance)


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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
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
        call(aten.complex.default, x, x),
        call(aten.polygamma.default, 1, x),
        call(aten.round.decimals, x, decimals=1),
    ]
    check_batches(calls)


REDUCED = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(3))
REDUCED[0, 1, 2] = NAN


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions(dtype):
    calls = []
    for x in (REDUCED.to(dtype), REDUCED[1].to(dtype), REDUCED[1, 1, 1].to(dtype)):
        dims = (None, [0], [0, -1]) if x.ndim > 1 else (None, [0])
        for dim, keep in [(d, k) for d in dims for k in (False, True)]:
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


def lists(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(s, generator=generator) + 0.1).to(dtype) for s in ((3,), (2, 2), ())]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_foreach(dtype):
    a, b, c = lists(dtype, 1), lists(dtype, 2), lists(dtype, 3)
    whole = [torch.tensor([1, 2, 3]), torch.tensor([[4]])]
    names = [n for n in (*unary.FLOAT, *unary.SAME) if hasattr(aten, f"_foreach_{n}")]
    calls = [call(getattr(aten, f"_foreach_{n}").default, a) for n in names]
    for name in (*foreach.BINARY, "add", "sub", "pow"):
        packet, writing = getattr(aten, f"_foreach_{name}"), getattr(aten, f"_foreach_{name}_")
        calls += [call(packet.List, a, b), call(packet.Scalar, a, 0.503), call(packet.ScalarList, a, [0.5, 2, 0.25])]
        calls += [call(packet.Scalar, whole, 2), call(packet.Scalar, whole, 2.5), call(writing.Scalar, a, 0.503)]
        if "Tensor" in packet.overloads():
            calls.append(call(packet.Tensor, a, torch.tensor(1.3, dtype=dtype)))
    for packet in (aten._foreach_addcmul, aten._foreach_addcdiv):
        calls += [call(packet.Scalar, a, b, c, 0.3), call(packet.ScalarList, a, b, c, [0.5, 2, 0.3])]
        calls.append(call(packet.Tensor, a, b, c, torch.tensor([0.5, 2, 0.3], dtype=dtype)))
    packet = aten._foreach_lerp
    calls += [
        call(packet.Scalar, a, b, 0.3),
        call(packet.List, a, b, c),
        call(packet.ScalarList, a, b, [0.3, 0.7, 0.5]),
    ]
    calls += [call(aten._foreach_norm.Scalar, a, order) for order in (2, 1, INF)]
    calls += [call(aten._foreach_pow.ScalarAndTensor, 0.9, a), call(aten._foreach_add.List, a, b, alpha=1.003)]
    calls += [call(getattr(aten, f"_foreach_{n}").default, a) for n in ("max", "zero", "zero_", "clone")]
    calls += [
        call(aten._foreach_copy_.default, a, lists(torch.float32)),
        call(aten._foreach_mm.default, [a[1]], [b[1]]),
    ]
    check_batches(answered(calls))


SCALER = ({}, {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)},
          {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(1.0)})  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fused_optimizers(dtype):
    a = [lists(dtype, seed) for seed in range(5)]
    steps = [torch.tensor(float(i)) for i in (1, 3, 7)]
    calls = []
    for packet in (aten._fused_adam_, aten._fused_adamw_):
        for amsgrad, scaler in ((False, SCALER[0]), (True, SCALER[0]), (False, SCALER[1]), (True, SCALER[2])):
            values = (*a[:4], a[4] if amsgrad else [], steps)
            options = dict(
                beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=amsgrad, maximize=amsgrad, **scaler
            )
            calls.append(call(packet.default, *values, lr=0.01, **options))
            calls.append(call(packet.tensor_lr, *values, lr=torch.tensor(0.01), **options))
    for momentum, first, nesterov in ((0.0, False, False), (0.9, True, False), (0.9, False, True), (0.9, False, False)):
        options = dict(
            weight_decay=0.1, momentum=momentum, lr=0.05, dampening=0.0 if nesterov else 0.2, nesterov=nesterov
        )
        buffers = a[2] if momentum else []
        for scaler in SCALER:
            values = dict(**options, maximize=nesterov, is_first_step=first, **scaler)
            calls.append(call(aten._fused_sgd_.default, a[0], a[1], buffers, **values))
    for scaler in SCALER:
        options = dict(lr=0.05, lr_decay=0.1, weight_decay=0.1, eps=1e-10, maximize=False, **scaler)
        calls.append(call(aten._fused_adagrad_.default, *a[:3], steps, **options))
    check_batches(answered(calls))


def test_gradient_scaler():
    unscale, half = aten._amp_foreach_non_finite_check_and_unscale_.default, torch.tensor(0.5)
    calls = [call(unscale, lists(d), torch.tensor(0.0), half) for d in FLOATS]
    calls.append(call(unscale, [torch.tensor([INF, 1.0])], torch.tensor(0.0), half))
    for scale, tracker, found in ((4.0, 1, 0.0), (4.0, 2, 0.0), (4.0, 2, 1.0), (3e38, 2, 0.0)):
        values = torch.tensor([scale]), torch.tensor([tracker], dtype=torch.int32), torch.tensor([found])
        calls.append(call(aten._amp_update_scale_.default, *values, 2.0, 0.5, 3))
    check_batches(calls)


def random_like(overload, *args, like, dtype=torch.float32, **kwargs):
    """A random op's result and another with another key, of this shape."""
    outputs = [(tuple(like), dtype)]
    first, again, other = (lowered(overload, *args, outputs=outputs, key=k, **kwargs)[0] for k in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == tuple(like) and first.dtype == dtype
    return first


def test_random_numbers():
    size, x = (4000,), torch.zeros(4000)
    normal = random_like(aten.randn.default, size, like=size)
    assert abs(normal.mean()) < 0.1 and abs(normal.std() - 1) < 0.1
    uniform = random_like(aten.uniform.default, x, -1.0, 3.0, like=size)
    assert -1 <= uniform.min() < -0.9 and 2.9 < uniform.max() < 3
    half = random_like(aten.rand.default, size, like=size, dtype=torch.bfloat16)
    assert half.max() < 1 and abs(half.float().mean() - 0.5) < 0.05
    shifted = random_like(aten.normal_functional.default, x, 2.0, 3.0, like=size)
    assert abs(shifted.mean() - 2) < 0.2 and abs(shifted.std() - 3) < 0.2
    assert abs(random_like(aten.exponential.default, x, 2.0, like=size).mean() - 0.5) < 0.05
    assert abs(random_like(aten.geometric.default, x, 0.25, like=size).mean() - 4) < 0.3
    assert abs(random_like(aten.bernoulli.p, x, 0.3, like=size).mean() - 0.3) < 0.05
    assert abs(random_like(aten.bernoulli.default, x + 0.7, like=size).mean() - 0.7) < 0.05


def test_random_integers():
    size = (4000,)
    small = random_like(aten.randint.low, -3, 4, size, like=size, dtype=torch.int64)
    assert set(small.tolist()) == set(range(-3, 4))
    wide = random_like(aten.randint.low, -(2**63), 2**63 - 1, size, like=size, dtype=torch.int64)
    assert wide.min() < -(2**62) and wide.max() > 2**62
    byte = random_like(aten.random.default, torch.zeros(size, dtype=torch.uint8), like=size, dtype=torch.uint8)
    assert set(byte.tolist()) == set(range(256))
    order = random_like(aten.randperm.default, 100, like=(100,), dtype=torch.int64)
    assert sorted(order.tolist()) == list(range(100))


def test_multinomial():
    weights = torch.tensor([0.1, 0.2, 0.7, 0.0])
    draws = random_like(aten.multinomial.default, weights, 4000, True, like=(4000,), dtype=torch.int64)
    assert torch.allclose(torch.bincount(draws, minlength=4) / 4000, weights, atol=0.05)
    rows = lowered(aten.multinomial.default, weights.expand(5, 4), 3, outputs=[((5, 3), torch.int64)])[0]
    assert all(sorted(row) == [0, 1, 2] for row in rows.tolist())


def test_dropout_keeps_a_share_and_scales_it():
    x = torch.ones(4000)
    out, mask = lowered(aten.native_dropout.default, x, 0.25, True, outputs=[((4000,), x.dtype), ((4000,), torch.bool)])
    assert torch.equal(out, mask / 0.75) and abs(mask.float().mean() - 0.75) < 0.05
    check(aten.native_dropout.default, x, 0.25, False)
    check(aten.native_dropout.default, x, 1.0, True)


LINEAR = torch.tensor([[4.0, 1, 0.5], [-7, 3, 0.2], [0.5, 0.2, -5]])
BOTH = torch.stack([LINEAR, LINEAR.t() + 0.3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_factorisations(dtype):
    a = BOTH.to(dtype) if not dtype.is_complex else torch.complex(BOTH, BOTH.flip(0) / 3)
    positive = a @ a.mH + 3 * torch.eye(3, dtype=dtype)
    b, vector = a[:, :, :2] + 1, a[0, :, 0]
    calls = [
        call(aten.linalg_cholesky_ex.default, positive),
        call(aten.linalg_cholesky_ex.default, positive, upper=True),
        call(aten.cholesky_inverse.default, torch.linalg.cholesky(positive)),
        call(aten._cholesky_solve_helper.default, b, torch.linalg.cholesky(positive), False),
        call(aten.linalg_solve_triangular.default, a.triu(), b, upper=True),
        call(aten.linalg_solve_triangular.default, a.tril(), b.mT, upper=False, left=False, unitriangular=True),
        call(aten.triangular_solve.default, b, a, True, True, False),
        call(aten.linalg_lu_factor_ex.default, a),
        call(aten.linalg_lu_factor_ex.default, a[:, :2]),
        call(aten.linalg_lu.default, a),
        call(aten.linalg_lu.default, a[:, :, :2]),
        call(aten.lu_unpack.default, *torch.linalg.lu_factor(a)),
        call(aten.linalg_lu_solve.default, *torch.linalg.lu_factor(a), b),
        call(aten.linalg_lu_solve.default, *torch.linalg.lu_factor(a), b, adjoint=True),
        call(aten.linalg_lu_solve.default, *torch.linalg.lu_factor(a), b.mT, left=False),
        call(aten._linalg_solve_ex.default, a, b),
        call(aten._linalg_solve_ex.default, a, b.mT, left=False),
        call(aten._linalg_solve_ex.default, a[0], vector),
        call(aten.linalg_inv_ex.default, a),
        call(aten._linalg_det.default, a),
        call(aten._linalg_det.default, a.mT),
        call(aten._linalg_slogdet.default, a),
        call(aten.linalg_matrix_exp.default, a / 8),
        call(aten.linalg_cross.default, a, a.flip(0)),
        call(aten.linalg_qr.default, a, "r"),
        call(aten._linalg_svd.default, a, False, False),
        call(aten._linalg_eigh.default, positive, "U", False),
    ]
    check_batches(calls, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("full", [False, True])
def test_factors_give_the_matrix_back(full):
    a = BOTH[:, :, :2].double()
    q, r = lowered(aten.linalg_qr.default, a, "complete" if full else "reduced")
    torch.testing.assert_close(q @ r, a)
    u, s, v = lowered(aten._linalg_svd.default, a, full, True)
    torch.testing.assert_close(u[..., :2] @ torch.diag_embed(s) @ v, a)
    symmetric = (BOTH + BOTH.mT).double()
    values, vectors = lowered(aten._linalg_eigh.default, symmetric.tril())
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mH, symmetric)


def test_cholesky_tells_the_first_bad_minor():
    a = torch.tensor([[4.0, 0, 0], [0, -1, 0], [0, 0, 2]])
    assert lowered(aten.linalg_cholesky_ex.default, a)[1].item() == torch.linalg.cholesky_ex(a).info.item() == 2


@pytest.mark.parametrize("normalization", [0, 1, 2])
def test_fft(normalization):
    real = REDUCED.nan_to_num()
    full = torch.complex(real, real.flip(0))
    half = torch.fft.rfft(real)
    calls = [call(aten._fft_c2c.default, full, d, normalization, f) for d in ([0], [1, 2]) for f in (True, False)]
    calls += [call(aten._fft_r2c.default, real, [1, 2], normalization, side) for side in (True, False)]
    calls += [
        call(aten._fft_c2r.default, half, [2], normalization, 5),
        call(aten._fft_c2r.default, half, [0, 2], normalization, 4),
    ]
    check_batches(calls, rtol=1e-4, atol=1e-5)
