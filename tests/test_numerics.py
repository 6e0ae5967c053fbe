"""find_nonfinite names the op that made the first NaN or inf; compare ranks modules by their error against the CPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from safe_page import check_page
from torch import nn

import tpu_lab
from tpu_lab import trace
from tpu_lab.backend import executor, fallback, state
from tpu_lab.models import mingpt

INF = float("inf")


def leaf(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).to("tpu").requires_grad_()


# --- find_nonfinite ---------------------------------------------------------------------------------------------------


def exp_too_large():
    x = leaf(1.0, 104.0)
    return (x * 1.0).exp()  # here: exp


CASES = {  # what to run -> what the title says
    "exp": (exp_too_large, r"^inf first appears in exp at test_numerics.py:\d+: input up to 104, above 88.7$"),
    "half": (lambda: leaf(12.0, dtype=torch.float16).exp(), r"inf first appears in exp at .*: input up to 12.0, above 11.1"),
    "log of 0": (lambda: leaf(0.0, 2.0).log(), "^\u2212inf first appears in log at .*: input of 0$"),
    "log below 0": (lambda: leaf(-3.0, 2.0).log(), "^NaN first appears in log at .*: input down to \u22123.00, below 0$"),
    "divisor": (lambda: leaf(1.0, 2.0) / leaf(0.0, 1.0), r"^inf first appears in div at .*: divisor 0 in 1 place$"),
    "number": (lambda: leaf(1.0, 2.0).detach().div_(0), r"^inf first appears in div_ at .*: divided by the number 0$"),
    "number in a list": (lambda: torch._foreach_div([leaf(1.0)], [0.0]), "inf first appears in _foreach_div at .*: divided by the number 0"),
    "rest": (lambda: leaf(1.0, 2.0) % 0, r"^NaN first appears in remainder at .*: divided by the number 0$"),
    "third": (lambda: torch.addcdiv(leaf(1.0), leaf(1.0), leaf(0.0)), "inf first appears in addcdiv at .*: divisor 0 in 1 place"),
    "0/0": (lambda: leaf(0.0) / leaf(0.0), "NaN first appears in div at .*: 0 divided by 0"),
    "backward of sqrt": (lambda: leaf(0.0, 1.0).sqrt().sum().backward(), "inf first appears in div, backward of sqrt at .*: divisor 0"),
    "overflow": (lambda: leaf(3e38) * 2, r"inf first appears in mul at .*: inputs up to 3.00e38; f32 ends at 3.40e38"),
    "half matmul": (
        lambda: torch.full((2, 64), 100.0, dtype=torch.float16, device="tpu") @ torch.full((64, 2), 100.0, dtype=torch.float16, device="tpu"),
        "inf first appears in mm at .*: inputs up to 100; f16 ends at 65,504",
    ),
    "in place": (lambda: leaf(1.0, 200.0).detach()[1:].exp_(), "inf first appears in exp_ at .*: input up to 200"),
    "masked rows": (
        lambda: leaf(1.0, 2.0).masked_fill(torch.tensor([True, True], device="tpu"), -INF).softmax(0),
        "NaN first appears in _softmax at .*: a row of nothing but \u2212inf",
    ),
    "inf - inf": (lambda: leaf(INF) - leaf(INF), "NaN first appears in sub at .*: inf minus inf"),
    "on the CPU": (lambda: torch.special.airy_ai(leaf(math.nan).detach()), "NaN came in with the data: first handed on by special_airy_ai"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::tpu_lab.FallbackWarning")
def test_the_title_names_the_op_its_line_and_the_range(case):
    import re

    fn, title = CASES[case]
    found = tpu_lab.find_nonfinite(fn)
    assert re.search(title, found.title), found.title
    check_page(found)


def test_the_line_is_the_users_and_the_rows_hold_the_ranges_and_the_way_there():
    found = tpu_lab.find_nonfinite(exp_too_large)
    rows = found.rows
    assert rows.code.iloc[0] == "return (x * 1.0).exp()  # here: exp"
    culprit = rows[rows.back == 0].set_index("tensor")
    assert (culprit.loc["self", "low"], culprit.loc["self", "high"], culprit.loc["self", "inf"]) == (1, 104, 0)
    assert culprit.loc["result", "inf"] == 1 and culprit.loc["result", "high"] == pytest.approx(math.e, rel=1e-6)
    assert rows[rows.back == 1].name.tolist() == ["mul", "mul"]  # it made the 104


def test_a_mask_of_minus_inf_is_deliberate():
    def attention():
        scores = leaf(1.0, 2.0, 3.0)
        full = torch.full((3, 3), -INF, device="tpu").triu(1)
        one = (scores + full).softmax(-1)
        two = scores.masked_fill(torch.tensor([False, True, True], device="tpu"), -INF).softmax(-1)
        three = torch.where(torch.tensor([True, False, False], device="tpu"), scores, -INF).softmax(-1)
        (one.sum() + two[0] + three[0]).backward()

    found = tpu_lab.find_nonfinite(attention)
    assert len(found) == 0 and found.title.startswith("No op makes NaN or inf: ")
    assert "forward and backward" in found.title and "Nearest to their dtype" in found.text()
    check_page(found)


def test_a_model_names_its_module_forward_and_backward():
    class Bad(nn.Module):
        def forward(self, x):
            return (x - x.detach()).sqrt()

    model = nn.Sequential(nn.Linear(3, 3), Bad(), nn.Linear(3, 1)).to("tpu")
    x = torch.randn(2, 3).to("tpu")
    found = tpu_lab.find_nonfinite(lambda x: model(x).sum().backward(), x)
    assert "div, backward of sqrt at test_numerics.py:" in found.title
    row = found.rows.iloc[0]
    assert (row.module, row.phase, row.forward) == ("1", "backward", "sqrt")
    assert "module 1" in found.text()


def test_a_healthy_model_has_nothing_and_its_parameters_learn_as_always():
    config = mingpt.Config.tiny()
    model, batch = mingpt.Model(config).to("tpu"), [t.to("tpu") for t in mingpt.batch(config, 2)]
    found = tpu_lab.find_nonfinite(lambda: mingpt.loss(model, *batch).backward())
    assert len(found) == 0
    assert all(torch.isfinite(p.grad.cpu()).all() for p in model.parameters())


def test_compiled_code_is_looked_into():
    @torch.compile(backend="tpu")
    def f(x):
        return (x * 2).exp().sum()

    f(leaf(1.0, 60.0))  # compiled before: the tool still sees its ops
    found = tpu_lab.find_nonfinite(f, leaf(1.0, 60.0))
    assert found.title.startswith("inf first appears in exp")
    assert f(leaf(0.0, 0.0)).item() == 2


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_is_left_behind_and_errors_go_through(fused):
    before = executor.run, executor.resolve, fallback.run, state.mode(), executor.watched
    with torch.tpu.set_eager_mode(0 if fused else 1):
        waiting = leaf(1.0) + 1
        with pytest.raises(ZeroDivisionError):
            tpu_lab.find_nonfinite(lambda: (waiting + 1, 1 / 0))
        found = tpu_lab.find_nonfinite(lambda: (leaf(0.0).log(), 1 / 0))
        assert "ZeroDivisionError" in found.text()
        assert waiting.item() == 2
        with pytest.raises(RuntimeError, match="do not nest"):
            tpu_lab.find_nonfinite(lambda: tpu_lab.find_nonfinite(exp_too_large))
    assert (executor.run, executor.resolve, fallback.run, state.mode(), executor.watched) == before
    assert trace.active is None


def test_inside_a_profile_it_uses_its_records():
    with tpu_lab.profile() as p:
        found = tpu_lab.find_nonfinite(exp_too_large)
    assert "exp at test_numerics.py" in found.title and any(r.name == "aten.exp.default" for r in p.trace.ops)


def test_nothing_on_the_device_says_so():
    found = tpu_lab.find_nonfinite(lambda: torch.zeros(2).log())
    assert found.title == "No op ran on 'tpu', so nothing was looked at"
    check_page(found)


# --- compare ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    config = mingpt.Config(layers=2, heads=2, width=32, block=16, dropout=0.5)
    return mingpt.Model(config), mingpt.batch(config, 2)[0]


def test_a_model_agrees_with_the_cpu_and_dropout_is_off(gpt):
    model, ids = gpt
    view = tpu_lab.compare(model, ids, backward=True, rtol=1e-4, atol=1e-5)
    rows = view.rows
    assert view.title.startswith(f"All {len(rows)} modules and gradients agree within tolerance")
    assert rows.within.all() and rows.error.is_monotonic_decreasing and rows.error.max() < 1e-5
    assert set(rows[rows.kind == "gradient"].module) == {n for n, _ in model.named_parameters()}
    assert {n for n, _ in model.named_modules() if n} - {"h"} <= set(rows.module)
    assert "dropout off" in view.text() and "model.eval()" not in view.text()
    assert model.training and next(model.parameters()).device.type == "cpu" and next(model.parameters()).grad is None
    check_page(view)


def test_coarse_matmuls_are_found_and_ranked(gpt):
    model, ids = gpt
    with torch.tpu.precision("default"):
        view = tpu_lab.compare(model, ids)
    rows = view.rows
    assert "differ beyond tolerance, first h.0.attn.qkv: error" in view.title
    assert 1e-4 < rows.error.max() < 3e-2 and not rows.within.all()
    first = rows[~rows.within].sort_values("order").iloc[0]
    assert first.module == "h.0.attn.qkv" and first.inherited < 1e-6 < first.error
    assert "float32 precision default" in view.text() and "\u2717 " in view.text()
    check_page(view)


def test_a_model_that_writes_to_its_input_is_given_a_fresh_one():
    class Doubles(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.relu(x.mul_(2), inplace=True)

    x = torch.tensor([1.0, -2.0])
    assert "differ" not in str(tpu_lab.compare(Doubles(), x)).splitlines()[0]
    assert x.tolist() == [1.0, -2.0]


def test_tolerances_are_those_of_the_dtype_or_the_callers():
    model = nn.Linear(4, 4).bfloat16()
    x = torch.randn(2, 4).bfloat16()
    row = tpu_lab.compare(model, x).rows.iloc[0]
    assert (row.rtol, row.atol) == (1.6e-2, 1e-5)
    assert tpu_lab.compare(model, x, rtol=0.5, atol=0.25).rows.iloc[0].rtol == 0.5


def test_random_numbers_that_cannot_be_switched_off_are_told():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    view = tpu_lab.compare(Noisy(), torch.zeros(4))
    assert "random numbers were drawn and differ" in view.text() and not view.rows.within.any()


def test_attention_and_lstm_drop_nothing_and_keep_their_masks():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    assert tpu_lab.compare(encoder, torch.randn(2, 3, 8), rtol=1e-4, atol=1e-5).rows.within.all()
    lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
    assert tpu_lab.compare(lstm, torch.randn(5, 2, 3), rtol=1e-4, atol=1e-5).rows.within.all()

    class Sdpa(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, None, 0.5, True)

    assert tpu_lab.compare(Sdpa(), torch.randn(2, 3, 8)).rows.within.all()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match='reference is "cpu"'):
        tpu_lab.compare(nn.Linear(1, 1), torch.zeros(1, 1), ref="cuda")
    with pytest.raises(TypeError, match="needs an nn.Module"):
        tpu_lab.compare(torch.sin, torch.zeros(1))
    with pytest.raises(ValueError, match="both rtol and atol"):
        tpu_lab.compare(nn.Linear(1, 1), torch.zeros(1, 1), rtol=1e-3)
    with pytest.raises(ValueError, match="needs a gradient"):
        tpu_lab.compare(nn.Flatten(), torch.zeros(1, 1), backward=True)
