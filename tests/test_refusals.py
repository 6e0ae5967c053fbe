"""Values that PyTorch refuses are refused in its words: at the call if the host knows them, else where the host waits."""

import pytest
import torch

import tpu_lab  # noqa: F401  registers the device
from tpu_lab.backend import refusals

NUMBERS = """
x // 0 | x % 0 | torch.fmod(x, 0) | torch.div(x, 0, rounding_mode="trunc") | x.floor_divide_(0) | x.remainder_(0) | x / 0
x[:0] // 0 | x.float() // 0 | x.bool() // 0 | x.fill_(200) | x.fill_(-129) | x.fill_(1e10) | x.fill_(float("inf"))
x.fill_(float("nan")) | x.byte().fill_(-255) | x.byte().fill_(-256) | x.byte().fill_(-1.0) | x.bool().fill_(7)
x.half().fill_(1e10) | x[:1].half().fill_(1e10) | x[:1].half().masked_fill(x[:1] > 0, 1e10) | x.half().__setitem__(0, 1e10)
x.half().fill_(float("-inf")) | x.half().masked_fill_(x > 0, -1e9) | x.float().fill_(1e300)
torch.full((2,), 300, dtype=torch.uint8, device=x.device) | torch.full((2,), 1e300, device=x.device)
torch.full_like(x, 200) | x.new_full((2,), 200) | x.__setitem__(0, 200) | x.masked_fill(x > 0, 200)
x.index_fill(0, (x - 1).long(), 200) | torch.scalar_tensor(200, dtype=torch.int8, device=x.device) | x.clamp(max=200)
x.clamp(min=-200, max=5) | x.clamp(max=1e10) | x + 300
""".replace("\n", "|").split("|")


@pytest.mark.parametrize("call", [call.strip() for call in NUMBERS if call.strip()])
def test_a_number_is_taken_or_refused_as_on_the_cpu(call):
    found = []
    for device in ("cpu", "tpu"):
        try:
            out = eval(call, {"torch": torch, "x": torch.tensor([1, 2], dtype=torch.int8).to(device)})
            found.append(out if out is None else (out.dtype, str(out.cpu().tolist())))
        except RuntimeError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_a_number_is_looked_at_at_each_call_whatever_the_size():
    x = torch.zeros(2_000_000, dtype=torch.float16, device="tpu")
    x.fill_(6e4)
    with pytest.raises(RuntimeError, match="cannot be converted to type c10::Half without overflow"):
        x.fill_(7e4)
    assert refusals.overflows(128, torch.int8) and not refusals.overflows(-128, torch.int8)


@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
@pytest.mark.parametrize(
    "call, words",
    [
        ("x // zero", "ZeroDivisionError"),
        ("x % zero", "ZeroDivisionError"),
        ("torch.fmod(x, zero)", "ZeroDivisionError"),
        ("x.floor_divide_(zero)", "ZeroDivisionError"),
        ("torch.div(x, zero, rounding_mode='floor')", "ZeroDivisionError"),
        ("torch.multinomial(x.float() - 1.5, 1)", "probability tensor contains either `inf`, `nan` or element < 0"),
        ("torch.multinomial(x.float() - x, 1)", r"invalid multinomial distribution \(sum of probabilities <= 0\)"),
    ],
)
def test_values_on_the_device_are_refused_where_the_host_waits(mode, call, words):
    with torch.tpu.set_eager_mode({"fused": 0, "strict": 1, "debug": 2}[mode]):
        names = {"torch": torch, "x": torch.tensor([1, 2]).to("tpu"), "zero": torch.tensor([1, 0]).to("tpu")}
        with pytest.raises(RuntimeError, match=words) as caught:
            out = eval(call, names)
            assert mode != "debug", "debug mode raises at the op"
            out.cpu()
        assert not isinstance(caught.value, IndexError)
        assert (torch.tensor([1, 2]).to("tpu") // 2).tolist() == [0, 1]  # told once


def test_what_divides_well_or_is_a_float_is_not_refused():
    x, f = torch.tensor([7, -7]).to("tpu"), torch.tensor([1.0, 0.0]).to("tpu")
    assert (x // torch.tensor([2, 2]).to("tpu")).tolist() == [3, -4]
    assert (x // f).tolist() == [7.0, float("-inf")]
    assert torch.div(x, torch.tensor([1, 0]).to("tpu")).tolist() == [7.0, float("-inf")]


@pytest.mark.parametrize("call", ["torch.index_select(x, 0, i)", "x.index_add(0, i, x)", "x.index_copy(0, i, x)"])
def test_an_index_of_floats_is_refused(call):
    words = []
    for device in ("cpu", "tpu"):
        with pytest.raises((RuntimeError, IndexError)) as caught:
            eval(call, {"torch": torch, "x": torch.tensor([1.0, 2.0]).to(device), "i": torch.tensor([0.0, 1.0]).to(device)})
        words.append(str(caught.value))
    assert words[0] == words[1]


def test_mixed_devices_say_which_argument_lies_where():
    with pytest.raises(RuntimeError, match=r"same device.*\(aten.mm.default: self on tpu:0, mat2 on cpu\)"):
        torch.mm(torch.ones(2, 2, device="tpu"), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"aten.cat.default: tensors on cpu and tpu:0"):
        torch.cat([torch.ones(2, device="tpu"), torch.ones(2)])


CHECKED = {
    "cholesky_ex": lambda a: torch.linalg.cholesky_ex(a, check_errors=True).L,
    "cholesky_ex.out": lambda a: torch.linalg.cholesky_ex(a, check_errors=True, out=(a.clone(), a[..., 0, 0].int())).L,
    "inv_ex": lambda a: torch.linalg.inv_ex(a, check_errors=True).inverse,
    "lu_factor_ex": lambda a: torch.linalg.lu_factor_ex(a, check_errors=True).LU,
    "solve_ex": lambda a: torch.linalg.solve_ex(a, a, check_errors=True).result,
    "ldl_factor_ex": lambda a: torch.linalg.ldl_factor_ex(a, check_errors=True).LD,
}


@pytest.mark.parametrize("mode", ["strict", "fused"])
@pytest.mark.parametrize("name", CHECKED)
def test_a_factorisation_that_checks_refuses_a_singular_matrix(mode, name):
    good = torch.eye(2)
    for a in (torch.zeros(2, 2), torch.stack([good, torch.zeros(2, 2)])):
        words = []
        for device in ("cpu", "tpu"):
            with torch.tpu.set_eager_mode(mode), pytest.raises(RuntimeError) as caught:
                CHECKED[name](a.to(device))
            words.append((type(caught.value), str(caught.value)))
        assert words[0] == words[1]
    torch.testing.assert_close(CHECKED[name](good.to("tpu")).cpu(), CHECKED[name](good))
