"""coverage: the ops of a model with their lines, how TPU Lab does each, and what TorchTPU's lists say."""

import subprocess
import sys

import pytest
import torch
from safe_page import check_page
from torch import nn

import tpu_lab
from tpu_lab import cli, trace
from tpu_lab.backend import executor, host_bound
from tpu_lab.coverage import how, missing, page, registered, table, torch_tpu
from tpu_lab.models import dlrm, mingpt


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.Mish()

    def forward(self, x):
        return torch.erfc(self.act(self.linear(x)))


@pytest.fixture(scope="module")
def odd():
    return tpu_lab.coverage(Odd(), torch.randn(2, 4), optimizer=torch.optim.SGD)


def test_the_title_is_the_finding_and_names_a_line(odd):
    assert odd.title == f"{len(odd)} ops; TorchTPU lacks 2 of them: aten.mish at test_coverage.py:25"
    rows = odd.rows.set_index("op")
    assert rows.loc["aten.mish.default", ["tpu_lab", "torch_tpu", "module", "phase"]].tolist() == [
        "lowered",
        "missing",
        "act",
        "forward",
    ]
    assert rows.loc["aten.erfc.default", "code"] == "return torch.erfc(self.act(self.linear(x)))"
    assert "backward" in rows.loc["aten.mm.default", "phase"] and rows.loc["aten.addmm.default", "module"] == "linear"
    assert (rows.phase == "optimizer").any()
    check_page(odd)


def test_it_runs_nothing_and_leaves_nothing_behind():
    model = nn.Linear(3, 3)
    before, hits, misses = executor.run, *[getattr(torch.tpu, f"_get_cache_{w}")() for w in ("hits", "misses")]
    view = tpu_lab.coverage(model, torch.randn(2, 3), backward=True)
    assert (torch.tpu._get_cache_hits(), torch.tpu._get_cache_misses()) == (hits, misses)
    assert executor.run is before and not executor.watched and trace.active is None
    assert model.weight.grad is None and model.weight.device.type == "cpu"
    assert view.title.endswith("TorchTPU has them all")


def test_it_sees_what_a_real_run_calls():
    config = dlrm.Config.tiny()
    model, (_, *batch) = dlrm.Model(config), dlrm.batch(config, 4)
    view = tpu_lab.coverage(model, *batch, backward=False)
    there, moved = model.to("tpu"), [t.to("tpu") for t in batch]
    with tpu_lab.profile() as p, torch.no_grad():
        there(*moved)
    assert set(view.rows.op) == {r.name for r in p.trace.ops}


def test_control_flow_on_values_gets_the_values():
    class Depends(nn.Module):
        def forward(self, x):
            return torch.sinc(x) if x.sum().item() > 5 else x.exp()

    assert "aten.sinc.default" in set(tpu_lab.coverage(Depends(), torch.full((3,), 2.0), backward=False).rows.op)
    assert "aten.exp.default" in set(tpu_lab.coverage(Depends(), torch.zeros(3), backward=False).rows.op)


def test_a_cpu_fallback_is_called_one():
    rows = tpu_lab.coverage(lambda x: torch.linalg.eigvals(x), torch.eye(2), backward=False).rows.set_index("op")
    row = rows.loc["aten._linalg_eigvals.default"]
    assert row[["tpu_lab", "torch_tpu"]].tolist() == ["CPU", "missing"] and "eigenvalues" in row.why


def test_errors_of_the_model_go_through_and_nothing_is_left():
    before = executor.run
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        tpu_lab.coverage(nn.Linear(3, 3), torch.randn(2, 4))
    assert executor.run is before and trace.active is None


def test_no_op_says_so():
    view = tpu_lab.coverage(nn.Identity(), torch.ones(2), backward=False)
    assert view.title == "No op ran on 'tpu': the model called none"
    check_page(view)


def test_the_lists_are_the_facts():
    assert (len(registered()), len(missing())) == (674, 329) and not set(registered()) & set(missing())
    assert torch_tpu("aten.mm.default") == "registered"  # through mm.out
    assert torch_tpu("aten.index_select.default") == "registered" and torch_tpu("aten.index_select.out") == "missing"
    assert torch_tpu("aten.erfc_.default") == "missing"


