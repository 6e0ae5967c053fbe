"""Compare one lowering with PyTorch's CPU kernel: same values, same dtypes, same shapes.

    check(aten.add.Tensor, a, 2.5, alpha=3)

Arguments are CPU tensors and Python values, as the schema has them. As on the device, floats in `Scalar` and
`Tensor` slots (and in `Scalar[]`) are traced 0-d float64 arrays, and the lowering runs under `jax.jit`.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.extend  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import op_record  # noqa: E402
import torch  # noqa: E402

jax.config.update("jax_enable_x64", True)

import tpu_lab.backend.ops  # noqa: E402, F401 (fills the table)
from tpu_lab.backend import dtypes, lowering, registry  # noqa: E402

_BITS = {  # dtypes that numpy does not know: same bits, another name
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}

BATCH = 60  # calls compiled in one program
QUICK = {"xla_backend_optimization_level": 0}  # a third less time to compile; the tests want values, not speed


def check(overload, *args, rtol=None, atol=None, **kwargs):
    """Assert that the lowering of `overload` (or of its functional twin) gives PyTorch's CPU answer.

    For an overload that writes (`_fused_adamw_`), the new values of the written arguments are compared.
    rtol, atol: as in torch.testing.assert_close (give both or none).
    """
    check_all([(overload, args, kwargs)], rtol=rtol, atol=atol)


def check_all(calls, rtol=None, atol=None):
    """`check` for many calls (overload, args, kwargs) at once, compiled as one program, which is much quicker."""
    calls = [(overload, tuple(args), dict(kwargs)) for overload, args, kwargs in calls]
    truths = [expected(*call) for call in calls]
    outputs = [
        [(tuple(t.shape), t.dtype) for t in truth] if has_meta(call[0]) else None for call, truth in zip(calls, truths)
    ]
    for overload, args, kwargs in calls:
        op_record.note(overload, [args, list(kwargs.values())])
    for (overload, args, kwargs), answer, truth in zip(calls, lowered_all(calls, outputs), truths):
        assert len(answer) >= len(truth), f"{overload}: {len(answer)} results, PyTorch gives {len(truth)}"
        for i, (got, want) in enumerate(zip(answer, truth)):
            where = f"{overload} output {i} of {_describe(args, kwargs)}"
            torch.testing.assert_close(
                got, want, rtol=rtol, atol=atol, equal_nan=True, check_stride=False, msg=lambda m: f"{where}\n{m}"
            )


def has_meta(overload) -> bool:
    """Does PyTorch know shapes and dtypes of its results? If not, the lowering itself must give the right dtype."""
    twin = registry.functional(overload) or overload
    keys = ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(twin.name(), key) for key in keys)


def call(overload, *args, **kwargs):
    """One call for `check_all`."""
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
    """`check_all` of any number of calls, BATCH at a time."""
    calls = list(calls)
    assert calls
    for i in range(0, len(calls), BATCH):
        check_all(calls[i : i + BATCH], **tolerance)


def expected(overload, args, kwargs) -> list[torch.Tensor]:
    """PyTorch's CPU answer: new outputs, then the new values of what is written by the schema or by `mutates`."""
    args, kwargs = _copy(args), {k: _copy(v) for k, v in kwargs.items()}
    result = overload(*args, **kwargs)
    values = {**{a.name: v for a, v in zip(overload._schema.arguments, args)}, **kwargs}
    written = registry.writes(overload)
    if written:
        wrote = _tensors([values.get(name) for name in written])
        return [t for t in _tensors(result) if not any(t is w for w in wrote)] + wrote
    mutated = registry.find(overload).mutates if registry.find(overload) else ()
    return _tensors([result, *[values.get(name) for name in mutated]])


def lowered(overload, *args, outputs=None, key=0, **kwargs) -> list[torch.Tensor]:
    """Run the lowering of `overload` under jit and give its results as CPU tensors.

    outputs: ((shape, torch dtype), ...) of the results, as the meta kernel would tell; key: seed of a random op.
    """
    return lowered_all([(overload, args, kwargs)], [outputs], key)[0]


def lowered_all(calls, outputs, key=0) -> list[list[torch.Tensor]]:
    """`lowered` for many calls (overload, args, kwargs), all in one jitted program."""
    leaves: list = []
    plans = [_prepare(*call, leaves) for call in calls]

    def run(key, leaves):
        return [
            jax.jit(lambda key, leaves, plan=plan, wanted=wanted: _one(plan, wanted, key, leaves))(key, leaves)
            for plan, wanted in zip(plans, outputs)
        ]

    traced = jax.jit(run, compiler_options=QUICK).trace(jax.random.key(key), leaves)
    parts = [e.params["jaxpr"].jaxpr for e in traced.jaxpr.jaxpr.eqns if e.primitive.name in ("jit", "pjit")]
    assert len(parts) == len(calls)
    for (overload, args, kwargs), part in zip(calls, parts):
        assert not widens(overload, args, kwargs, part), f"{overload}{_describe(args, kwargs)} makes float64 tensors"
    found = traced.lower().compile()(jax.random.key(key), leaves)
    return [[to_torch(r) for r in results] for results in found]


