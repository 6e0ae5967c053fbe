"""Views and in-place writes behave like memory: random programs against CPU PyTorch in all eager modes, and named cases."""

import random

import pytest
import torch
import view_programs
from hypothesis import given, settings

import tpu_lab  # noqa: F401  registers the device


@pytest.fixture(params=["strict", "fused"])
def mode(request):
    with torch.tpu.set_eager_mode({"strict": 1, "fused": 0}[request.param]):
        yield request.param


def random_programs(share):
    """The test takes programs: this share of the examples that the Hypothesis profile asks for."""
    examples = max(1, round(settings.default.max_examples * share))
    return lambda test: settings(max_examples=examples)(given(view_programs.programs())(test))


def check(program, value):
    with torch.tpu.set_eager_mode(value):
        found = view_programs.difference(program)
    assert found is None, found


@random_programs(1)
def test_random_programs_in_strict_mode(program):
    check(program, 1)


@random_programs(0.4)
def test_random_programs_in_fused_mode(program):
    check(program, 0)


@random_programs(0.1)
def test_random_programs_in_debug_mode(program):
    check(program, 2)


def test_the_programs_cover_what_they_should():
    """Each view and write of the lists above is drawn somewhere and goes through; few lines fail."""
    lines, failed, rng = [], 0, random.Random(0)
    for _ in range(150):
        choices = [
            view_programs.Choice(rng.choice(view_programs.KINDS), *(rng.randrange(10_000) for _ in range(3))) for _ in range(16)
        ]
        trail, _ = view_programs.run(view_programs.write(choices), "cpu")
        lines += [line for line, error, _ in trail if error is None]
        failed += sum(error is not None for _, error, _ in trail)
    text = "\n".join(lines)
    for what in """.view( .reshape( ::2] .select( .narrow( .transpose( .permute( .t() .mT .expand( .unsqueeze( .squeeze(
        .diagonal( .unfold( .as_strided( .chunk( .split( .unbind( .unflatten( .flatten( .movedim( .swapaxes( .view(torch.int32)
        view_as_complex view_as_real .real .imag .conj() .detach() .data .add_( .mul_( .fill_( .zero_( .copy_( masked_fill_(
        index_put_( index_add_( index_copy_( index_fill_( scatter_( out= .set_( place( resize( .t_() .transpose_( .unsqueeze_(
        .squeeze_( swapaxes_ .item() .cpu() .tolist() del""".split():
        assert what in text, what
    assert 0 < failed < len(lines) / 10


# --- named cases --------------------------------------------------------------------------------------------------


def both(f):
    """f(device) on the CPU and on tpu: equal values, geometry and version counters of all tensors it returns."""
    out = []
    for device in ("cpu", "tpu"):
        try:
            tensors = f(device)
        except Exception as error:
            out.append((type(error), str(error)))
            continue
        out.append(
            [(t.detach().cpu().tolist(), t.shape, t.stride(), t.storage_offset(), t._version, t.untyped_storage().nbytes()) for t in tensors]
        )
    assert out[0] == out[1]
    return out[0]


def arange(n, device):
    return torch.arange(float(n)).to(device)


def test_growing_a_storage_keeps_it_shared(mode):
    def grow(device):
        x = arange(4, device)
        view = x[1:3]
        x.resize_(8)[4:] = 0
        view.add_(1)
        x.mul_(2)
        return x, view

    def grow_the_view(device):
        x = arange(4, device)
        view = x[2:]
        view.resize_(4)[2:] = 0
        x.add_(1)
        return x, view

    both(grow)
    both(grow_the_view)


def test_set_to_a_storage_that_is_too_small_makes_it_grow(mode):
    def run(device):
        x, y, z = arange(3, device), arange(2, device), torch.empty(0, device=device)
        x.set_(y.untyped_storage(), 1, (4,), (1,))[1:] = 5
        z.set_(z.untyped_storage(), 1, (2, 2), (2, 1)).fill_(1)
        return x, y, z

    both(run)


def test_storage_resize_as_fsdp_uses_it(mode):
    x = arange(6, "tpu")
    view, storage = x[2:], x.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0 and view.untyped_storage().nbytes() == 0 and x.shape == (6,)
    storage.resize_(24)
    x.copy_(torch.arange(6.0))
    assert view.tolist() == [2.0, 3.0, 4.0, 5.0]
    storage.resize_(48)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_conjugate_views_write_through(mode):
    def conjugate(device):
        z = torch.view_as_complex(arange(6, device).view(3, 2))
        c = z.conj()
        c.add_(1j)
        c[0].copy_(torch.tensor(3 + 4j))
        z.mul_(2)
        c.imag.mul_(2)
        return z, c, c.clone(), c.imag, c.resolve_conj(), torch.dot(c, z).reshape(1), (c[:, None] @ c[None]), c.imag.clone()

    both(conjugate)


