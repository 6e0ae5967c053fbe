"""Words that models of others write on the device: each cache, each way of choosing, the CPU's words."""

import os

import hub_models
import hub_rows
import pytest
import torch

import tpu_lab  # noqa: F401  the device

STRICT, FUSED = torch.tpu.EagerMode.DEFER_NEVER, torch.tpu.EagerMode.DEFER_AND_FUSE
WAYS = {
    "greedy": dict(do_sample=False),
    "beams": dict(do_sample=False, num_beams=3),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=8, top_p=0.9),
}
FAMILIES = ["llama", "gemma3", "gpt2", "t5"]


def written(model, device, seed=3, **how):
    """The words after two short lines, the first one padded on the left."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    ids = torch.tensor([[0, 0, 5, 9, 7], [4, 8, 15, 16, 23]])
    with hub_models.quickly():
        made = model.generate(ids.to(device), attention_mask=(ids > 0).long().to(device), max_new_tokens=3, min_new_tokens=3, **how)
    assert made.device.type == device
    return made.tolist()


def moved(name):
    """The model of a family on the CPU, and the same on the device."""
    row = hub_rows.named(name)
    with torch.random.fork_rng():
        return hub_models.build(row), hub_models.build(row).to("tpu")


EVERY = os.environ.get("TPU_LAB_HUB") == "all"  # each family, way, cache and mode: ten minutes
CASES = [(name, way, cache) for name in FAMILIES for way in ("greedy", "beams") for cache in ("dynamic", "static")]
SHORT = [("llama", "greedy", "dynamic"), ("llama", "beams", "dynamic"), ("llama", "greedy", "static"), ("gpt2", "greedy", "static")]
SHORT += [("gemma3", "greedy", "dynamic"), ("t5", "greedy", "static")]


@pytest.mark.parametrize(("name", "way", "cache"), CASES if EVERY else SHORT)
def test_the_words_are_those_of_the_cpu(name, way, cache):
    """A static cache is compiled by transformers itself, with backend "tpu"."""
    model, device = moved(name)
    want = written(model, "cpu", **WAYS[way])
    for mode in (STRICT, FUSED) if EVERY else (STRICT,):
        with torch.tpu.set_eager_mode(mode):
            assert written(device, "tpu", cache_implementation=cache, **WAYS[way]) == want


def test_a_seed_repeats_what_is_sampled_in_every_mode():
    _, device = moved("llama")
    found = []
    for mode in (STRICT, STRICT, FUSED) if EVERY else (STRICT, STRICT):
        with torch.tpu.set_eager_mode(mode):
            found.append(written(device, "tpu", **WAYS["sampled"]))
    assert all(words == found[0] for words in found)
    assert written(device, "tpu", seed=4, **WAYS["sampled"]) != found[0]


def test_with_the_dice_of_the_cpu_the_same_is_sampled(monkeypatch):
    """So the probabilities are the CPU's, after temperature, top_k and top_p."""
    model, device = moved("llama")
    roll = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda given, *args, **how: roll(given.cpu(), *args, **how).to(given.device))
    want = written(model, "cpu", **WAYS["sampled"])
    with torch.tpu.set_eager_mode(STRICT):
        assert written(device, "tpu", **WAYS["sampled"]) == want
