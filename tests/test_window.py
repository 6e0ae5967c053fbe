"""Windows over a base array against torch.as_strided on the CPU: what they read, and what a write leaves behind.

The exhaustive part runs `Window`'s own code over numpy (XLA would take an hour to compile 20,000 windows); a sample of
the same cases and all dtype-reinterpreting windows run through XLA.
"""

import itertools
import random
import types

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tpu_lab  # noqa: F401  registers the device
from tpu_lab.backend import window as windows
from tpu_lab.backend.host import from_numpy, to_numpy
from tpu_lab.backend.window import base, contiguous_strides, memory_order, window


class Array(np.ndarray):
    """A numpy array with jax's `.at[index].set(values)`."""

    @property
    def at(self):
        return _At(self)


class _At:
    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        def put(values):
            out = self.array.copy()
            out[index] = values
            return out

        return types.SimpleNamespace(set=put)


class _Lax:
    @staticmethod
    def slice(array, start, limit, step=None):
        step = step or [1] * len(start)
        for a, b, n in zip(start, limit, array.shape, strict=True):
            assert 0 <= a <= b <= n, "XLA refuses a slice outside of the array"
        return array[tuple(slice(a, b, k) for a, b, k in zip(start, limit, step, strict=True))]

    @staticmethod
    def broadcast_in_dim(array, shape, dims):
        assert array.ndim == len(dims) and list(dims) == sorted(set(dims))
        out = array.reshape([array.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))])
        return np.broadcast_to(out, shape).view(Array)

    @staticmethod
    def dynamic_update_slice(array, values, start):
        out = array.copy()
        for a, k, n in zip(start, values.shape, array.shape, strict=True):
            assert 0 <= int(a) and int(a) + k <= n, "XLA would move the update"
        out[tuple(slice(int(a), int(a) + k) for a, k in zip(start, values.shape, strict=True))] = values
        return out


def use_numpy(patch) -> None:
    """Run Window's code with numpy behind it."""
    patch.setattr(windows, "lax", _Lax)
    patch.setattr(windows, "jnp", types.SimpleNamespace(zeros=np.zeros, int32=int))


def fits(size, stride, offset, numel) -> bool:
    return 0 in size or offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) < numel


def overlaps(size, stride, offset, numel) -> bool:
    """Do two elements share a place in memory?"""
    if 0 in size:
        return False
    index = torch.arange(numel).as_strided(size, stride, offset).reshape(-1)
    return len(index.unique()) < index.numel()


def cases(numel):
    """All windows of up to three dimensions with sizes 0-4, typical strides and offsets."""
    for rank in range(4):
        for size in itertools.product((0, 1, 2, 3, 4), repeat=rank):
            for stride in itertools.product((0, 1, 2, 3, 4, 6), repeat=rank):
                for offset in (0, 1, 5):
                    if fits(size, stride, offset, numel) and not (0 in size and rank == 3):
                        yield size, stride, offset