def test_lazy_conjugates_and_negatives_are_printed_as_their_values(mode):
    z = torch.complex(arange(3, "tpu"), arange(3, "tpu") + 1)
    for lazy in (z.conj(), z.conj().imag, z[:1].conj().imag, torch._neg_view(arange(1, "tpu"))):
        assert str(lazy).replace(", device='tpu:0'", "") == str(lazy.cpu())


@pytest.mark.parametrize(
    "line",
    [
        "x[1:4].copy_(x[0:3])",
        "x[1:].add_(x[:-1])",
        "torch.add(x[:3], 1, out=x[1:4])",
        "x[:1].expand(4).add_(1)",
        "x.index_add_(0, torch.arange(6).to(dev), x)",
        "x.as_strided((2, 4), (1, 2), 1)",
        "x.add_(torch.ones(2, 6, device=dev))",
        "x.to(torch.int64).add_(1.5)",
        "torch.mul(x, torch.ones(2, 6, device=dev), out=x)",
        "torch.neg(x, out=torch.zeros(6, dtype=torch.float64, device=dev))",
        "x.set_(x.untyped_storage(), 1, (6,), (1,))",
        "x.view(4, 2)",
        "x.view(2, 3).t().view(6)",
        "torch.mm(x.view(2, 3), x.view(2, 3))",
        "x.copy_(torch.ones(4))",
        "x[::2].view(torch.float64)",
    ],
)
def test_the_same_error_as_on_the_cpu(mode, line):
    def run(device):
        x = arange(6, device)
        eval(line, {"torch": torch, "x": x, "dev": device})
        return ()

    with pytest.raises(Exception) as want:
        run("cpu")
    with pytest.raises(want.type):
        run("tpu")


def test_writing_through_expanded_tensors_that_pytorch_still_allows(mode):
    """R14: what any of the elements that share a place is given, is kept."""

    def run(device):
        a, b, c, d = (arange(3, device) for _ in range(4))
        mask = torch.tensor([[True, False, False], [False, True, False]]).to(device)
        a.expand(2, 3).masked_fill_(mask, 7)
        b.expand(2, 3).index_fill_(0, torch.tensor([0]).to(device), 5)
        c.expand(2, 3).zero_()
        d[1:].expand(2, 2)[torch.tensor([1]).to(device)] = 8
        return a, b, c, d

    with pytest.warns(UserWarning):
        both(run)


def test_an_old_view_keeps_the_old_memory_after_data_is_rebound(mode):
    """R1: `x.data = y` is not an in-place write."""

    def run(device):
        x = arange(6, device)
        view = x[2:4]
        x.data = arange(3, device) * 5
        view.add_(1)
        x.data.mul_(2)
        return x, view

    both(run)


def test_strided_slices_and_out_views_reach_their_base(mode):
    """R3, R4, R12."""

    def run(device):
        x, cpu = torch.zeros(4, 6, device=device), torch.arange(6.0)
        x[1, ::2].copy_(cpu[1::2])
        x[::2, 1:3].copy_(torch.ones(2, 2, device=device))
        torch.add(arange(6, device), 1, out=x[3])
        torch.mul(arange(6, device).view(2, 3), 2, out=x.view(2, 12)[:, 3:9:2])
        out = x.t()[2:4]
        torch.add(out, 1, out=out)
        back = torch.zeros(6)
        back[::2].copy_(x[1, 1::2])
        return x, out, back

    both(run)


def test_in_place_on_views_under_autograd(mode):
    """R13: the gradient sees a zeroed block, and a view made before the write."""

    def run(device):
        w = arange(12, device).view(3, 4).requires_grad_()
        y = arange(6, device).view(2, 3) @ w
        tail = y[:, 1:]
        y[:, 2:] = 0
        tail[0].mul_(3)
        (y * y + tail.sum()).sum().backward()
        return w.grad, y.detach(), tail.detach()

    both(run)


def test_writes_to_views_of_nothing(mode):
    def run(device):
        x = torch.empty(0, device=device)
        x.expand(2, 0).copy_(torch.tensor(5))
        x.expand(3, 0).t().copy_(torch.ones(0, 3))
        return x, torch.empty(0, 3, device=device).to(device).t(), torch.ones(2, 0).to(device)

    both(run)


def test_saved_tensors_notice_a_write(mode):
    x = arange(3, "tpu").requires_grad_()
    y = x * 1
    z = y * y
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_wider_dtype_over_an_odd_number_of_bytes(mode):
    def run(device):
        x = torch.arange(11, dtype=torch.uint8).to(device)
        v = x[:8].view(torch.int32)
        v.add_(1)
        return x, v, v[0:1]

    both(run)