def test_how_an_op_is_done():
    said = {name: how(name) for name in ("aten.add_.Tensor", "aten.view.default", "aten.nonzero.default", "aten.linear.default",
                                         "aten.empty_strided.default", "aten.no_such_op.default")}  # fmt: skip
    assert list(said.values()) == ["lowered", "view", "CPU", "composite", "built in", "unknown"]


def test_totals_add_up():
    view = table()
    rows = view.rows
    assert len(rows) == 674 + 329 and (rows.torch_tpu == "missing").sum() == 329
    ours = rows[~rows.tpu_lab.isin(["CPU", "outside", "unknown"])]
    has, lacks = (ours.torch_tpu == "registered").sum(), (ours.torch_tpu == "missing").sum()
    assert f"{has} of the 674 ops TorchTPU has, {lacks} of 329 it lacks" in view.title
    assert has >= 650 and lacks >= 287
    check_page(view)


def test_what_is_not_on_the_device_has_its_reason():
    """Every overload of the two lists with a dense CPU kernel is lowered or decomposed, or needs the host by its nature."""
    rows = table().rows
    away = rows[rows.tpu_lab.isin(["CPU", "outside"])]
    assert (away.why != "").all(), away[away.why == ""].op.tolist()
    assert (rows.tpu_lab == "CPU").sum() <= 24 and (rows.tpu_lab == "unknown").sum() <= 1
    assert set(host_bound.REASONS) >= {n.removeprefix("aten.").removesuffix(".default") for n in away[away.tpu_lab == "CPU"].op}


def test_the_table_names_gradients_dtypes_and_tests_that_exist(root):
    rows = table().rows.set_index("op")
    assert rows.loc[["aten.mish.default", "aten.mish_.default", "aten.mm.out"], "gradient"].tolist() == ["formula", "formula", ""]
    named = rows[rows.test != ""]
    assert len(named) > 300 and (named["dtypes"] != "").mean() > 0.9
    for test in set(named.test):
        file, _, function = test.partition("::")
        assert function in (root / "tests" / file).read_text(), test


def test_user_text_is_escaped():
    class Evil(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, "<img onerror=x>", nn.ReLU())

        def forward(self, x):
            return getattr(self, "<img onerror=x>")(x)

    view = tpu_lab.coverage(Evil(), torch.ones(2), backward=False)
    check_page(view)
    assert "&lt;img onerror=x&gt;" in view.html


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_ops_totals_and_models(capsys, tmp_path, monkeypatch):
    assert cli.main(["coverage", "aten::erfc", "mm"]) == 0
    out = capsys.readouterr().out
    assert "TorchTPU lacks 2 of them: aten.erfc" in out and "aten.mm.out" in out
    file = tmp_path / "all.csv"
    assert cli.main(["coverage", "--csv", str(file)]) == 0
    assert len(file.read_text().splitlines()) == 1 + 674 + 329
    capsys.readouterr()
    (tmp_path / "their_model.py").write_text("import torch\ndef build():\n    return torch.nn.Mish(), torch.ones(3)\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["coverage", "--model", "their_model:build", "--forward"]) == 0
    assert capsys.readouterr().out.startswith("TorchTPU lacks aten.mish")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["no_such_op"], "no op aten.no_such_op"),
        (["--model", "mingpt"], "module:factory"),
        (["--model", "no_such_module:build"], "no_such_module"),
        (["--model", "tpu_lab.models.mingpt:nothing"], "nothing"),
        (["mm", "--model", "a:b"], "not both"),
    ],
)
def test_wrong_use_is_a_sentence(arguments, word, capsys):
    assert cli.main(["coverage", *arguments]) == 2
    assert word in capsys.readouterr().err


def test_the_function_hides_its_module_whatever_is_imported_first():
    code = "import tpu_lab.coverage; import tpu_lab; assert callable(tpu_lab.coverage), tpu_lab.coverage"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_of_the_lab_runs_on_torch_tpu():
    config = mingpt.Config.tiny()
    view = tpu_lab.coverage(mingpt.Model(config), mingpt.batch(config, 2)[0], optimizer=torch.optim.AdamW)
    assert view.title == f"{len(view)} ops; TorchTPU has them all"


def test_the_page_of_ops_has_the_numbers_of_today(root):
    """OPS.md is what `tpu-lab coverage --md tpu_lab/backend/OPS.md` writes, up to the dtypes and tests that were seen since."""
    text = (root / "tpu_lab/backend/OPS.md").read_text(encoding="utf-8")
    assert text.split("## All")[0] == page().split("## All")[0]