def expected(shape, size, stride, offset):
    """(memory, what the window reads, new values, memory after writing them), as CPU tensors."""
    memory = torch.arange(100, 100 + int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    new = torch.arange(int(np.prod(size)), dtype=torch.float32).reshape(size)
    after = memory.clone()
    after.as_strided(size, stride, offset).copy_(new) if not overlaps(size, stride, offset, memory.numel()) else None
    return memory, memory.as_strided(size, stride, offset), new, after


def test_every_small_window_reads_and_writes_like_as_strided(monkeypatch):
    use_numpy(monkeypatch)
    shape, count = (3, 4), 0
    where = base(shape, torch.float32)
    memory = np.arange(100, 100 + int(np.prod(shape)), dtype=np.float32).reshape(shape).view(Array)
    flat_index = np.arange(memory.size)
    for size, stride, offset in cases(memory.size):
        w = windows.Window(where, size, stride, offset, torch.float32, -1)
        strides = [s * 8 for s in stride]
        index = np.lib.stride_tricks.as_strided(flat_index[offset:] if 0 not in size else flat_index, size, strides)
        got = w.read(memory)
        assert got.shape == size and np.array_equal(got, memory.reshape(-1)[index]), (size, stride, offset)
        if len(np.unique(index)) == index.size:
            new = np.arange(index.size, dtype=np.float32).reshape(size)
            want = memory.reshape(-1).copy()
            want[index.reshape(-1)] = new.reshape(-1)
            after = w.write(memory, new.view(Array))
            assert after.shape == shape and np.array_equal(after.reshape(-1), want), (size, stride, offset)
        count += 1
    assert count > 15_000


def run_xla(memory, size, stride, offset, new, dtype=None):
    """(read, after the write) through one XLA program."""
    where = base(tuple(memory.shape), memory.dtype)
    w = window(where, torch.Size(size), tuple(stride), offset, dtype or memory.dtype)
    read, after = jax.jit(lambda a, v: (w.read(a), w.write(a, v)))(to_numpy(memory), to_numpy(new))
    return from_numpy(np.asarray(read), dtype or memory.dtype), from_numpy(np.asarray(after), memory.dtype)


def test_a_sample_of_them_through_xla():
    sample = random.Random(2).sample([c for c in cases(12) if not overlaps(*c, 12)], 20)
    for size, stride, offset in sample:
        memory, read, new, after = expected((12,), size, stride, offset)
        got_read, got_after = run_xla(memory, size, stride, offset, new)
        assert torch.equal(got_read, read) and torch.equal(got_after, after), (size, stride, offset)


@st.composite
def geometry(draw):
    """A view chain's geometry over a base of 2 to 4 dimensions: slices with steps, permutations, a diagonal, an expand."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    t = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("slice", "permute", "select", "diagonal", "unsqueeze", "expand")))
        if kind == "slice" and t.dim():
            d = draw(st.integers(0, t.dim() - 1))
            a = draw(st.integers(0, t.shape[d]))
            t = t[(slice(None),) * d + (slice(a, draw(st.integers(a, t.shape[d])), draw(st.integers(1, 3))),)]
        elif kind == "permute":
            t = t.permute(draw(st.permutations(range(t.dim()))))
        elif kind == "select" and t.dim() and 0 not in t.shape:
            d = draw(st.integers(0, t.dim() - 1))
            t = t.select(d, draw(st.integers(0, t.shape[d] - 1)))
        elif kind == "diagonal" and t.dim() >= 2:
            t = t.diagonal(draw(st.integers(-1, 1)))
        elif kind == "unsqueeze":
            t = t.unsqueeze(draw(st.integers(0, t.dim())))
        elif kind == "expand":
            t = t.unsqueeze(0).expand(2, *t.shape)
    return shape, tuple(t.shape), tuple(t.stride()), t.storage_offset()


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(geometry())
def test_chains_of_views_read_and_write_like_as_strided(chain):
    shape, size, stride, offset = chain
    memory, read, new, after = expected(shape, size, stride, offset)
    w = windows.Window(base(shape, torch.float32), size, stride, offset, torch.float32, -1)
    with pytest.MonkeyPatch.context() as patch:
        use_numpy(patch)
        assert np.array_equal(w.read(memory.numpy().view(Array)), read.numpy())
        if not overlaps(size, stride, offset, memory.numel()):
            assert np.array_equal(w.write(memory.numpy().view(Array), new.numpy().view(Array)), after.numpy())


# memory dtype, window dtype; the window then takes every second of its elements, from the first or the second on
REINTERPRETED = [
    (torch.float32, torch.int32), (torch.float32, torch.complex64), (torch.complex64, torch.float32),
    (torch.float32, torch.uint8), (torch.int64, torch.int16), (torch.uint8, torch.float64),
    (torch.float64, torch.complex128), (torch.complex128, torch.float64), (torch.bfloat16, torch.int16),
    (torch.float16, torch.bfloat16), (torch.int32, torch.bfloat16), (torch.uint8, torch.bool), (torch.bool, torch.int8),
    (torch.complex64, torch.int64), (torch.float64, torch.bool),
]  # fmt: skip


@pytest.mark.parametrize("source, target", REINTERPRETED, ids=str)
def test_windows_of_another_dtype(source, target):
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2 if torch.bool in (source, target) else 100, (48,), dtype=torch.uint8, generator=generator)
    memory = raw.view(source).clone()
    seen = memory.view(target)
    size, stride, offset = (seen.numel() // 2,), (2,), 1
    read = seen.as_strided(size, stride, offset).clone()
    new = read.flip(0)
    after = memory.clone()
    after.view(target).as_strided(size, stride, offset).copy_(new)
    got_read, got_after = run_xla(memory, size, stride, offset, new, target)
    assert same_bytes(got_read, read) and same_bytes(got_after, after)


def test_a_wider_dtype_over_memory_that_is_not_a_multiple_of_it():
    memory = torch.arange(11, dtype=torch.uint8)
    seen = memory[:8].view(torch.int32)
    new = torch.tensor([7, -7], dtype=torch.int32)
    after = memory.clone()
    after[:8].view(torch.int32).copy_(new)
    got_read, got_after = run_xla(memory, (2,), (1,), 0, new, torch.int32)
    assert torch.equal(got_read, seen) and torch.equal(got_after, after)


def as_bytes(t):
    return t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same_bytes(a, b) -> bool:
    return a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.lists(st.integers(0, 3), max_size=5), st.randoms(use_true_random=False))
def test_memory_order_finds_the_dense_permutations(size, rng):
    """Any permutation of a contiguous tensor is dense; a slice of it is not."""
    order = list(range(len(size)))
    rng.shuffle(order)
    t = torch.empty(size, device="meta").permute(order)
    found = memory_order(tuple(t.shape), t.stride())
    if 0 not in size:
        assert t.permute(found).is_contiguous()
    doubled = torch.empty([*size, 2], device="meta")[..., ::2].squeeze(-1)
    if doubled.numel() > 1:
        assert memory_order(tuple(doubled.shape), doubled.stride()) is None


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.lists(st.integers(0, 3), max_size=5))
def test_contiguous_strides_are_torchs(size):
    assert contiguous_strides(size) == torch.empty(size, device="meta").stride()
