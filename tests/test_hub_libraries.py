"""Libraries around the models: loading by device_map, saving, Trainer, Accelerator, diffusers, on the device."""

import subprocess
import sys

import hub_models
import hub_rows
import pytest
import torch
import torch.nn.functional as F

import tpu_lab  # noqa: F401  the device
from tpu_lab.backend import fallback

FUSED = torch.tpu.EagerMode.DEFER_AND_FUSE


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Everything on the device: an op that would run on the CPU is an error."""
    monkeypatch.setattr(fallback, "policy", "error")
    with hub_models.quickly(), torch.tpu.set_eager_mode(FUSED):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama on the CPU, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("llama")
    model = hub_models.build(hub_rows.named("llama"))
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("place", ["tpu", "tpu:0", {"": "tpu"}, "auto"], ids=str)
def test_device_map_loads_a_checkpoint_onto_the_device(saved, place):
    from transformers import AutoModelForCausalLM

    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=place)
    assert loaded.device.type == "tpu" and {p.device.type for p in loaded.parameters()} == {"tpu"}
    inputs = hub_rows.named("llama").inputs()
    with torch.no_grad():
        want = model(**inputs).logits
        torch.testing.assert_close(loaded(**{k: v.to("tpu") for k, v in inputs.items()}).logits.cpu(), want)


def test_a_model_on_the_device_is_saved_and_opened_elsewhere(saved, tmp_path):
    from safetensors.torch import load_file, load_model, save_model
    from transformers import AutoModelForCausalLM

    model, _ = saved
    row = hub_rows.named("llama")
    moved = hub_models.build(row).to("tpu", torch.bfloat16)
    moved.save_pretrained(tmp_path / "whole")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    save_model(moved, str(tmp_path / "one.safetensors"))
    other = hub_models.build(row, vocab_size=hub_rows.WORDS).to("tpu", torch.bfloat16)
    torch.nn.init.zeros_(other.lm_head.weight)
    load_model(other, str(tmp_path / "one.safetensors"))
    assert torch.equal(other.lm_head.weight.cpu(), moved.lm_head.weight.cpu())
    assert torch.equal(load_file(tmp_path / "one.safetensors")["lm_head.weight"], moved.lm_head.weight.cpu())


class Lines(torch.utils.data.Dataset):
    """Twelve short lines that a language model is to repeat."""

    def __len__(self):
        return 12

    def __getitem__(self, n):
        ids = hub_rows.draw(8, n + 1, top=hub_rows.WORDS)[:, 0]
        return {"input_ids": ids, "labels": ids}


def trained(folder, **more):
    """(Trainer, its model) after three steps with the same seed."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = hub_models.build(hub_rows.named("llama"))
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to=[], save_steps=2,
        save_strategy="steps", seed=0, disable_tqdm=True, dataloader_pin_memory=False, **more,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=Lines())
    trainer.train()
    return trainer, model


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trainer_takes_the_device_and_learns_what_the_cpu_learns(tmp_path):
    from transformers import Trainer

    trainer, model = trained(tmp_path / "tpu")
    assert trainer.args.device.type == "tpu" and model.device.type == "tpu"
    want, cpu = trained(tmp_path / "cpu", use_cpu=True)
    assert losses(trainer) == pytest.approx(losses(want), rel=1e-4) and len(losses(trainer)) == 3
    for a, b in zip(model.parameters(), cpu.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)
    assert trainer.evaluate(Lines())["eval_loss"] == pytest.approx(want.evaluate(Lines())["eval_loss"], rel=1e-3)
    again = Trainer(hub_models.build(hub_rows.named("llama")), trainer.args, train_dataset=Lines())
    again.train(resume_from_checkpoint=True)  # step 2's weights, moments and random state
    for a, b in zip(again.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-3, atol=1e-4)


def test_trainer_in_bfloat16_with_accumulation_and_checkpointing(tmp_path):
    trainer, model = trained(tmp_path, bf16=True, gradient_accumulation_steps=2, gradient_checkpointing=True)
    assert len(losses(trainer)) == 3 and all(0 < loss < 10 for loss in losses(trainer))
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


def test_accelerator_picks_the_device_up(tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    assert accelerator.device.type == "tpu"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    seen = []
    for x, y in data:
        assert x.device.type == "tpu"
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() > 0
        optimizer.step()
        optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(loss).item())
    assert len(seen) == 2
    accelerator.save_state(tmp_path)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    with torch.no_grad():
        [p.zero_() for p in model.parameters()]
    accelerator.load_state(tmp_path)
    assert all(torch.equal(p.cpu(), b) for p, b in zip(model.parameters(), before, strict=True))


def test_the_device_is_told_and_the_cpu_is_taken_where_it_is_asked_for():
    run = """
import accelerate, sys
import tpu_lab
from accelerate import Accelerator
from accelerate.utils import get_max_memory
memory = get_max_memory()
assert set(memory) == {0, "cpu"} and 0 < memory[0] <= memory["cpu"] * 2, memory
assert set(get_max_memory({"cpu": 10**9})) == {"cpu"}
assert Accelerator(cpu=True).device.type == "cpu"
"""
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def unet(diffusers):
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    ), dict(sample=hub_rows.draw(2, 3, 8, 8), timestep=torch.tensor([3, 7]))  # fmt: skip


def autoencoder(diffusers):
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4, norm_num_groups=4, sample_size=16,
    ), dict(sample=hub_rows.draw(2, 3, 16, 16))  # fmt: skip


def dit(diffusers):
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=1000, norm_num_groups=2,
    ), dict(hidden_states=hub_rows.draw(2, 4, 8, 8), timestep=torch.tensor([3, 7]), class_labels=torch.tensor([1, 2]))  # fmt: skip


def sd3(diffusers):
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, out_channels=4,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8,
    ), dict(
        hidden_states=hub_rows.draw(2, 4, 8, 8), timestep=torch.tensor([3.0, 7.0]),
        encoder_hidden_states=hub_rows.draw(2, 5, 16), pooled_projections=hub_rows.draw(2, 16),
    )  # fmt: skip


@pytest.mark.parametrize("make", [unet, autoencoder, dit, sd3])
def test_models_of_diffusers_agree_with_the_cpu(make):
    import diffusers

    torch.manual_seed(0)
    model, inputs = make(diffusers)
    want = hub_models.run(model.eval(), model, inputs, "cpu")
    got = hub_models.run(model.to("tpu"), model, inputs, "tpu")
    assert hub_models.differences(hub_rows.named("llama"), got, want) == []


@pytest.mark.parametrize("name", ["DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_a_pipeline_draws_what_the_cpu_draws(name):
    import diffusers

    pictures = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        transformer, _ = dit(diffusers)
        vae, _ = autoencoder(diffusers)
        pipe = diffusers.DiTPipeline(transformer.eval(), vae.eval(), getattr(diffusers, name)()).to(device)
        pipe.set_progress_bar_config(disable=True)
        assert pipe.device.type == device
        given = torch.Generator().manual_seed(0)  # of the CPU, as diffusers' own advice is: the same noise everywhere
        pictures.append(torch.tensor(pipe([1, 2], generator=given, num_inference_steps=3, output_type="np").images))
    assert pictures[0].shape == (2, 16, 16, 3)
    torch.testing.assert_close(pictures[1], pictures[0], rtol=1e-3, atol=1e-3)
