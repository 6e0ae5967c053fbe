"""`torch.tpu.precision` on a CPU: 1, 3 and 6 bfloat16 passes with the chip's error, in every mode, in the cache key."""

import numpy as np
import pytest
import torch

import tpu_lab

ERRORS = {None: 7e-8, "highest": 7e-8, "high": 1.3e-5, "default": 2.4e-3}  # mean relative error, as TorchTPU's docs say
MODES = ("strict", "fused", "debug")


def error(value, exact) -> float:
    """Mean error over mean size."""
    exact = exact.double()
    return float((value.cpu().double() - exact).abs().mean() / exact.abs().mean())


def chosen(level):
    """The block of this level; None leaves float32 as it is."""
    import contextlib

    return contextlib.nullcontext() if level is None else torch.tpu.precision(level)


@pytest.fixture(scope="module")
def factors():
    g = torch.Generator().manual_seed(0)
    return torch.randn(64, 128, generator=g), torch.randn(128, 48, generator=g)


@pytest.fixture(params=MODES)
def mode(request):
    from tpu_lab.backend.state import mode_scope

    with mode_scope(request.param):
        yield request.param


@pytest.mark.parametrize("level", ERRORS)
def test_a_matmul_has_the_error_of_its_passes(factors, level, mode):
    a, b = factors
    with chosen(level):
        y = a.to("tpu") @ b.to("tpu")
    assert 0.3 * ERRORS[level] < error(y, a.double() @ b.double()) < 2 * ERRORS[level]


def test_bfloat16_passes_are_exactly_that(factors):
    """One pass: the operands rounded to bfloat16, products and sums in float32."""
    a, b = factors
    with torch.tpu.precision("default"):
        y = a.to("tpu") @ b.to("tpu")
    torch.testing.assert_close(y.cpu(), a.bfloat16().float() @ b.bfloat16().float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["high", "default"])
def test_backward_of_matmul_and_convolution_has_it_too(level, mode):
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(2, 8, 9, 9, generator=g), torch.randn(16, 8, 3, 3, generator=g)
    m = torch.randn(49, 32, generator=g)

    def run(x, w, m):
        x, w, m = (v.detach().requires_grad_() for v in (x, w, m))
        y = torch.nn.functional.conv2d(x, w)
        z = y.reshape(2, 16, -1) @ m
        z.backward(torch.ones_like(z) * 1.1)
        return y.detach(), z.detach(), x.grad, w.grad, m.grad

    exact = run(x.double(), w.double(), m.double())
    with torch.tpu.precision(level):
        values = run(x.to("tpu"), w.to("tpu"), m.to("tpu"))
    for value, want in zip(values, exact, strict=True):
        assert 0.1 * ERRORS[level] < error(value, want) < 5 * ERRORS[level]


def test_compiled_backward_has_it_and_outside_the_block_float32_is_itself(factors):
    a, b = factors

    @torch.compile(backend="tpu")
    def f(a, b):
        return (a @ b).square().sum()

    grads = {}
    for level in (None, "default", None):
        p = a.to("tpu").requires_grad_()
        with chosen(level):
            f(p, b.to("tpu")).backward()
        grads.setdefault(level, []).append(p.grad)
    p = a.double().requires_grad_()
    (p @ b.double()).square().sum().backward()
    assert error(grads["default"][0], p.grad) > 3e-4
    assert all(error(g, p.grad) < 1e-6 for g in grads[None])


def test_a_change_compiles_anew_and_the_miss_says_option(factors, mode):
    a, b = (v.to("tpu") for v in factors)
    a, b = a[:7], b[:, : 5 + MODES.index(mode)]

    def f():
        return (a @ b).sum().item()

    f()
    with tpu_lab.profile() as p:
        f()
        with torch.tpu.precision("high"):
            f()
            f()
        f()
    misses = [c for c in p.trace.compiles if c.tier == "compiled" or c.tier == "disk"]
    assert [c.cause for c in misses] == ["option"]
    assert misses[0].why == "option float32 precision: high, was not set"


def test_what_was_recorded_in_the_block_runs_so_after_it(factors):
    a, b = factors
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        x, y = a.to("tpu"), b.to("tpu")
        with torch.tpu.precision("default"):
            coarse = x @ y
        fine = x @ y
        exact = a.double() @ b.double()
        assert error(fine, exact) < 1e-6 < 1e-3 < error(coarse, exact)


@pytest.mark.parametrize(
    ("level", "word"), [(None, "HIGHEST"), ("highest", "HIGHEST"), ("high", "HIGH"), ("default", "DEFAULT")]
)
def test_a_program_for_a_tpu_carries_the_level_and_no_passes(factors, level, word):
    a, b = (v.to("tpu") for v in factors)
    with tpu_lab.profile() as p, chosen(level):
        (a @ b).sum().item()
    program = next(p.trace.programs[r.key] for r in p.trace.launches if any("mm" in p.trace.ops[i].name for i in r.ops))
    text = program.stablehlo("tpu")
    assert text.count("stablehlo.dot_general") == 1 and f"precision = [{word}, {word}]" in text
    assert "stablehlo.reduce_precision" not in text
    passes = {None: 1, "highest": 6, "high": 3, "default": 1}[level]
    assert program.stablehlo("cpu").count("stablehlo.dot_general") == passes
    assert "conditional(" not in program.hlo()


def test_infinities_stay_and_other_dtypes_have_no_passes(factors):
    a, b = factors
    a = a.clone()
    a[0, 0] = float("inf")
    with torch.tpu.precision("high"):
        y = (a.to("tpu") @ b.abs().to("tpu")).cpu()
        wide = (a[1:].double().to("tpu") @ b.double().to("tpu")).cpu()
    assert torch.isinf(y[0]).all() and torch.isfinite(y[1:]).all()
    np.testing.assert_allclose(wide.numpy(), (a[1:].double() @ b.double()).numpy(), rtol=1e-12)


def test_torchs_own_switch_chooses_and_unchooses(factors):
    a, b = factors
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert error(a.to("tpu") @ b.to("tpu"), exact) > 1e-3
    finally:
        torch.set_float32_matmul_precision(before)
    assert error(a.to("tpu") @ b.to("tpu"), exact) < 1e-6


def test_the_level_is_restored_after_an_error():
    with pytest.raises(ZeroDivisionError), torch.tpu.precision("high"):
        1 / 0
    from tpu_lab.backend import precision

    assert precision.chosen is None and precision.level == "highest"
