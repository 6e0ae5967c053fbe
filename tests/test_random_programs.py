"""Programs of 5 to 40 ops that nobody wrote, over shared tensors, views, in-place writes and dtypes, agree with the CPU.

The few here are the same each time. `HYPOTHESIS_PROFILE=search pytest tests/test_random_programs.py` draws thousands.
"""

import itertools
import random

import op_programs as ops
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from view_programs import Choice

import tpu_lab  # noqa: F401
from tpu_lab.backend.state import mode_scope

SHARE = {"strict": 0.6, "fused": 0.6, "debug": 0.1, "compiled": 0.08}  # of the profile's examples


def drawn(share):
    """A test over random programs, as many as that part of the profile's examples."""
    count = max(5, int(settings.default.max_examples * share))
    return lambda test: settings(max_examples=count, suppress_health_check=list(HealthCheck))(
        given(ops.programs())(test)
    )


@pytest.fixture(autouse=True, scope="module")
def rounded():
    """Half types round after each op here, as on the CPU."""
    before = torch.tpu.allow_excess_precision
    torch.tpu.allow_excess_precision = False
    yield
    torch.tpu.allow_excess_precision = before


def agrees(program, mode):
    with mode_scope(mode):
        found = ops.difference(program)
    assert found is None, found


@drawn(SHARE["strict"])
def test_in_strict_mode(program):
    agrees(program, "strict")


@drawn(SHARE["fused"])
def test_in_fused_mode(program):
    agrees(program, "fused")


@drawn(SHARE["debug"])
def test_in_debug_mode(program):
    agrees(program, "debug")


@drawn(SHARE["compiled"])
def test_as_one_compiled_function(program):
    """Up to an `x.data = y`: Dynamo itself fails where that has another dtype or an alias (see test_compile_calls)."""
    program = list(itertools.takewhile(lambda line: ".data = " not in line, program))
    errors, _ = ops.run(program, "cpu")
    torch._dynamo.reset()
    found = ops.compiled_difference([line for line, error in zip(program, errors, strict=True) if error is None])
    assert found is None, found


def test_programs_do_something():
    rng = random.Random(0)
    seen = [
        ops.write(
            [
                Choice(rng.choice(ops.KINDS), *(rng.randrange(10_000) for _ in range(3)))
                for _ in range(rng.randint(5, 40))
            ]
        )
        for _ in range(150)
    ]
    assert ops.mean_length(seen) > 6
    errors = [e for p in seen for e in ops.run(p, "cpu")[0]]
    assert sum(e is None for e in errors) > 0.8 * len(errors)
    text = "\n".join(line for p in seen for line in p)
    for word in (
        "torch.autograd.grad",
        "add_",
        "float16",
        ".t()",
        "bfloat16",
        "nonzero",
        "cumsum",
        "unique",
        "out=",
        "flush()",
    ):
        assert word in text, word


def test_a_wrong_value_is_found_and_shown():
    program = [*ops.START, "t4 = t0 + t0"]
    assert ops.difference(program) is None
    from tpu_lab.backend import trial

    with trial.lowered(torch.ops.aten.add.Tensor, lambda a, b, alpha=1: a - b, promote="result"):
        assert "values of t4" in ops.difference(program) and "t4 = t0 + t0" in ops.difference(program)
