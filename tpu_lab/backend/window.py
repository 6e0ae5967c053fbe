"""A strided view as jax: (size, stride, offset) over an immutable base array <-> reshape, slice, transpose, broadcast.

A storage holds one base array in memory order (C-contiguous). A tensor over it is a *window*: torch's own size,
stride and storage offset, plus its dtype. `Window.read` gives the tensor's values, `Window.write` a new base in which
they are replaced. Both are traced into the programs, so XLA fuses them. What no chain of reshape, slice and transpose
can say (overlapping or unaligned strides) is a gather and a scatter, last.

The split: dimensions sorted by falling stride s1 > s2 > ... > sk cut the flat buffer into nested blocks
(N/s1, s1/s2, ..., s(k-1)); dimension i takes `size[i]` blocks from block `offset // si` on. Only the innermost may have
a stride that does not divide its block (a diagonal): it is one strided slice.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_lab.backend import dtypes


class Base:
    """The shape and dtype of a storage's array; interned, so identity is equality."""

    __slots__ = ("dtype", "id", "itemsize", "jdtype", "nbytes", "numel", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, number: int):
        self.shape, self.dtype, self.id = shape, dtype, number
        self.jdtype = dtypes.to_jax(dtype)
        self.itemsize = dtype.itemsize
        self.numel = math.prod(shape)
        self.nbytes = self.numel * self.itemsize

    def __repr__(self):
        return dtypes.aval(self.shape, self.dtype)


_bases: dict[tuple, Base] = {}


def base(shape: tuple[int, ...], dtype: torch.dtype) -> Base:
    """The interned base of this shape and dtype."""
    found = _bases.get((shape, dtype))
    if found is None:
        found = _bases[shape, dtype] = Base(shape, dtype, len(_bases))
    return found


def memory_order(size, stride) -> tuple[int, ...] | None:
    """The permutation that makes a dense tensor C-contiguous, or None if it has gaps or overlaps.

    (2, 3, 4, 4) with channels_last strides -> (0, 2, 3, 1). The stride of a dimension of size 0 or 1 says nothing.
    """
    order = tuple(sorted(range(len(size)), key=lambda d: (-stride[d], size[d] < 2, d)))
    expected = 1
    for d in reversed(order):
        if size[d] < 2:
            continue
        if stride[d] != expected:
            return None
        expected *= size[d]
    return order


def contiguous_strides(size) -> tuple[int, ...]:
    """C strides in elements, as torch gives them (a dimension of size 0 counts as 1)."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


class Window:
    """How one tensor lies on its base. Interned: identity is equality."""

    __slots__ = ("base", "broadcast", "dtype", "id", "identity", "jdtype", "offset", "plan", "size", "stride")

    def __init__(self, base: Base, size, stride, offset: int, dtype: torch.dtype, number: int):
        self.base, self.size, self.stride = base, tuple(size), tuple(stride)
        self.offset, self.dtype, self.id = offset, dtype, number
        self.jdtype = dtypes.to_jax(dtype)
        same = dtype == base.dtype
        self.identity = same and offset == 0 and self.size == base.shape and is_contiguous(self.size, self.stride)
        self.broadcast = any(n > 1 and s == 0 for n, s in zip(self.size, self.stride, strict=True))
        numel = base.nbytes // dtype.itemsize
        self.plan = None if self.identity else _plan(self.size, self.stride, offset, numel)

    def __repr__(self):
        return dtypes.aval(self.size, self.dtype)

    def layout(self) -> str:
        """How it lies on its base, for people: "strides (1, 8), offset 0 in f32[8,4]"; "" when it is the base itself."""
        if self.identity:
            return ""
        return f"strides {tuple(self.stride)}, offset {self.offset} in {self.base!r}"

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def read(self, array):
        """array: base.shape, base dtype -> size, dtype."""
        if self.identity:
            return array
        flat = array if self.dtype == self.base.dtype else bitcast(array.reshape(-1), self.base.dtype, self.dtype)
        if self.numel == 0:
            return jnp.zeros(self.size, self.jdtype)
        if self.plan is None:
            return flat.reshape(-1)[self._indices()]
        split, slices, permutation, kept = self.plan
        out = flat.reshape(split)
        out = lax.slice(out, *slices) if slices else out
        out = out.reshape([n for _, n in kept]).transpose(permutation)
        # out now has the kept dimensions in tensor order; the others are of size 1 or broadcast
        dims = tuple(sorted(d for d, _ in kept))
        return lax.broadcast_in_dim(out, self.size, dims)

    def write(self, array, values):
        """array: base.shape; values: size -> a new base in which the window holds the values."""
        if self.identity:
            return values
        if self.numel == 0:
            return array
        same = self.dtype == self.base.dtype
        flat = array if same else bitcast(array.reshape(-1), self.base.dtype, self.dtype)
        if self.broadcast:
            values = self._changed(array, values)
        if self.plan is None:
            out = flat.reshape(-1).at[self._indices()].set(jnp.broadcast_to(values, self.size) if self.broadcast else values)
        else:
            split, slices, permutation, kept = self.plan
            dims = sorted(d for d, _ in kept)
            values = values.reshape([self.size[d] for d in dims])
            values = values.transpose(np.argsort(permutation)) if permutation else values
            out = flat.reshape(split)
            if not slices:
                out = values.reshape(split)
            else:
                start, limit, step = slices
                shape = [-(-(e - s) // k) for s, e, k in zip(start, limit, step, strict=True)]
                values = values.reshape(shape)
                if all(k == 1 for k in step):
                    out = lax.dynamic_update_slice(out, values, [jnp.int32(s) for s in start])
                else:
                    where = tuple(slice(s, e, k) for s, e, k in zip(start, limit, step, strict=True))
                    out = out.at[where].set(values)
        if not same:
            out = bitcast(out.reshape(-1), self.dtype, self.base.dtype)
            if out.size < self.base.numel:  # the last bytes that are no whole element of the window's dtype
                out = jnp.concatenate([out, array.reshape(-1)[out.size :]])
        return out.reshape(self.base.shape)

    def _changed(self, array, values):
        """One value for all elements that share a place through a stride of 0: the last that differs from the old value.

        Shape `size` with 1 where the stride is 0.
        """
        shared = [d for d, (n, s) in enumerate(zip(self.size, self.stride, strict=True)) if s == 0 and n > 1]
        rest = [d for d in range(len(self.size)) if d not in shared]
        many = math.prod(self.size[d] for d in shared)

        def last(x):
            return x.transpose(rest + shared).reshape([self.size[d] for d in rest] + [many])

        new, old = last(values), last(self.read(array))
        at = many - 1 - jnp.argmax(jnp.flip(new != old, -1), -1, keepdims=True)  # no change: the last one
        return jnp.take_along_axis(new, at, -1).reshape([1 if d in shared else n for d, n in enumerate(self.size)])

    def _indices(self):
        """Flat positions of all elements, shape `size`."""
        index = np.full((), self.offset, np.int64)
        for n, s in zip(self.size, self.stride, strict=True):
            index = index[..., None] + np.arange(n, dtype=np.int64) * s
        return index.astype(np.int32) if self.base.numel < 2**31 else index


_windows: dict[tuple, Window] = {}


def window(base: Base, size, stride, offset: int, dtype: torch.dtype) -> Window:
    """The interned window. The caller's key (torch.Size, tuple, int, dtype) is used as it is: this is the hot path."""
    key = (base, size, stride, offset, dtype)
    found = _windows.get(key)
    if found is None:
        found = _windows[key] = Window(base, size, stride, offset, dtype, len(_windows))
    return found


