"""Lists of tensors, fused optimizers, random numbers, linear algebra and Fourier transforms against PyTorch's CPU kernels."""

import math

import pytest
import torch
from lowering_check import answered, call, check, check_batches, lowered

from tpu_lab.backend.ops import foreach, unary

aten = torch.ops.aten
INF = math.inf
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
SINGLE_AND_HALF = (torch.float32, torch.bfloat16)


def lists(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(s, generator=generator) + 0.1).to(dtype) for s in ((2, 2), ())]


@pytest.mark.parametrize("dtype", SINGLE_AND_HALF, ids=str)
def test_foreach(dtype):
    a, b, c = lists(dtype, 1), lists(dtype, 2), lists(dtype, 3)
    whole = [torch.tensor([1, 2, 3])]
    names = [n for n in (*unary.FLOAT, *unary.SAME) if hasattr(aten, f"_foreach_{n}")]
    calls = [call(getattr(aten, f"_foreach_{n}").default, a) for n in names]
    for name in (*foreach.BINARY, "add", "sub", "pow"):
        packet, writing = getattr(aten, f"_foreach_{name}"), getattr(aten, f"_foreach_{name}_")
        calls += [call(packet.List, a, b), call(packet.Scalar, a, 0.503), call(packet.ScalarList, a, [0.5, 2])]
        calls += [call(packet.Scalar, whole, 2), call(packet.Scalar, whole, 2.5), call(writing.Scalar, a, 0.503)]
        if "Tensor" in packet.overloads():
            calls.append(call(packet.Tensor, a, torch.tensor(1.3, dtype=dtype)))
    for packet in (aten._foreach_addcmul, aten._foreach_addcdiv):
        calls += [call(packet.Scalar, a, b, c, 0.3), call(packet.ScalarList, a, b, c, [0.5, 2])]
        calls.append(call(packet.Tensor, a, b, c, torch.tensor([0.5, 2], dtype=dtype)))
    packet = aten._foreach_lerp
    calls += [
        call(packet.Scalar, a, b, 0.3),
        call(packet.List, a, b, c),
        call(packet.ScalarList, a, b, [0.3, 0.7]),
    ]
    calls += [call(aten._foreach_norm.Scalar, a, order) for order in (2, 1, INF)]
    calls += [call(aten._foreach_pow.ScalarAndTensor, 0.9, a), call(aten._foreach_add.List, a, b, alpha=1.003)]
    calls += [call(getattr(aten, f"_foreach_{n}").default, a) for n in ("max", "zero", "zero_", "clone")]
    calls += [
        call(aten._foreach_copy_.default, a, lists(torch.float32)),
        call(aten._foreach_mm.default, [a[0]], [b[0]]),
    ]
    check_batches(answered(calls))


SCALER = ({}, {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)},
          {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(1.0)})  # fmt: skip


@pytest.mark.parametrize("dtype", SINGLE_AND_HALF, ids=str)
def test_fused_optimizers(dtype):
    a = [lists(dtype, seed) for seed in range(5)]
    steps = [torch.tensor(float(i)) for i in (1, 7)]
    calls = []
    for packet in (aten._fused_adam_, aten._fused_adamw_):
        for amsgrad, scaler in ((False, SCALER[0]), (True, SCALER[1]), (False, SCALER[2])):
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
        for scaler in SCALER if nesterov else SCALER[:1]:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
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


@pytest.mark.parametrize("hermitian", [False, True])
def test_indefinite_matrices_of_any_scale_and_of_none(hermitian):
    """No element's square is needed, and a zero pivot gives infinities only where it is divided by."""
    a = torch.tensor([[0, 3 - 2j, 1], [3 + 2j, 0, 2j], [1, -2j, 1]] if hermitian else [[0, 3.0, 1], [3, 0, 2], [1, 2, 1]])
    for scale in (1e-25, 1.0, 1e25):
        want = torch.linalg.ldl_factor_ex(a * scale, hermitian=hermitian)
        ld, pivots, _ = lowered(aten.linalg_ldl_factor_ex.default, a * scale, hermitian=hermitian)
        assert pivots.tolist() == want.pivots.tolist() and pivots[0] < 0
        torch.testing.assert_close(ld / scale, want.LD / scale)
        b = (a + 1) * scale
        solved = torch.linalg.ldl_solve(want.LD, want.pivots, b, hermitian=hermitian)
        (x,) = lowered(aten.linalg_ldl_solve.default, want.LD, want.pivots, b, hermitian=hermitian)
        torch.testing.assert_close(x, solved, rtol=1e-4, atol=1e-5)
    singular, b = torch.diag(torch.tensor([2.0, 0.0, -3.0])), torch.tensor([[1.0], [2.0], [3.0]])
    one = torch.tensor([1, 2, 3], dtype=torch.int32)
    (x,), want = lowered(aten.linalg_ldl_solve.default, singular, one, b), torch.linalg.ldl_solve(singular, one, b)
    torch.testing.assert_close(x, want, equal_nan=True)
    assert want[1].isinf()


@pytest.mark.parametrize("normalization", [0, 1, 2])
def test_fft(normalization):
    real = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(3))
    full = torch.complex(real, real.flip(0))
    half = torch.fft.rfft(real)
    calls = [call(aten._fft_c2c.default, full, d, normalization, f) for d in ([0], [1, 2]) for f in (True, False)]
    calls += [call(aten._fft_r2c.default, real, [1, 2], normalization, side) for side in (True, False)]
    calls += [
        call(aten._fft_c2r.default, half, [2], normalization, 5),
        call(aten._fft_c2r.default, half, [0, 2], normalization, 4),
    ]
    check_batches(calls, rtol=1e-4, atol=1e-5)
