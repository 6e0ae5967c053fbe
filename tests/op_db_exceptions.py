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

KNOWN = (
    Known("sparse_sampled_addmm", SPARSE),
    Known("sparse_mm_reduce", SPARSE),
)


def of(entry: str) -> list[Known]:
    return [k for k in KNOWN if k.entry == entry]
