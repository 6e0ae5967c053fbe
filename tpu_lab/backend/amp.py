"""`torch.autocast("tpu")`: the op lists of PyTorch's CUDA autocast (docs: torch.amp, "Autocast Op Reference"), bfloat16 by default.

A dispatch key of its own sits above autograd while autocast is on, so each cast is differentiated. A Python kernel there
casts the floating point tensors and calls the op again below that key; ops on no list fall through.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

# Cast to the autocast dtype: what a matrix unit does.
LOWER = """_convolution.deprecated _convolution conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell
gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention""".split()
# Cast to float32: where half types lose too much.
FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d nll_loss_nd
cross_entropy_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist
cdist renorm logsumexp rms_norm norm.Scalar norm.ScalarOpt_dim""".split()
# Their result is float32 unless the caller names a dtype.
FLOAT32_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()
# Several inputs of different floating dtypes: all to the widest.
WIDEST = """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add""".split()

_libraries: list = []


def apply() -> None:
    """Register the fallthrough and the casting kernels, and make bfloat16 the default."""
    torch.set_autocast_dtype("tpu", torch.bfloat16)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for names, wrap in ((LOWER, _lower), (FLOAT32, _float32), (FLOAT32_RESULT, _float32_result), (WIDEST, _widest)):
        for name in names:
            packet, _, which = name.partition(".")
            overload = getattr(getattr(aten, packet), which or "default")
            library.impl(overload, wrap(overload), "AutocastPrivateUse1")
    library.impl(aten.binary_cross_entropy.default, _refused, "AutocastPrivateUse1")
    _libraries.extend((everything, library))


def _castable(value) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "tpu"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value, dtype):
    """All float32 and half tensors on "tpu" inside a nest of lists, in another dtype; everything else as it is."""
    if _castable(value):
        return value if value.dtype is dtype else value.to(dtype)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([_cast(v, dtype) for v in value])
    return value


def _tensors(values):
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif _castable(value):
            yield value


def _call(overload, args, kwargs, dtype=None):
    with torch._C._ExcludeDispatchKeyGuard(_KEY):
        if dtype is not None:
            args, kwargs = _cast(tuple(args), dtype), {k: _cast(v, dtype) for k, v in kwargs.items()}
        return overload(*args, **kwargs)


def _lower(overload):
    return lambda *args, **kwargs: _call(overload, args, kwargs, torch.get_autocast_dtype("tpu"))


def _float32(overload):
    return lambda *args, **kwargs: _call(overload, args, kwargs, torch.float32)


def _float32_result(overload):
    at = next(i for i, a in enumerate(overload._schema.arguments) if a.name == "dtype")

    def kernel(*args, **kwargs):
        given = kwargs.get("dtype") if len(args) <= at else args[at]
        if given is None and _castable(args[0]) and args[0].dtype is not torch.float32:
            if len(args) > at:
                args = (*args[:at], torch.float32, *args[at + 1 :])
            else:
                kwargs = {**kwargs, "dtype": torch.float32}
        return _call(overload, args, kwargs)

    return kernel


def _widest(overload):
    def kernel(*args, **kwargs):
        dtype = torch.get_autocast_dtype("tpu")
        for tensor in _tensors((*args, *kwargs.values())):
            dtype = torch.promote_types(dtype, tensor.dtype)
        return _call(overload, args, kwargs, dtype)

    return kernel


def _refused(*args, **kwargs):
    """float16 outputs of a sigmoid can be exactly 0 or 1, whose logarithm is not finite: as on CUDA."""
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
        "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which take the logits and are safe"
    )
