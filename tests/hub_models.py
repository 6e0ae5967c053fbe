"""Models others wrote, tiny and with random weights: one row a family, built from its own config, with inputs.

`python -m tests.hub_models [family …] [--mode strict fused compile]` runs the rows in each mode against the CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch

BATCH, LENGTH, WORDS = 2, 8, 64  # rows share their sizes, so that strict mode's programs serve many families
TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
BOTH = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def draw(*shape, top=None):
    """Numbers that are the same each time: normal, or integers from 3 (the first that is no special word) to `top`."""
    given = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=given) if top is None else torch.randint(3, top, shape, generator=given)


def words(**more):
    """Two lines, the second one with two words of padding, and what is to be said."""
    ids, mask = draw(BATCH, LENGTH, top=WORDS), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids, **more}


def unlabelled(**more):
    return {k: v for k, v in words(**more).items() if k != "labels"}


def pixels(**more):
    return {"pixel_values": draw(BATCH, 3, 16, 16), **more}


def classes():
    return {"labels": torch.tensor([1, 3])}


@dataclasses.dataclass(frozen=True)
class Row:
    """One family. name: as the hub says it; model: the class in transformers; config: what makes it tiny; inputs: a
    function that makes the arguments; host: ops that run on the CPU by their nature, each with the reason;
    tolerance: of outputs and gradients, relative to the largest of a tensor."""

    name: str
    model: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Any]] = words
    host: dict[str, str] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-4


ROWS = [
    Row("llama", "LlamaForCausalLM", GROUPED),
    Row("qwen2", "Qwen2ForCausalLM", GROUPED),
    Row("bert", "BertForMaskedLM", TEXT),
    Row("vit", "ViTForImageClassification", VISION, lambda: pixels(**classes())),
    Row("t5", "T5ForConditionalGeneration", {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
    Row("mistral", "MistralForCausalLM", HEADS | {"sliding_window": 4}),
    Row("qwen3", "Qwen3ForCausalLM", HEADS),
    Row("qwen3_moe", "Qwen3MoeForCausalLM", HEADS | EXPERTS | {"num_experts": 4}),
    Row("mixtral", "MixtralForCausalLM", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Row("gemma2", "Gemma2ForCausalLM", HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    Row("gemma3", "Gemma3ForCausalLM", HEADS | {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    Row("deepseek_v2", "DeepseekV2ForCausalLM", TEXT | EXPERTS | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}),
    Row("deepseek_v3", "DeepseekV3ForCausalLM", TEXT | EXPERTS | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}),
    Row("gpt2", "GPT2LMHeadModel", {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}),
    Row("gpt_neox", "GPTNeoXForCausalLM", TEXT),
    Row("opt", "OPTForCausalLM", TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Row("bloom", "BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
    Row("falcon", "FalconForCausalLM", TEXT | {"alibi": True}),
    Row("phi", "PhiForCausalLM", TEXT),
    Row("phi3", "Phi3ForCausalLM", GROUPED),
    Row("gpt_oss", "GptOssForCausalLM", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    Row("mamba", "MambaForCausalLM", TEXT | {"state_size": 4}, unlabelled),
    Row("mamba2", "Mamba2ForCausalLM", TEXT | {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}, unlabelled),
    Row("rwkv", "RwkvForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "intermediate_size": 48, "context_length": 16}),
    Row("qwen3_next", "Qwen3NextForCausalLM", HEADS | EXPERTS | {"num_experts": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}),
    Row("roberta", "RobertaForMaskedLM", TEXT),
    Row("distilbert", "DistilBertForMaskedLM", {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}),
    Row("electra", "ElectraForMaskedLM", TEXT | {"embedding_size": 16}),
    Row("albert", "AlbertForMaskedLM", TEXT | {"embedding_size": 16}),
    Row("deberta_v2", "DebertaV2ForMaskedLM", TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}),
    Row("modernbert", "ModernBertForMaskedLM", TEXT | {"local_attention": 4, "global_attn_every_n_layers": 2}),
    Row("longformer", "LongformerForMaskedLM", TEXT | {"attention_window": 4}),
    Row("big_bird", "BigBirdForMaskedLM", TEXT | {"block_size": 2, "num_random_blocks": 1}),
    Row("reformer", "ReformerModelWithLMHead", {"vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16, "feed_forward_size": 48, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_hashes": 2, "num_buckets": 4, "axial_pos_shape": [2, 4], "axial_pos_embds_dim": [16, 16], "max_position_embeddings": 8, "is_decoder": True, "hash_seed": 0}),
    Row("fnet", "FNetForMaskedLM", TEXT, lambda: {k: v for k, v in words().items() if k != "attention_mask"}),
    Row("xlnet", "XLNetLMHeadModel", {"vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    Row("layoutlm", "LayoutLMForMaskedLM", TEXT, lambda: words(bbox=draw(BATCH, LENGTH, 4, top=60).cumsum(-1))),
    Row("esm", "EsmForMaskedLM", TEXT | {"position_embedding_type": "rotary", "mask_token_id": 3}),
    Row("bart", "BartForConditionalGeneration", BOTH),
    Row("marian", "MarianMTModel", BOTH),
    Row("pegasus", "PegasusForConditionalGeneration", BOTH),
    Row("whisper", "WhisperForConditionalGeneration", BOTH | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}, lambda: {"input_features": draw(BATCH, 8, 16), "labels": draw(BATCH, LENGTH, top=WORDS)}),
]


def named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def build(row: Row, **more) -> torch.nn.Module:
    """The model of a row on the CPU, the same weights each time; without dropout, with batch statistics."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, row.model)
    model = kind(kind.config_class(**row.config, **more)).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.train()
    return model


def floats(value) -> list[torch.Tensor]:
    """The floating tensors of a model's output, in order: what a loss can be made of."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in floats(v)] if isinstance(value, (list, tuple)) else []


def run(call, model, inputs, device):
    """(outputs, gradients by name) of one forward and backward, on the CPU. The loss is the mean square of all that
    came out, so that no output is left without a gradient."""
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    out = floats(call(**given))
    model.zero_grad()
    sum(t.square().mean() for t in out if t.requires_grad).backward()
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return [t.detach().cpu() for t in out], grads


def differences(row: Row, got, want) -> list[str]:
    """What is not the CPU's, in words; empty if all is. got, want: what `run` gave."""
    found = [] if len(got[0]) == len(want[0]) else [f"{len(got[0])} outputs for {len(want[0])}"]
    if got[1].keys() != want[1].keys():
        found.append(f"gradients of {sorted(got[1].keys() ^ want[1].keys())} on one side only")
    pairs = [(f"output {n}", a, b) for n, (a, b) in enumerate(zip(*(side[0] for side in (got, want))))]
    pairs += [(f"gradient of {name}", got[1][name], b) for name, b in want[1].items() if name in got[1]]
    for name, a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isfinite(), b.isfinite()):
            found.append(f"{name}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}, or NaN and inf elsewhere")
            continue
        finite = b.isfinite()
        apart = (a - b)[finite].abs().max().item() if finite.any() else 0.0
        largest = max(b[finite].abs().max().item(), 1e-3) if finite.any() else 1.0
        if apart > row.tolerance * largest:
            found.append(f"{name}: {apart:.3g} apart, with numbers up to {largest:.3g}")
    return found