def _one(plan, wanted, key, leaves):
    entry, compute, args, kwargs = plan
    args, kwargs = [_fill(p, leaves) for p in args], {k: _fill(p, leaves) for k, p in kwargs.items()}
    return lowering.call(entry, args, kwargs, wanted, compute, key)


# These count in float64 as PyTorch's CPU kernels do, or a hash, a value's last digit, a tie on the grid would be another.
MEANT = {"aten::hash_tensor", "aten::range", "aten::_fused_moving_avg_obs_fq_helper"}


def widens(overload, args, kwargs, jaxpr) -> bool:
    """Does a call with float32 or half tensors alone make float64 tensors? A TPU emulates each instruction on them."""
    given = [*args, *kwargs.values()]
    dtypes = [t.dtype for t in _tensors(given)]
    asked = torch.float64 in dtypes or torch.complex128 in dtypes or any(v is torch.float64 for v in given)
    floats = any(dtype.is_floating_point for dtype in dtypes)
    return floats and not asked and overload._schema.name not in MEANT and _wide(jaxpr)


def _wide(jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            if getattr(v.aval, "size", 0) > 1 and v.aval.dtype == "float64":
                return True
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            if _wide(sub):
                return True
    return False


def _prepare(overload, args, kwargs, leaves):
    """(lowering, promoted dtype, args, kwargs) with each runtime value moved to the leaves."""
    entry = registry.find(overload) or registry.find(registry.functional(overload) or overload)
    assert entry is not None, f"no lowering for {overload}"
    outs = {a.name for a in overload._schema.arguments if a.is_out}
    kwargs = {k: v for k, v in kwargs.items() if k not in registry.NEVER_PASSED | outs}
    types = {a.name: str(a.type) for a in overload._schema.arguments}
    order = [a.name for a in overload._schema.arguments]
    planned = [_plan(v, order[i], types[order[i]], entry, leaves) for i, v in enumerate(args)]
    named = {k: _plan(v, k, types[k], entry, leaves) for k, v in kwargs.items()}
    if entry.contiguous:
        named["contiguous"] = tuple(t.is_contiguous() for t in _tensors([*args, *kwargs.values()]))
    return entry, lowering.promoted(entry, args, kwargs), planned, named


class _Leaf(int):
    """Place of a traced argument in the list of leaves."""


def _plan(value, name, kind, entry, leaves):
    """The argument with each runtime value replaced by its place among the leaves."""
    if isinstance(value, torch.Tensor):
        leaves.append(to_numpy(value))
    elif isinstance(value, (list, tuple)):
        return [_plan(v, name, kind, entry, leaves) for v in value]
    elif name in entry.static:
        return value
    elif type(value) is float and ("Tensor" in kind or "Scalar" in kind or "number" in kind or name in entry.runtime):
        leaves.append(np.float64(value))
    elif type(value) is int and "Tensor" in kind and entry.runtime_ints:
        leaves.append(np.int64(value))
    else:
        return value
    return _Leaf(len(leaves) - 1)


def _fill(plan, leaves):
    if isinstance(plan, list):
        return [_fill(p, leaves) for p in plan]
    return leaves[plan] if type(plan) is _Leaf else plan


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a numpy array of jax's dtype, bit by bit."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _BITS:
        bits, name = _BITS[tensor.dtype]
        return tensor.view(bits).numpy().view(name)
    return tensor.numpy()


def to_torch(array) -> torch.Tensor:
    """A jax array as a CPU tensor, bit by bit."""
    dtype = dtypes.to_torch(array.dtype)
    array = np.array(array)
    if dtype in _BITS:
        return torch.from_numpy(array.view(dtypes.to_jax(_BITS[dtype][0]))).view(dtype)
    return torch.from_numpy(array)


def _tensors(values) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [t for v in values for t in _tensors(v)]
    return []


def _copy(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_copy(v) for v in value]
    return value


def _describe(args, kwargs) -> str:
    def one(v):
        if isinstance(v, torch.Tensor):
            return dtypes.aval(v.shape, v.dtype)
        return "[" + ", ".join(map(one, v)) + "]" if isinstance(v, (list, tuple)) else repr(v)

    return "(" + ", ".join([*map(one, args), *(f"{k}={one(v)}" for k, v in kwargs.items())]) + ")"
