"""Ops that need values on the host by their nature, each with the reason: the one table of CPU fallbacks.

The size of the result is data, the op is a check that raises at its line, or XLA has no algorithm for it. They run on
the CPU without a warning, cost two copies, and show as such in every trace. `QUESTIONS` are answered by the host from
what it knows without any value.
"""

from __future__ import annotations

import torch

from tpu_lab.backend import host, storage

aten = torch.ops.aten

SIZE = "the size of its result depends on the values"
CHECK = "it is a check that raises at its line"
EIGEN = "eigenvalues of a general matrix, for which XLA has no algorithm on TPUs"
REASONS = {
    "nonzero": SIZE, "masked_select": SIZE, "_unique": SIZE, "_unique2": SIZE, "unique_dim": SIZE,
    "unique_consecutive": SIZE, "unique_dim_consecutive": SIZE, "bincount": SIZE, "repeat_interleave.Tensor": SIZE,
    "_assert_async": CHECK, "_assert_async.msg": CHECK, "_functional_assert_async.msg": CHECK,
    "_linalg_eigvals": EIGEN, "linalg_eigvals.out": EIGEN, "linalg_eig": EIGEN, "linalg_eig.out": EIGEN,
    "nonzero.out": SIZE, "masked_select.out": SIZE,
}  # fmt: skip


def _set_to(self, tensor) -> bool:
    """Are the two one view of one storage?"""
    same = self.shape == tensor.shape and self.stride() == tensor.stride()
    return same and self.storage_offset() == tensor.storage_offset() and storage.cell(self) is storage.cell(tensor)


def _lengths(overload):
    """CTC with lengths on the device: they are shapes of the program, so the host reads them first."""

    def kernel(*args, **kwargs):
        args = list(args)
        at = [a.name for a in overload._schema.arguments].index("input_lengths")
        args[at : at + 2] = [t.tolist() for t in args[at : at + 2]]
        return overload.overloadpacket.default(*args, **kwargs)

    return kernel


def _to_jagged(lowered):
    """The number of rows is the last offset, unless the caller knows it."""

    def kernel(dense, offsets, total_L=None):
        return lowered(dense, offsets, host.item(offsets[0][-1]) if total_L is None else total_L)

    return kernel


def kernels(door) -> dict:
    """The kernel of each overload that asks the host for a number first, or needs none. door: as in kernels.py."""
    return {
        aten.is_set_to.default: _set_to,
        aten._fused_sdp_choice.default: lambda *args, **kwargs: 0,  # the plain products and softmax, which XLA fuses
        # torch's encoder asks whether to build a nested tensor of the padded batch: the device has none
        aten._nested_tensor_from_mask_left_aligned.default: lambda t, mask: False,
        aten._ctc_loss.Tensor: _lengths(aten._ctc_loss.Tensor),
        aten._ctc_loss_backward.Tensor: _lengths(aten._ctc_loss_backward.Tensor),
        aten._padded_dense_to_jagged_forward.default: _to_jagged(door(aten._padded_dense_to_jagged_forward.default)),
    }


QUESTIONS = frozenset({"is_set_to", "_fused_sdp_choice", "_nested_tensor_from_mask_left_aligned"})
READ_FIRST = frozenset({"_ctc_loss.Tensor", "_ctc_loss_backward.Tensor", "_padded_dense_to_jagged_forward"})
