"""ATen's own test ops, which PyTorch's test suite calls to see how lists and numbers arrive."""

import jax.numpy as jnp
import torch

from tpu_lab.backend.registry import op

aten = torch.ops.aten


@op(aten._test_optional_intlist, aten._test_optional_filled_intlist, aten._test_optional_floatlist)
def add_list(values, addends):
    return values if addends is None else values + jnp.asarray(addends, values.dtype)


@op(aten._test_functorch_fallback)
def add_other(x, other):
    return x


@op(aten._foobar)
def same(x, arg1=True, arg2=True, *, arg3=True):
    return x
