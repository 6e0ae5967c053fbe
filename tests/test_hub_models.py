"""Models others wrote, on the device: forward and backward of each family against the CPU, and no op on the CPU unasked.

Twenty families in fused mode, a few of them in strict mode and under torch.compile, too. Every
family in every mode: `python -m tests.hub_models`.
"""

import hub_models
import hub_rows
import pytest
import torch

import tpu_lab  # noqa: F401  the device

STRICT = ["llama", "bert", "resnet"]
COMPILED = ["llama", "mixtral"]
SLOW = {  # seconds each, most of them of compiling: in `python -m tests.hub_models` only
    "sam", "deformable_detr", "mobilenet_v2", "mobilevit", "switch_transformers", "encodec", "informer", "autoformer", "rwkv", "canine",
    "qwen3_next", "prophetnet", "marian", "pegasus", "vilt", "recurrent_gemma", "funnel", "blip", "detr", "dpt", "longformer",
    "qwen3_moe", "time_series_transformer", "vit_mae", "llava", "deberta_v2", "gpt_oss", "regnet", "bart", "patchtst", "yolos", "dinov2",
    "mamba2", "xlnet", "gpt_neox", "poolformer", "electra", "big_bird", "layoutlm",
    "phi3", "olmo2", "cohere", "gemma2", "wavlm", "convbert", "swinv2", "segformer", "siglip", "deepseek_v2", "perceiver", "decision_transformer",
    "opt", "bloom", "phi", "reformer", "roberta", "albert", "modernbert", "fnet", "esm", "beit", "hubert", "audio_spectrogram_transformer",
    "qwen2", "gpt2", "falcon", "mamba", "distilbert", "convnext", "swin", "wav2vec2",
    "llama4", "falcon_h1", "lfm2", "minimax", "hiera", "blip_2", "rt_detr", "timesfm",
}  # fmt: skip


def agrees(name, mode):
    with hub_models.quickly():
        assert hub_models.wrong(hub_rows.named(name), mode) == []


@pytest.mark.parametrize("name", [row.name for row in hub_rows.ROWS if row.name not in SLOW])
def test_a_family_agrees_with_the_cpu_in_fused_mode(name):
    agrees(name, "fused")


@pytest.mark.parametrize("name", STRICT)
def test_a_family_agrees_with_the_cpu_in_strict_mode(name):
    agrees(name, "strict")


@pytest.mark.parametrize("name", COMPILED)
def test_a_family_agrees_with_the_cpu_when_it_is_compiled(name):
    agrees(name, "compile")


def test_names_are_of_rows_and_each_is_there_once():
    names = [row.name for row in hub_rows.ROWS]
    assert len(set(names)) == len(names) and {*STRICT, *COMPILED, *SLOW} <= set(names)


def test_a_wrong_gradient_is_told():
    row = hub_rows.named("llama")
    right = [torch.ones(2)], {"weight": torch.tensor([1.0, 2.0])}
    assert hub_models.differences(row, right, right) == []
    wrong = [torch.ones(3)], {"weight": torch.tensor([1.0, 2.1]), "bias": torch.ones(1)}
    assert len(hub_models.differences(row, wrong, right)) == 3


@pytest.mark.parametrize(("alone", "right"), [(1e-8, True), (1e-3, False), (float("nan"), False)])
def test_a_gradient_that_is_zero_on_one_side_is_rounding_on_the_other(alone, right):
    weight = {"weight": torch.ones(2)}
    one, other = ([torch.ones(2)], weight), ([torch.ones(2)], weight | {"key": torch.full((2,), alone)})
    for sides in ((one, other), (other, one)):
        assert (hub_models.differences(hub_rows.named("llama"), *sides) == []) == right


@pytest.mark.parametrize(
    ("device", "cpu", "right"),
    [(4e-4, 1e-4, True), (1e-5, 0.0, True), (5e-4, 1e-4, False), (1e-4, 0.0, False), (0.04, 0.02, False)],
)
def test_where_float32_is_not_exact_the_device_may_be_a_few_times_as_far_off_as_the_cpu(device, cpu, right):
    """Errors of the two, in parts of the largest number. One of 2 % is no rounding: the truth made another choice."""
    truth = torch.tensor([1.0, -2.0], dtype=torch.float64)
    sides = (truth * (1 - device)).float(), (truth * (1 + cpu)).float(), truth
    got, want, exact = (([side], {"weight": side}) for side in sides)
    assert (hub_models.differences(hub_rows.named("resnet"), got, want, lambda row: exact) == []) == right


def test_the_truth_is_the_same_model_in_float64():
    row = hub_rows.named("resnet")
    model, right = hub_models.build(row), hub_models.exact(row)
    assert {t.dtype for t in [*right[0], *right[1].values()]} == {torch.float64}
    rounded = [t.float() for t in right[0]], {name: t.float() for name, t in right[1].items()}
    assert hub_models.differences(row, hub_models.run(model, model, row.inputs(), "cpu"), rounded) == []
    assert hub_models.exact(hub_rows.named("mixtral")) is None  # its grouped products have no float64 kernel


def test_the_groups_of_a_mixture_are_no_part_of_its_program():
    """Another routing is another value of the same program: nothing is compiled, and nothing is read to cut groups out."""
    a, b = torch.randn(24, 16).to("tpu"), torch.randn(3, 16, 8).to("tpu")
    product = torch.compile(lambda *given: torch._grouped_mm(given[0], given[1], offs=given[2]))
    for call in (lambda *given: torch._grouped_mm(given[0], given[1], offs=given[2]), product):
        ends = [torch.tensor(e, dtype=torch.int32).to("tpu") for e in ([3, 3, 24], [8, 20, 24])]
        call(a, b, ends[0])
        before = torch.tpu._get_cache_stats()["programs"]
        got = call(a, b, ends[1]).cpu()
        assert torch.tpu._get_cache_stats()["programs"] == before
        cut = [a[:8] @ b[0], a[8:20] @ b[1], a[20:] @ b[2]]
        torch.testing.assert_close(got, torch.cat(cut).cpu())
