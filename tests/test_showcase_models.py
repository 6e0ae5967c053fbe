"""The four showcases as programs, small: what they claim of their models, of what ran, and of the TPU's compiler."""

import dataclasses

import pytest
import torch
from small_notebooks import SMALL, load

from tpu_lab.lessons import dlrm as dlrm_lesson
from tpu_lab.lessons import mingpt as lesson
from tpu_lab.lessons import resnet as resnet_lesson
from tpu_lab.lessons import unet as unet_lesson
from tpu_lab.lessons.runs import once, programs
from tpu_lab.models import data, dlrm, mingpt, unet
from tpu_lab.viz import ahead, roofline


@pytest.fixture(scope="module")
def small_mingpt():
    outputs, definitions = load("mingpt").app.run(defs={"params": SMALL["mingpt"]})
    return outputs, definitions


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


def test_mingpt_every_mode_gives_the_losses_of_the_cpu():
    module, config = load("mingpt"), mingpt.Config(layers=1, heads=2, width=32, block=16)
    torch.manual_seed(0)
    batches = [mingpt.batch(config, 4, seed) for seed in range(4)]
    expected = list(module.train(mingpt.Model(config), batches, 1e-2))
    for mode in ("strict", "debug", "fused", "compile"):
        chosen = {"mode": mode, "dtype": "float32", "batch": 4, "rate": 1e-2}
        run = module.run(config, chosen, 4, "tpu", title=mode)
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(expected), rtol=1e-5, atol=0)


def test_mingpt_multiplies_in_bfloat16_when_told():
    config = mingpt.Config(layers=1, heads=2, width=32, block=16)
    chosen = {"mode": "fused", "dtype": "bfloat16", "batch": 4, "rate": 1e-2}
    run = load("mingpt").run(config, chosen, 3, "tpu", title="")
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
    html = lesson.mfu_curve("v6e", stored, small_mingpt[1]["here"], "d64 L2 B8").html
    assert "With d64 L2 B8 v6e can use" in html and "this machine, with the settings above, " in html
    assert ">v6e, at most<" in html and ">here, measured<" in html and "nan" not in html


def test_mingpt_a_cache_that_grows_compiles_for_each_character_and_a_static_one_once(small_mingpt):
    growing, static = (small_mingpt[1][name][0] for name in ("growing", "static"))
    assert [launch.cache == "hit" for launch in growing.trace.launches] == [False] * 6
    assert [launch.cache == "hit" for launch in static.trace.launches] == [False] + [True] * 5
    assert all("grows by one" in compile.why for compile in growing.trace.compiles[3:])
    shown = lesson.caches(growing, static, 16).html
    assert "6 tokens: 6 programs as the cache grows, 1 with its places ready" in shown and "grows by one" in shown


@pytest.fixture(scope="module")
def small_dlrm():
    _, definitions = load("dlrm").app.run(defs={"params": SMALL["dlrm"]})
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


def test_dlrm_the_recap_says_what_was_measured(small_dlrm, monkeypatch):
    profile = small_dlrm["strict"].profile
    assert dlrm_lesson.roof_words(None).endswith("the button measures.")
    monkeypatch.setattr(roofline, "NEAR", 1e9)
    assert "neither roof explains their time" in dlrm_lesson.roof_words(profile)
    monkeypatch.setattr(roofline, "NEAR", 0.0)
    assert "fewer bytes help" in dlrm_lesson.roof_words(profile)


def test_a_second_press_with_the_same_settings_trains_nothing():
    held, made = {}, []

    def train(*settings):
        return once(held, settings, lambda: made.append(settings) or settings)

    assert [train(8, 32), train(8, 32), train(16, 32), train(8, 32)] == [(8, 32), (8, 32), (16, 32), (8, 32)]
    assert made == [(8, 32), (16, 32), (8, 32)] and len(held) == 1, "the last is kept, and no more"


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


@pytest.fixture(scope="module")
def small_resnet():
    return load("resnet").app.run(defs={"params": SMALL["resnet"]})


def test_resnet_learns_and_shows_where_fusions_end(small_resnet):
    _, definitions = small_resnet
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


def test_resnet_sets_beside_one_another_what_is_of_the_same_settings(small_resnet):
    stored = ahead.of("resnet")
    cpu, tpu = resnet_lesson.sides(stored["groups"].rows)
    assert set(cpu.compiler) == {"XLA:CPU"} and set(tpu.compiler) == {"XLA:TPU v6e"}
    shown = "".join(output.html for output in small_resnet[0] if hasattr(output, "html"))  # of other channels and batch
    assert ">where a group ends, C8 B32<" in shown and "hold a norm or relu: CPU, C8 B32<" in shown
    assert f">{len(resnet_lesson.ends(cpu)['it is a result of the program'])}<" in shown


@pytest.fixture(scope="module")
def small_unet():
    _, definitions = load("unet").app.run(defs={"params": SMALL["unet"]})
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


def test_unet_learns_and_is_judged_against_filters():
    module, config = load("unet"), unet.Config.tiny()
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
