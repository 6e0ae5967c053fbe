"""Layouts that the device does not hold: sparse, quantized, nested, mkldnn. One sentence each, from whatever op comes first."""

from __future__ import annotations

import torch

KEYS = {  # dispatch key of a tensor of that layout on this device -> what it is, and the way out
    "SparsePrivateUse1": ("sparse", "x.to_dense() first"),
    "SparseCsrPrivateUse1": ("sparse compressed (CSR, CSC, BSR, BSC)", "x.to_dense() first"),
    "QuantizedPrivateUse1": ("quantized", "x.dequantize() first"),
    "NestedTensorPrivateUse1": ("nested strided", "layout=torch.jagged, or pad the batch"),
}
_libraries: list = []


def refusal(kind: str, way_out: str) -> str:
    """The sentence."""
    return f"device 'tpu' holds dense tensors, and this one is {kind}: use {way_out}, or keep it on the CPU"


def check(tensor: torch.Tensor) -> None:
    """RuntimeError for a CPU tensor whose layout cannot come to the device."""
    if tensor.layout is not torch.strided:
        raise RuntimeError(refusal(str(tensor.layout).removeprefix("torch.").strip("_"), "x.to_dense() first"))


def apply() -> None:
    """Answer every op on such a tensor."""
    library = torch.library.Library("_", "IMPL")
    for key, (kind, way_out) in KEYS.items():
        library.fallback(_refusing(refusal(kind, way_out)), key)
    _libraries.append(library)


def _refusing(sentence: str):
    def kernel(overload, *args, **kwargs):
        raise RuntimeError(sentence)

    return kernel