def is_contiguous(size, stride) -> bool:
    expected = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if n == 0:
            return True
        if n != 1:
            if s != expected:
                return False
            expected *= n
    return True


def _plan(size, stride, offset, numel):
    """(split shape, (starts, limits, steps) or None, permutation, kept dims by falling stride); None: gather."""
    kept = sorted(((d, n) for d, n in enumerate(size) if n > 1 and stride[d] != 0), key=lambda dn: -stride[dn[0]])
    if any(stride[d] < 0 for d, _ in kept) or 0 in size:
        return None
    split, start, limit, step = [], [], [], []
    extent, rest = numel, offset
    for i, (d, n) in enumerate(kept):
        s, last = stride[d], i == len(kept) - 1
        if last and s > 1 and (extent % s or s == extent):  # one strided slice of the innermost block
            if rest + (n - 1) * s >= extent:
                return None
            split.append(extent)
            start.append(rest)
            limit.append(rest + (n - 1) * s + 1)
            step.append(s)
            extent = 1
            break
        if extent % s:
            return None
        blocks, first = extent // s, rest // s
        if first + n > blocks:
            return None
        split.append(blocks)
        start.append(first)
        limit.append(first + n)
        step.append(1)
        extent, rest = s, rest % s
    if extent > 1 or not kept:  # what is left of the innermost block: pick one element of it
        split.append(extent)
        start.append(rest)
        limit.append(rest + 1)
        step.append(1)
    whole = all(a == 0 and b == e and k == 1 for a, b, e, k in zip(start, limit, split, step, strict=True))
    tensor_order = sorted(range(len(kept)), key=lambda i: kept[i][0])
    return tuple(split), None if whole else (start, limit, step), tuple(tensor_order), tuple(kept)


def bitcast(flat, source: torch.dtype, target: torch.dtype):
    """Reinterpret a flat array's bytes, complex and bool included (XLA's own bitcast takes neither).

    Bytes at the end that make no whole element of `target` are left out, as in an 11-byte storage seen as int32.
    """
    if source == target:
        return flat
    if source.is_complex:
        flat = jnp.stack([flat.real, flat.imag], -1).reshape(-1)
        source = torch.float32 if source == torch.complex64 else torch.float64
    if source == torch.bool:
        flat, source = flat.astype(jnp.uint8), torch.uint8
    if target.is_complex:
        flat = bitcast(flat, source, torch.float32 if target == torch.complex64 else torch.float64)
        pair = flat[: flat.size // 2 * 2].reshape(-1, 2)
        return lax.complex(pair[:, 0], pair[:, 1])
    if target == torch.bool:
        return bitcast(flat, source, torch.uint8) != 0
    wide, narrow = target.itemsize, source.itemsize
    if wide > narrow:
        many = wide // narrow
        flat = flat[: flat.size // many * many].reshape(-1, many)
    return flat if source == target else lax.bitcast_convert_type(flat, dtypes.to_jax(target)).reshape(-1)
