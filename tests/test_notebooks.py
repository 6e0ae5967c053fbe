"""The notebooks as programs: checked by marimo, run with small parameters, and again as the exported .ipynb twin."""

import ast
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch

from tpu_lab import twins
from tpu_lab.lessons import dlrm as dlrm_lesson
from tpu_lab.lessons import mingpt as lesson
from tpu_lab.lessons import modes as modes_lesson
from tpu_lab.lessons import resnet as resnet_lesson
from tpu_lab.lessons import unet as unet_lesson
from tpu_lab.lessons import your_model as your_model_lesson
from tpu_lab.lessons.runs import programs
from tpu_lab.models import data, dlrm, mingpt, unet
from tpu_lab.viz import ahead

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
SMALL = {
    "hello": {"device": "tpu", "rows": 16, "look": 4},
    "your_model": {"device": "tpu", "chip": "v6e", "example": "a table of words", "code": None, "shape": "i64[2, 3]"},
    "modes": {
        "device": "tpu",
        "chip": "v6e",
        "modes": ["strict", "fused", "compiled"],
        "width": 16,
        "layers": 1,
        "batch": 16,
        "steps": 1,
    },
    "mingpt": {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "dtype": "float32",
        "batch": 4,
        "block": 16,
        "layers": 1,
        "width": 32,
        "rate": 1e-2,
        "steps": 12,
        "longer": 24,
        "reach": 4.0,
        "letters": 20,
        "lengths": [8, 16],
        "read": 6,
        "places": 16,
    },
    "resnet": {
        "device": "tpu",
        "chip": "v6e",
        "channels": 4,
        "batch": 64,
        "steps": 6,
        "epochs": 1,
        "rate": 1e-2,
        "accuracy": 0.15,
    },
    "dlrm": {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "batch": 64,
        "width": 4,
        "rows": 7,
        "joined": False,
        "steps": 5,
        "rate": 1e-2,
        "apart": 2,
        "longer": 12,
        "better": -1.0,
    },
    "unet": {
        "device": "tpu",
        "chip": "v6e",
        "mode": "fused",
        "sizes": 2,
        "bucket": 32,
        "width": 8,
        "batch": 1,
        "rate": 1e-2,
        "image": 16,
        "steps": 1,
        "better": -20.0,
    },
}


def load(name):
    spec = importlib.util.spec_from_file_location(f"notebook_{name}", ROOT / "notebooks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # marimo finds the source of a class through it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def notebook():
    """A loader that reads each notebook once."""
    loaded = {}
    return lambda name: loaded.setdefault(name, load(name))


@pytest.fixture(scope="module")
def small_mingpt(notebook):
    outputs, definitions = notebook("mingpt").app.run(defs={"params": SMALL["mingpt"]})
    return outputs, definitions


def test_every_notebook_has_small_parameters_here():
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)


