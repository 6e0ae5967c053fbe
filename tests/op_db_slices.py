"""What the tests run of PyTorch's op database: each entry a test, in slices of one file each."""

from __future__ import annotations

import op_db
import op_db_exceptions
import pytest
import torch

SLICES = 4


def entries(part: int) -> list[str]:
    """Every SLICES-th name of the database."""
    return list(op_db.ENTRIES)[part::SLICES]


def check(name: str) -> None:
    """All of op_db.PLAN for one entry: nothing fails but what op_db_exceptions.py says, and all of that does."""
    op = op_db.ENTRIES[name]
    known, seen, wrong, ran = op_db_exceptions.of(name), set(), [], set()
    for word, form, mode, budget in op_db.PLAN:
        dtype = getattr(torch, word)
        if form not in op_db.possible(op, dtype):
            continue
        about = [k for k in known if k.covers(name, word, form)]
        also = sorted({i for k in about for i in k.samples})
        count, failures = op_db.check(op, dtype, form, mode, budget, also)
        ran.update(about if count else ())
        for failure in failures:
            why = [k for k in about if k.explains(failure)]
            seen.update(why)
            if not why:
                wrong.append(str(failure))
    gone = [k for k in ran if k not in seen]
    assert not wrong, "\n".join(wrong)
    assert not gone, f"these exceptions of op_db_exceptions.py no longer fail, delete them: {gone}"


def made_test(part: int):
    """The test function of a slice."""

    @pytest.mark.parametrize("name", entries(part))
    @pytest.mark.filterwarnings("ignore")
    def test_entry(name):
        check(name)

    return test_entry
