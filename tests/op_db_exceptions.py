"""Entries of PyTorch's op database that are not as on the CPU, each with its reason.

An exception is strict: where it no longer fails, the tests fail and name it, so that it is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A difference that is known. Empty tuples match everything; `samples` are positions that the tests run, beyond their budget."""

    entry: str
    why: str
    forms: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()

    def covers(self, entry: str, dtype: str, form: str) -> bool:
        """Does it speak of this form of this entry?"""
        return (
            entry == self.entry and (not self.forms or form in self.forms) and (not self.dtypes or dtype in self.dtypes)
        )

    def explains(self, failure) -> bool:
        """Is this failure the known one?"""
        return (
            self.covers(failure.entry, failure.dtype, failure.form)
            and (not self.kinds or failure.kind in self.kinds)
            and (not self.samples or failure.sample in self.samples)
        )


SPARSE = "takes or gives sparse tensors, and the device holds dense ones"
STATISTICS = "the saved statistics are those of PyTorch's meta kernel (one a channel, float32); the CPU's are empty or half floats"
COLUMNS = "LAPACK on the CPU leaves its column order, which PyTorch does not promise; the values are the same"
TIES = "the CPU's sort gives equal numbers in any order where stable=False; the device keeps theirs"

KNOWN = (
    Known("sparse_sampled_addmm", SPARSE),
    Known("sparse_mm_reduce", SPARSE),
    Known("to_sparse", SPARSE),
    Known("chalf", "XLA has no complex numbers of half floats"),
    Known("native_batch_norm", STATISTICS, forms=("forward",), kinds=("shape", "dtype")),
    Known("_native_batch_norm_legit", STATISTICS, forms=("forward",), kinds=("shape", "dtype")),
    Known("_batch_norm_with_update", STATISTICS, forms=("forward",), dtypes=("bfloat16", "float16"), kinds=("values", "dtype")),
    Known("native_layer_norm", STATISTICS, forms=("forward",), dtypes=("bfloat16", "float16"), kinds=("dtype",)),
    Known("sort", TIES, forms=("forward",), dtypes=("bfloat16", "float16"), kinds=("values",)),
    Known("argsort", TIES, forms=("forward",), dtypes=("bfloat16", "float16"), kinds=("values",)),
    Known("kthvalue", TIES, forms=("forward",), dtypes=("int64", "int32", "uint8"), kinds=("values",)),
    Known("topk", TIES, forms=("forward",), dtypes=("int64", "int32", "uint8"), kinds=("values",)),
    *(Known(name, COLUMNS, forms=("forward",), kinds=("strides",)) for name in (
        "geqrf", "linalg_lstsq", "linalg_lstsq_grad_oriented")),
)  # fmt: skip


def of(entry: str) -> list[Known]:
    return [k for k in KNOWN if k.entry == entry]