def test_marimo_finds_nothing_to_complain_about():
    done = subprocess.run(
        [sys.executable, "-m", "marimo", "check", "--strict", *map(str, NOTEBOOKS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_house_rules_of_a_notebook(path):
    source = path.read_text()
    assert source.startswith("# /// script\n")
    header = source.partition("# ///\n")[0]
    assert "[tool.marimo.opengraph]" in header and "# title = " in header and "# description = " in header, "its card"
    assert "http" not in source.replace("http.client", ""), "a notebook loads nothing"
    cells = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "_"]
    prose = [cell for cell in cells if "mo.md" in ast.unparse(cell) and len(cell.body) <= 2]
    assert prose and all("hide_code=True" in ast.unparse(cell.decorator_list[0]) for cell in prose)
    first = ast.unparse(cells[0])
    assert "**" in first and "?**" in first and "minute" in first.lower(), "title, the one question, the minutes"
    assert any("assert " in ast.unparse(cell) for cell in cells[-1:]), "the last cell holds what the text claims"


def test_hello_counts_launches_hits_and_misses(notebook):
    _, definitions = notebook("hello").app.run(defs={"params": SMALL["hello"]})
    strict, fused = definitions["strict"].trace, definitions["fused"].trace
    assert [launch.mode for launch in strict.launches] == ["strict"] * 8
    assert [len(launch.ops) for launch in fused.launches] == [4, 4]
    assert [launch.cache for launch in strict.launches[4:]] == ["hit"] * 4
    assert fused.launches[1].cache == "hit" and fused.launches[1].compile_ns == 0
    assert definitions["strict_results"] == definitions["fused_results"] == [16 * 128 * 3.0] * 2


def test_hello_an_early_look_cuts_the_fused_program(notebook):
    for look in (1, 2, 3):
        _, definitions = notebook("hello").app.run(defs={"params": {**SMALL["hello"], "look": look}})
        assert [len(launch.ops) for launch in definitions["fused"].trace.launches] == [look, 4 - look] * 2
        assert len(definitions["strict"].trace.launches) == 8


def test_hello_draws_what_ran(notebook):
    module = notebook("hello")
    _, definitions = module.app.run(defs={"params": SMALL["hello"]})
    strict = module.picture("strict", definitions["strict"].trace).html
    fused = module.picture("fused", definitions["fused"].trace).html
    for name in ("mul", "add", "relu", "sum"):
        assert strict.count(f">{name}<") == fused.count(f">{name}<") == 2
    assert strict.count("✓") >= 4 and fused.count("✓") >= 1
    assert 'role="figure"' in strict and "<script" not in strict + fused


@pytest.fixture(scope="module")
def small_modes(notebook):
    _, definitions = notebook("modes").app.run(defs={"params": SMALL["modes"]})
    return definitions


def test_modes_counts_launches_and_misses(small_modes):
    rows = {row["mode"]: row for row in modes_lesson.costs(small_modes["seen"])}
    assert list(rows) == ["strict", "fused", "compiled"]
    assert rows["strict"]["launches a step"] > 10 > 4 >= rows["compiled"]["launches a step"] > 1
    assert rows["fused"]["launches a step"] == 1
    for mode, row in rows.items():
        launches = small_modes["seen"].profiles[mode].trace.launches
        assert row["misses"] + row["disk hits"] + row["hits"] == len(launches) > row["misses"] + row["disk hits"]
        assert 0 < row["a step after it"]


def test_modes_every_mode_and_the_cpu_compute_the_same(notebook, small_modes):
    losses = small_modes["seen"].rows.set_index("mode").loss
    assert list(losses.index) == ["strict", "fused", "compiled", "native CPU"]
    assert losses.tolist() == pytest.approx([losses["native CPU"]] * 4, rel=notebook("modes").TOLERANCE)


def test_modes_says_what_changed(notebook, small_modes):
    module, before = notebook("modes"), small_modes["seen"]
    after = module.compare(16, 2, 16, ["fused"], 1, "tpu")
    assert modes_lesson.changed(before, after).startswith("What changed, fused: ")
    assert modes_lesson.changed(after, module.compare(16, 1, 16, ["strict"], 1, "tpu")) is None, "no mode in common"


def test_modes_none_chosen_says_so(notebook):
    outputs, definitions = notebook("modes").app.run(defs={"params": {**SMALL["modes"], "modes": []}})
    assert definitions["seen"] is None
    assert any("No mode is chosen" in repr(output) for output in outputs)


def test_modes_more_programs_more_bytes_on_a_tpu(notebook):
    fused, compiled = ahead.of("modes")["rows"]
    assert fused["programs"] == 1 < compiled["programs"] and fused["moved"] < compiled["moved"]


def test_your_model_shows_coverage_and_steps(notebook):
    outputs, definitions = notebook("your_model").app.run(defs={"params": SMALL["your_model"]})
    seen = definitions["seen"]
    assert not seen.fault and "aten.embedding.default" in set(seen.coverage.rows.op)
    m = seen.profile.metrics
    assert [launch.mode for launch in m.launches_in(m.span)] == ["fused"]
    assert {op.file for op in m.ops_in(m.span) if op.phase == "forward" and op.module} == {"model.py"}
    assert any("TorchTPU has them all" in repr(output) for output in outputs)


def test_your_model_a_fault_is_one_calm_sentence(notebook):
    code = "class Net(nn.Module):\n    def forward(self, x):\n        return self.layer(x)\n"
    defs = {"params": {**SMALL["your_model"], "code": code, "shape": "2, 3"}}
    outputs, definitions = notebook("your_model").app.run(defs=defs)
    fault = definitions["seen"].fault
    assert fault == "Line 3, “return self.layer(x)”: AttributeError, 'Net' object has no attribute 'layer'"
    shown = "".join(map(repr, outputs))
    assert "It does not run yet" in shown and "Traceback" not in shown
    assert your_model_lesson.look("class A(nn.Module):\n    def forward(self, x): return x", "2", "tpu").fault


def test_your_model_says_what_to_change():
    module, found = your_model_lesson, {}
    for name in ("an op that TorchTPU lacks", "a question in the middle"):
        code, _ = module.examples()[name]
        found[name] = module.changes(module.look(code, "4, 128", "tpu"), None)
    (lacks,), (cut,) = found.values()
    assert lacks == ("Replace aten.mish.", "TorchTPU 0.2.0 has no kernel for it, and would raise at model.py:10.")
    assert cut[0] == "Read no value inside the step." and "at model.py:11" in cut[1] and "2 launches a step" in cut[1]
    scale = module.look("class A(nn.Module):\n    def forward(self, x): return x * 2", "4, 128", "tpu")
    assert module.changes(scale, None)[0][0] == "Nothing stands out."
    assert module.changes(scale, ["Try 128 for 10.", "It fills a tile"])[-1] == ("Try 128 for 10.", "It fills a tile")


def test_your_model_has_a_tpu_view_of_each_example():
    stored = ahead.of("your_model")
    for name in your_model_lesson.examples():
        groups = stored[f"{name}: groups"].rows
        assert (~groups.compiler.str.contains("CPU")).any() and "v6e" in stored[f"{name}: memory"].title


def test_mingpt_learns_and_writes(small_mingpt):
    _, definitions = small_mingpt
    run = definitions["short"]
    assert len(run.losses) == 12 and abs(run.losses[0] - definitions["guess"]) < 0.3
    assert run.losses[-1] < run.losses[0] - 0.5
    assert run.held_out < definitions["guess"]
    assert definitions["sample"].startswith("def ") and len(definitions["sample"]) == 24
    assert set(definitions["sample"]) <= set(data.VOCABULARY)


def test_mingpt_one_launch_a_step_and_two_compilations_at_most(small_mingpt):
    trace = small_mingpt[1]["short"].profile.trace
    assert len(trace.launches) == 12 and {launch.mode for launch in trace.launches} == {"fused"}
    assert [launch.cache for launch in trace.launches[3:]] == ["hit"] * 9
    assert not any(op.fallback for op in trace.ops)


def test_mingpt_baselines_come_from_the_text(small_mingpt):
    _, definitions = small_mingpt
    assert definitions["alone"] == data.entropy(data.tokens())
    assert definitions["paired"] == data.entropy(data.tokens(), 2)
    assert definitions["paired"] < definitions["alone"] < definitions["guess"]


def test_mingpt_every_mode_gives_the_losses_of_the_cpu(notebook):
    module, config = notebook("mingpt"), mingpt.Config(layers=1, heads=2, width=32, block=16)
    torch.manual_seed(0)
    batches = [mingpt.batch(config, 4, seed) for seed in range(4)]
    expected = list(module.train(mingpt.Model(config), batches, 1e-2))
    for mode in ("strict", "debug", "fused", "compile"):
        chosen = {"mode": mode, "dtype": "float32", "batch": 4, "rate": 1e-2}
        run = module.run(config, chosen, 4, "tpu", title=mode)
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(expected), rtol=1e-5, atol=0)


def test_mingpt_multiplies_in_bfloat16_when_told(notebook):
    config = mingpt.Config(layers=1, heads=2, width=32, block=16)
    chosen = {"mode": "fused", "dtype": "bfloat16", "batch": 4, "rate": 1e-2}
    run = notebook("mingpt").run(config, chosen, 3, "tpu", title="")
    products = [op for op in run.profile.trace.ops if op.kind == "matmul"]
    assert products and all("bf16" in str(op.inputs) for op in products)
    assert abs(run.losses[0] - 4.56) < 0.3 and run.losses[-1] < run.losses[0]


def test_mingpt_the_loss_stands_against_simpler_models():
    html = lesson.loss_curve([4.5, 3.2, 3.0], 4.56, 3.15, 2.39).html
    assert "3.00 nats a character after 3 steps" in html and 'role="img"' in html
    for words in ("guessing", "how often each", "and the one before"):
        assert f">{words}<" in html


def test_mingpt_mfu_grows_with_the_sequence(small_mingpt):
    stored = small_mingpt[1]["stored"]["mfu"]
    assert [length for length, _ in stored] == list(lesson.LENGTHS)
    assert [length for length, _ in small_mingpt[1]["here"]] == [8, 16] and all(
        share for _, share in small_mingpt[1]["here"]
    )
    html = lesson.mfu_curve("v6e", stored, small_mingpt[1]["here"]).html
    assert ">v6e, at most<" in html and ">here, measured<" in html and "nan" not in html


def test_mingpt_a_cache_that_grows_compiles_for_each_character_and_a_static_one_once(small_mingpt):
    growing, static = (small_mingpt[1][name][0] for name in ("growing", "static"))
    assert [launch.cache == "hit" for launch in growing.trace.launches] == [False] * 6
    assert [launch.cache == "hit" for launch in static.trace.launches] == [False] + [True] * 5
    assert all("grows by one" in compile.why for compile in growing.trace.compiles[3:])
    shown = lesson.caches(growing, static, 16).html
    assert "6 tokens: 6 programs as the cache grows, 1 with its places ready" in shown and "grows by one" in shown


@pytest.fixture(scope="module")
def small_dlrm(notebook):
    _, definitions = notebook("dlrm").app.run(defs={"params": SMALL["dlrm"]})
    return definitions


def test_dlrm_a_lookup_moves_bytes_and_multiplies_nothing(small_dlrm):
    split = dlrm_lesson.parts(small_dlrm["short"].profile)
    assert split["lookups and their gradients"][0] == split["optimizer"][0] == 0 < split["matmuls"][0]
    assert all(moved > 0 for _, moved in split.values())
    trace = small_dlrm["short"].profile.trace
    assert len(trace.launches) == 5 and not any(op.fallback for op in trace.ops)


def test_dlrm_strict_mode_measures_each_op(small_dlrm):
    rows = small_dlrm["strict"].profile.roofline.rows
    assert {launch.mode for launch in small_dlrm["strict"].profile.trace.launches} == {"strict"}
    assert rows.measured[:-1].any() and (rows.bound == "memory").any()
    assert small_dlrm["strict"].losses == pytest.approx(small_dlrm["short"].losses[:2], rel=1e-5)


def test_dlrm_the_auc_is_the_share_of_pairs_in_order():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(5, (60,), generator=generator).float()  # many are equal
    late = torch.randint(2, (60,), generator=generator).float()
    pairs = (scores[late > 0][:, None] - scores[late == 0][None, :]).sign() / 2 + 0.5
    assert dlrm.auc(scores, late) == pytest.approx(pairs.mean().item())
    assert dlrm.roc(late, late, torch.tensor([0.0, 1.0])) == [1.0, 1.0]


def test_dlrm_judges_the_held_out_flights(small_dlrm):
    assert 0.67 < small_dlrm["to_beat"] < 0.70
    assert 0.4 < small_dlrm["reached"] < 0.75 and small_dlrm["scores"].shape == (dlrm_lesson.UNSEEN,)


def test_dlrm_one_table_for_all_names_gives_what_seven_give():
    config = dlrm.Config.tiny()
    seven, one = dlrm.Model(config), dlrm.Model(dataclasses.replace(config, joined=True))
    state = {name: value for name, value in seven.state_dict().items() if not name.startswith("tables")}
    one.load_state_dict({**state, "tables.0.weight": torch.cat([table.weight.detach() for table in seven.tables])})
    _, *rest = dlrm.batch(config, 16)
    torch.testing.assert_close(one(*rest), seven(*rest))
    torch.testing.assert_close(one.to("tpu")(*(part.to("tpu") for part in rest)).cpu(), seven(*rest))


def test_resnet_learns_and_shows_where_fusions_end(notebook):
    module = notebook("resnet")
    _, definitions = module.app.run(defs={"params": SMALL["resnet"]})
    profile, rows = definitions["profile"], definitions["profile"].fusions.rows
    assert definitions["accuracy"] > 0.15 and len(definitions["losses"]) == 62
    assert [launch.cache for launch in profile.trace.launches[-4:]] == ["hit"] * 4, "one program for all steps"
    assert not any(op.fallback for op in profile.trace.ops)
    ends = resnet_lesson.ends(rows)
    assert sum(map(len, ends.values())) == (rows.letter != "").sum(), "each group has one reason"
    assert ends["another reason"].empty
    alone, convolutions = resnet_lesson.with_company(rows)
    assert alone < convolutions >= 9, "on the CPU a convolution is a kernel of its own"


def test_resnet_on_a_tpu_joins_norms_and_fills_the_lanes_with_the_batch():
    stored = ahead.of("resnet")
    groups = stored["groups"].rows
    assert groups.launch.nunique() == 1, "one step, as on the CPU beside it"
    joined, convolutions = resnet_lesson.with_company(groups[~groups.compiler.str.contains("CPU")])
    assert joined > convolutions / 2
    factors = [row["held"] / row["useful"] for row in stored["padding"]]
    assert factors == sorted(factors, reverse=True) and factors[0] > 8 and factors[-1] < 1.1


@pytest.fixture(scope="module")
def small_unet(notebook):
    _, definitions = notebook("unet").app.run(defs={"params": SMALL["unet"]})
    return definitions


def test_unet_each_size_is_a_program_and_padding_makes_them_one(small_unet):
    plain, bucketed = small_unet["plain"], small_unet["bucketed"]
    assert [launch.cache == "hit" for launch in plain.trace.launches] == [False, False, True, True]
    assert [launch.cache == "hit" for launch in bucketed.trace.launches] == [False, True, True, True]
    assert programs(plain) == 2 and programs(bucketed) == 1
    first, second = (compile.why for compile in plain.trace.compiles)
    assert "f32[1,3,72,90], was f32[1,3,66,96]" in second and "was" not in first


def test_unet_padding_hardly_changes_a_picture(small_unet):
    for own, padded in zip(small_unet["plain_results"], small_unet["bucketed_results"], strict=True):
        assert own.shape == padded.shape
        torch.testing.assert_close(own, padded, atol=0.05, rtol=0)


def test_unet_pads_with_what_is_there():
    picture = torch.arange(12.0).reshape(1, 1, 3, 4)
    grown = unet_lesson.padded(picture, 5)
    assert grown.shape == (1, 1, 5, 5) and torch.equal(grown[..., :3, :4], picture)
    assert grown[0, 0, 0].tolist() == [0, 1, 2, 3, 2] and grown[0, 0, :, 0].tolist() == [0, 4, 8, 4, 0]
    assert torch.equal(unet_lesson.padded(picture[..., :2], 1), picture[..., :2])


def test_unet_learns_and_is_judged_against_filters(notebook):
    module, config = notebook("unet"), unet.Config.tiny()
    model, losses, _ = module.train(config, 40, 1e-2, "cpu")
    assert sum(losses[-5:]) / 5 < 0.7 < losses[0]
    clean = data.photographs()[module.HELD_OUT][:, 10:58, 140:188]
    noisy = clean + unet_lesson.NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        restored = module.denoise(model, noisy[None], 2, "cpu")[0]
    worst = unet_lesson.psnr(noisy, clean)
    assert worst == pytest.approx(20, abs=0.5) and unet_lesson.psnr(restored, clean) > worst + 1
    for picture in unet_lesson.filtered(noisy, clean).values():
        assert picture.shape == clean.shape and unet_lesson.psnr(picture, clean) > worst + 3


@pytest.mark.parametrize("name", SMALL)
def test_the_twin_runs_as_a_jupyter_notebook(name):
    book = nbformat.reads(twins.written(twins.book(ROOT / "notebooks" / f"{name}.py")), as_version=4)
    (cell,) = [cell for cell in book.cells if cell.cell_type == "code" and "params = {" in cell.source]
    cell.source = f"params = {SMALL[name]!r}"
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert not [output for output in shown if output.output_type == "error"]
    assert any("What we saw" in str(output.get("data", "")) for output in shown)
