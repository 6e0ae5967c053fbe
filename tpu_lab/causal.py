"""Causal attention counts half: which FLOPs of the products that ran only make scores that a causal mask throws away.

`scaled_dot_product_attention(..., is_causal=True)` runs its two products over the whole square of queries and keys; the
model needs what is on and below the diagonal. So by the convention of MFU (user of FlashAttention's counts: Dao 2023,
arXiv 2307.08691, section 4.1) its products, forward and backward, count half as model FLOPs, and in full as work that ran
(HFU). The records show such a call as PyTorch's own steps: a `tril` of ones, a product, the mask added, a
`_safe_softmax`, a product; or as one op with `is_causal=True`. A mask that the user makes and applies by hand is any
mask: its products count in full, as nobody looks at its values.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpu_lab.hlo import dims
from tpu_lab.trace import LaunchRecord, OpRecord

_SOFTMAX, _MASK, _WHOLE = "aten._safe_softmax.default", "aten.tril.default", "scaled_dot_product"
_NEAR = 60  # records: the steps of one call are at most so far from its softmax


def masked(ops: Sequence[OpRecord], launches: Sequence[LaunchRecord] = ()) -> dict[int, int]:
    """OpRecord.index -> FLOPs of it that are work and no model FLOPs. launches: those that ran the ops."""
    compiled = {r.index for r in launches if r.mode == "compiled"}
    dropped: dict[int, float] = {}  # OpRecord.index of a product -> the share that its mask drops
    for at, r in enumerate(ops):
        if r.name == _SOFTMAX and r.inputs and len(sizes := dims(r.inputs[0])) > 1:
            if _is_causal(ops, at, sizes[-2:], r.launch in compiled):
                for product in _products(ops, at):
                    dropped[product.index] = _dropped(*sizes[-2:])
        elif _WHOLE in r.name and "is_causal=True" in r.static:
            first = "backward" in r.name  # the gradient comes before the query
            length, keys = (dims(aval)[-2] for aval in r.inputs[first : first + 2])
            dropped[r.index] = _dropped(length, keys)
    if not dropped:
        return {}
    out = {}
    for r in ops:
        share = dropped.get(r.index) or (dropped.get(r.forward) if r.forward is not None else None)
        if share and r.flops:
            out[r.index] = round(share * r.flops)
    return out


def _dropped(length: int, keys: int) -> float:
    """The share of a [length, keys] matrix above its diagonal: half of a square."""
    return keys / (2 * length) if 0 < keys <= length else 1 - length / (2 * keys) if keys else 0.0


def _near(ops: Sequence[OpRecord], at: int, step: int):
    """The records of the same line and module, from a softmax on in one direction, up to the next softmax."""
    here = ops[at]
    for i in range(at + step, at + step * _NEAR, step):
        if not 0 <= i < len(ops) or ops[i].name == _SOFTMAX:
            return
        if (ops[i].line, ops[i].file, ops[i].module) == (here.line, here.file, here.module):
            yield ops[i]


def _is_causal(ops: Sequence[OpRecord], at: int, square: tuple[int, ...], compiled: bool) -> bool:
    """Was a lower triangle of the scores' size made for it? In a compiled graph equal masks of several calls are one,
    so there it may be further up; but what is added to the scores must be such a mask."""

    def triangle(r: OpRecord) -> bool:
        return r.name == _MASK and not r.static and dims(r.outputs[0]) == square

    added = next((r for r in _near(ops, at, -1) if r.name.startswith("aten.add")), None)
    if added is None or len(added.inputs) != 2 or dims(added.inputs[1]) != square:
        return False
    if compiled:
        before = (ops[i] for i in range(at, -1, -1))
        for r in before:
            if r.launch != ops[at].launch:
                return False
            if triangle(r):
                return True
        return False
    return any(triangle(r) for r in _near(ops, at, -1))


def _products(ops: Sequence[OpRecord], at: int) -> list[OpRecord]:
    """The matmul that makes the scores and the one that reads the softmax."""
    wanted = _count(ops[at].inputs[0])
    scores = next((r for r in _near(ops, at, -1) if r.kind == "matmul" and _count(r.outputs[0]) == wanted), None)
    mixed = next((r for r in _near(ops, at, 1) if r.kind == "matmul" and _count(r.inputs[0]) == wanted), None)
    return [r for r in (scores, mixed) if r is not None]


def _count(aval: str) -> int:
    out = 1
    for size in dims(aval):
        out *= size
    return out
