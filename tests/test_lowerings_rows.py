"""The rows of lowering_rows.py: each lowering against the CPU's kernel, then the same calls on the device in every form."""

import warnings

import op_record
import pytest
import torch
from lowering_check import check_batches
from lowering_rows import FAMILIES, TOLERANCE
from torch.utils import _pytree as tree

import tpu_lab
from tpu_lab.backend import registry


@pytest.mark.parametrize("family", FAMILIES)
def test_lowering(family):
    check_batches(FAMILIES[family](), **TOLERANCE[family])


def forms(overload):
    """The overload and those that compute the same in place or into `out=`."""
    names = {overload.overloadpacket, getattr(torch.ops.aten, overload._schema.name.removeprefix("aten::") + "_", None)}
    every = [getattr(p, n) for p in names if p is not None for n in p.overloads()]
    return [overload, *(o for o in every if o is not overload and registry.functional(o) is overload)]


def moved(values, device):
    """Copies of all tensors; one that stands for a result that is to be resized stays one."""
    return tree.tree_map(lambda v: v.detach().clone().to(device) if isinstance(v, torch.Tensor) else v, values)


def one_a_kind(rows):
    """The first row of each op and kind of dtype: forms differ in the door, not in the values."""
    found = {}
    for overload, args, kwargs in rows:
        kinds = tuple((t.is_floating_point(), t.is_complex()) for t in tree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        found.setdefault((overload, kinds), (overload, args, kwargs))
    return found.values()


def empty_outs(form, results):
    """`out=` tensors for these results: empty ones that must be resized, but where the CPU's kernel adds to what is there."""
    sized = form is torch.ops.aten._compute_linear_combination.out
    made = tree.tree_map(lambda r: torch.zeros_like(r) if sized else torch.zeros(0, dtype=r.dtype), results)
    names = [a.name for a in form._schema.arguments if a.is_out]
    return dict(zip(names, made if len(names) > 1 else [made], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_device_in_every_form(family):
    with warnings.catch_warnings():
        warnings.simplefilter("error", tpu_lab.FallbackWarning)
        for overload, args, kwargs in one_a_kind(FAMILIES[family]()):
            for form in forms(overload):
                outs = {} if form is overload else empty_outs(form, overload(*moved(args, "cpu"), **kwargs))
                ways = []
                for device in ("cpu", "tpu"):
                    given, named = moved(args, device), moved({**kwargs, **outs}, device)
                    ways.append((form(*given, **named), given, named))
                same(form, *ways, **TOLERANCE[family])


def same(form, want, got, **tolerance):
    """Equal results, and equal tensors after the call."""
    op_record.note(form, [got[1], list(got[2].values())])
    for i, (w, g) in enumerate(zip(tree.tree_leaves(want), tree.tree_leaves(got), strict=True)):
        if isinstance(w, torch.Tensor):
            assert g.device.type == "tpu", f"{form} leaf {i} is on {g.device}"
            g, w = (v.float() if v.dtype.itemsize == 1 and v.is_floating_point() else v for v in (g.cpu(), w))
            torch.testing.assert_close(
                g, w, **tolerance, equal_nan=True, check_stride=False, msg=lambda m: f"{form} leaf {i}\n{m}"
            )
