"""Is what the device gave what PyTorch's CPU kernels gave: type, dtype, shape, strides, values?

Floats may differ by a few roundings of their dtype, measured against the largest value around: sums are added in
another order. A result that differs from the CPU's may be the better one: both are then measured against the same call
in a wider dtype (`as_right`).
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as tree

# dtype: (relative to each value, relative to the largest value of the tensor)
TOLERANCE = {
    torch.float64: (1e-7, 1e-9),
    torch.complex128: (1e-7, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (4e-3, 2e-3),
    torch.bfloat16: (3e-2, 1e-2),
}
WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def host(value):
    """A result with its tensors on the CPU, lazy conj and neg bits resolved; what was on the CPU already is marked."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu().resolve_conj().resolve_neg()


def narrowed(wide, like):
    """The results of a call in a wider dtype, rounded to the dtypes of `like`."""

    def one(w, n):
        return w.to(n.dtype) if isinstance(w, torch.Tensor) and isinstance(n, torch.Tensor) else w

    return tree.tree_map(one, wide, like)


def differs(got, want, values: bool = True, strides: bool = True) -> str | None:
    """What is wrong with `got` (on the device) against `want` (on the CPU), in a sentence; None if nothing is."""
    gots, spec = tree.tree_flatten(got)
    wants, expected = tree.tree_flatten(want)
    if len(gots) != len(wants):
        return f"structure: {spec} instead of {expected}"
    for i, (g, w) in enumerate(zip(gots, wants)):
        wrong = _one(g, w, values, strides)
        if wrong:
            return f"{wrong} (output {i})" if len(wants) > 1 else wrong
    return None


def _one(got, want, values, strides) -> str | None:
    if not isinstance(want, torch.Tensor):
        if not isinstance(got, type(want)):
            return f"type: {type(got).__name__} instead of {type(want).__name__}"
        if isinstance(want, torch.device):
            return None
        if isinstance(want, (float, complex)):
            return _values(torch.tensor(got), torch.tensor(want)) if values else None
        return None if got == want or not values else f"value: {got} instead of {want}"
    if not isinstance(got, torch.Tensor):
        return f"type: {type(got).__name__} instead of a tensor"
    if got.dtype != want.dtype:
        return f"dtype: {got.dtype} instead of {want.dtype}"
    if got.shape != want.shape:
        return f"shape: {tuple(got.shape)} instead of {tuple(want.shape)}"
    if strides and want.layout == torch.strided and _real_strides(got) != _real_strides(want):
        return f"strides: {got.stride()} instead of {want.stride()} of shape {tuple(want.shape)}"
    if not values:
        host(got)  # it can be read
        return None
    if want.layout != torch.strided:
        want, got = want.to_dense(), got.to_dense()
    return _values(host(got), host(want))


def as_right(got, want, truth) -> bool:
    """Is the device about as near to the truth (the call in a wider dtype) as the CPU? 4 times as far is still about."""
    leaves = [tree.tree_leaves(v) for v in (got, want, truth)]
    if len({len(v) for v in leaves}) != 1:
        return False
    for g, w, t in zip(*leaves):
        if isinstance(w, torch.Tensor) and w.dtype in WIDER:
            g, w, t = (host(v).to(torch.complex128 if w.is_complex() else torch.float64) for v in (g, w, t))
            if not torch.equal(g.isfinite(), w.isfinite()) or _distance(g, t) > 4 * _distance(w, t):
                return False
        elif _one(g, w, True, False):
            return False
    return True


def _distance(one, other) -> float:
    far = (one - other).abs()
    far = far[far.isfinite()]
    return float(far.max()) if far.numel() else 0.0


def same_strides(one, other) -> bool:
    """Do two results agree in shapes and strides?"""
    pairs = list(zip(tree.tree_leaves(one), tree.tree_leaves(other)))
    pairs = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
    return all(a.shape == b.shape and _real_strides(a) == _real_strides(b) for a, b in pairs)


def _real_strides(tensor):
    """Strides that say something about memory: those of dimensions with more than one element, if there is any element."""
    return [s for n, s in zip(tensor.shape, tensor.stride()) if n > 1] if tensor.numel() else []


def _values(got, want) -> str | None:
    if want.is_quantized:
        got, want = got.dequantize(), want.dequantize()
    rtol, atol = TOLERANCE.get(want.dtype, (0.0, 0.0))
    scale = 1.0
    if want.dtype in TOLERANCE and want.numel():
        finite = want.abs().to(torch.float64)
        finite = finite[finite.isfinite()]
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    if want.dtype == torch.complex32:
        got, want, (rtol, atol) = got.to(torch.complex64), want.to(torch.complex64), TOLERANCE[torch.float16]
    try:
        torch.testing.assert_close(
            got, want, rtol=rtol, atol=min(atol * scale, 1e30), equal_nan=True, check_stride=False, check_dtype=False
        )
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        sample = "" if want.numel() > 6 else f": {got.flatten().tolist()} instead of {want.flatten().tolist()}"
        return "values: " + "; ".join(lines[1:4] if len(lines) > 1 else lines) + sample
    return None
