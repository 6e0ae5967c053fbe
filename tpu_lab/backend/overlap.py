"""Memory that is read and written by one op: PyTorch's rules for what is an error, so that programs fail alike.

A result over immutable arrays would be well defined, but another one than the CPU's, which refuses. The rules are those
of `ATen/MemoryOverlap.cpp`: only dense tensors are compared, by the bytes they span.
"""

from __future__ import annotations

from tpu_lab.backend.window import Window, memory_order

INTERNAL = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)
PARTIAL = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
    "location. Please clone() the tensor before performing the operation."
)
# These refuse an input that is the written tensor itself, too.
APART = frozenset(
    """index_add_ index_copy_ index_fill_ index_put_ scatter_ scatter_add_ scatter_reduce_ masked_scatter_ put_
    gather index_select cat take masked_select kthvalue""".split()
)
# A broadcast target is only deprecated here: `Window.write` keeps what the op changed.
ALLOWED = frozenset("zero_ fill_ masked_fill_ index_fill_ index_put_ _index_put_impl_".split())


def check(record, windows: list[Window], writes: list[int], alias) -> None:
    """RuntimeError if a written tensor overlaps itself or, where PyTorch forbids it, another argument.

    alias[i] is the first tensor on the same storage as tensor i.
    """
    name = record.schema.name.removeprefix("aten::")
    for i in writes:
        if windows[i].broadcast and windows[i].numel and name not in ALLOWED:
            raise RuntimeError(INTERNAL)
        for j, other in enumerate(windows):
            if j == i or alias[j] != alias[i]:
                continue
            status = compare(windows[i], other)
            if (status == "partial" and (record.kind == "elementwise" or name == "copy_")) or (status and name in APART):
                raise RuntimeError(PARTIAL)


def compare(a: Window, b: Window) -> str:
    """ "full" | "partial" | "": how two windows of one storage overlap; "" also where it is too hard to say."""
    if a is b:
        return "full"
    if not a.numel or not b.numel or memory_order(a.size, a.stride) is None or memory_order(b.size, b.stride) is None:
        return ""
    spans = [(w.offset * w.dtype.itemsize, (w.offset + w.numel) * w.dtype.itemsize) for w in (a, b)]
    if spans[0] == spans[1]:
        return "full" if a.stride == b.stride else "partial"
    return "partial" if spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1] else ""
