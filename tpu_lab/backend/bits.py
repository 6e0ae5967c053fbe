"""Lazy conjugates and negatives: `z.conj()` and `z.conj().imag` are views with a bit that says what the memory means.

torch resolves the bit before most ops. For a few (clone, copy_, matrix products: RESOLVED_HERE) it leaves that to the
kernel, because BLAS can conjugate on the fly; here the bit is resolved for them.
"""

from __future__ import annotations

import functools

import torch

aten = torch.ops.aten
RESOLVED_HERE = frozenset(
    "clone copy_ dot vdot mm bmm addmm addmm_ baddbmm baddbmm_ linalg_solve_triangular repeat_interleave".split()
)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values and no bit set."""
    if tensor.is_conj():
        plain = aten._conj(tensor)
        tensor = aten.conj_physical.out(plain, out=torch.empty_like(plain))
    if tensor.is_neg():
        tensor = aten.neg(aten._neg_view(tensor))
    return tensor


def lazy(value) -> bool:
    """Does this argument carry a conjugate or negative bit?"""
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def resolving(overload, kernel):
    """The kernel for an overload of RESOLVED_HERE: as it is without bits, else over resolved arguments."""
    written = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    names = [a.name for a in overload._schema.arguments]

    @functools.wraps(kernel)
    def run(*args, **kwargs):
        for a in args:
            if lazy(a):
                break
        else:
            if not (kwargs and any(map(lazy, kwargs.values()))):
                return kernel(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        plain = {k: resolved(v) if lazy(v) else v for k, v in given.items()}
        if overload is aten.copy_.default:  # write the conjugate into the memory behind a conjugate view
            self, src = given["self"], plain["src"]
            if self.is_conj():
                self, src = aten._conj(self), src.conj().resolve_conj()
            if self.is_neg():
                self, src = aten._neg_view(self), -src
            kernel(self, src, *args[2:])
            return given["self"]
        out = kernel(*[plain[n] for n in names[: len(args)]], **{k: plain[k] for k in kwargs})
        for name in written:
            if lazy(given[name]):
                given[name].copy_(plain[name])
                return given[name]
        return out

    return run
