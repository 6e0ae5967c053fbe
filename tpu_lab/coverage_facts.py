"""What the table of ops says beside how an op is done: why one is not on the device, its gradient, its dtypes and test.

`OUTSIDE` are the ops of TorchTPU's lists without a dense CPU kernel to compare with. dtypes and tests are measured:
`TPU_LAB_OPS=tpu_lab/data/op_tests.csv pytest` writes down what the tests of the clone call (see tests/op_record.py).
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import re

SPARSE = "made for sparse layouts"
QUANTIZED = "made for quantized numbers, or for weights packed for one kind of CPU"
NESTED = "made for nested tensors"
MKLDNN = "made for the layouts of mkldnn"
NOWHERE = "the CPU has no kernel for it either"

_OUTSIDE = {
    SPARSE: "_to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr _spdiags sspaddmm "
    "_validate_compressed_sparse_indices",
    QUANTIZED: "quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic _make_per_channel_quantized_tensor "
    "_make_per_tensor_quantized_tensor quantized_gru quantized_lstm _weight_int4pack_mm_for_cpu "
    "_convert_weight_to_int4pack_for_cpu _dyn_quant_matmul_4bit _dyn_quant_pack_4bit_weight",
    NESTED: "_nested_from_padded_tensor _nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen "
    "_nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx _nested_get_values _nested_view_from_jagged "
    "_nested_compute_contiguous_strides_offsets _nested_from_padded _nested_tensor_from_mask _nested_view_from_buffer",
    MKLDNN: "mkldnn_rnn_layer mkldnn_rnn_layer_backward to_mkldnn",
    NOWHERE: "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward _scaled_grouped_mm",
}
OUTSIDE = {name: reason for reason, names in _OUTSIDE.items() for name in names.split()}


def why(name: str) -> str:
    """Why "aten.x.y" is done on the CPU or not at all; "" for one that is done on the device."""
    from tpu_lab.backend import host_bound

    short = name.removeprefix("aten.").removesuffix(".default")
    return OUTSIDE.get(short.split(".")[0]) or host_bound.REASONS.get(short, "")


# --- gradients -------------------------------------------------------------------------------------------------------


@functools.cache
def _formulas() -> frozenset[str]:
    """The overloads with a derivative in PyTorch's derivatives.yaml, as "mul.Tensor"."""
    file = importlib.resources.files("torchgen") / "packaged" / "autograd" / "derivatives.yaml"
    found = set()
    for entry in re.split(r"^- name: ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        rules = re.findall(r"^  ([\w, ]+): *(.*)$", entry, flags=re.MULTILINE)
        said = [rule for key, rule in rules if key not in ("output_differentiability", "result", "dispatch")]
        if any(not rule.startswith(("non_differentiable", "not_implemented")) for rule in said):
            found.add(entry.split("(")[0].strip())
    return frozenset(found)


def gradient(name: str, how: str) -> str:
    """ "formula": PyTorch's own derivative, which runs on the device; "parts": that of the ops it is made of; "" for none.

    An `out=` form has none, as in PyTorch; an in-place form has that of its functional twin.
    """
    from tpu_lab.backend import registry
    from tpu_lab.coverage import _overload

    overload = _overload(name)
    if overload is None or any(a.is_out for a in overload._schema.arguments):
        return ""
    if how == "composite":
        return "parts"
    twin = registry.functional(overload) or overload
    names = (o.name().removeprefix("aten::") for o in (overload, twin))
    return "formula" if any(n in _formulas() for n in names) else ""


# --- what the tests saw ------------------------------------------------------------------------------------------------


@functools.cache
def _seen() -> dict[str, dict]:
    file = importlib.resources.files("tpu_lab") / "data" / "op_tests.csv"
    if not file.is_file():
        return {}
    return {row["op"]: row for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines())}


def dtypes(name: str) -> str:
    """The dtypes with which the tests call it: "bf16 f32 i64"."""
    return _row(name).get("dtypes", "")


def test(name: str) -> str:
    """The test that exercises it first: "test_lowerings_a.py::test_unary"; "" if none does."""
    return _row(name).get("test", "")


def _row(name: str) -> dict:
    return _seen().get(name, {})
