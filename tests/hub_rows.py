"""The table of hub_models.py: families of transformers, each with the config that makes it tiny and its inputs."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch

BATCH, LENGTH, WORDS = 2, 8, 64  # rows share their sizes, so that strict mode's programs serve many families
NAMED = dict(vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
TEXT = NAMED | SIZES | dict(max_position_embeddings=64)
GROUPED = TEXT | dict(num_key_value_heads=2)
HEADS = GROUPED | dict(head_dim=8)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = TEXT | EXPERTS | dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4,
    n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1, num_key_value_heads=4,
)  # fmt: skip
VISION = SIZES | dict(image_size=16, patch_size=8, num_labels=5)
SPEECH = SIZES | dict(
    vocab_size=WORDS, conv_dim=[32, 32], conv_stride=[4, 4], conv_kernel=[8, 4], num_feat_extract_layers=2,
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False, mask_time_prob=0.0,
)  # fmt: skip
BOTH = NAMED | dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, decoder_start_token_id=1,
)  # fmt: skip
RESNET = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5, out_features=["stage2"])
STAGES = dict(embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=2, image_size=16, patch_size=2, num_labels=5)
DETECT = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
    decoder_ffn_dim=48, num_queries=5, num_labels=5, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
)  # fmt: skip
SERIES = dict(
    prediction_length=4, context_length=8, lags_sequence=[1, 2], d_model=32, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
)  # fmt: skip


def draw(*shape, top=None):
    """Numbers that are the same each time: normal, or integers from 3 (the first that is no special word) to `top`."""
    given = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=given) if top is None else torch.randint(3, top, shape, generator=given)


def words(**more):
    """Two lines, the second one with two words of padding, and what is to be said."""
    ids, mask = draw(BATCH, LENGTH, top=WORDS), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=ids) | more


def unlabelled(**more):
    """Two lines, and nothing to be said."""
    return {k: v for k, v in words().items() if k != "labels"} | more


def unmasked(**more):
    """Two lines without padding."""
    return {k: v for k, v in words().items() if k != "attention_mask"} | more


def pixels(size=16, **more):
    return dict(pixel_values=draw(BATCH, 3, size, size)) | more


def labelled(size=16):
    """Two pictures and their classes."""
    return pixels(size, labels=torch.tensor([1, 3]))


def sound():
    """Two pieces of sound and the words that are said."""
    return dict(input_values=draw(BATCH, 320), labels=draw(BATCH, 4, top=WORDS))


def series():
    """Ten past values and times for a context of eight with lags of up to two, and four that follow."""
    seen, next_ = (BATCH, 10), (BATCH, 4)
    return dict(
        past_values=draw(*seen).abs(), past_time_features=draw(*seen, 1), past_observed_mask=torch.ones(seen),
        future_values=draw(*next_).abs(), future_time_features=draw(*next_, 1),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One family. name: as the hub says it; model: the class in transformers; config: what makes it tiny; inputs: a
    function that makes the arguments; backbone: the (class, config) of a model that its config holds; training: it has a
    backward in training only; host: the ops
    that run on the CPU by their nature (host_bound.py has the reasons); tolerance: of outputs and gradients, in parts of the largest
    number of a tensor."""

    name: str
    model: str
    config: dict[str, Any]
    inputs: Callable[[], dict[str, Any]] = words
    backbone: tuple[str, dict[str, Any]] | None = None
    host: frozenset[str] = frozenset()
    training: bool = False
    tolerance: float = 2e-5


WRITERS = [  # decoders: each word sees those before it
    Row("llama", "LlamaForCausalLM", GROUPED),
    Row("llama4", "Llama4ForCausalLM", HEADS | dict(num_local_experts=4, intermediate_size_mlp=48, attention_chunk_size=4)),
    Row("qwen2", "Qwen2ForCausalLM", GROUPED),
    Row("qwen3", "Qwen3ForCausalLM", HEADS),
    Row("qwen3_moe", "Qwen3MoeForCausalLM", HEADS | EXPERTS | dict(num_experts=4)),
    Row("qwen3_next", "Qwen3NextForCausalLM", HEADS | EXPERTS | dict(num_experts=4, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=16)),
    Row("deepseek_v2", "DeepseekV2ForCausalLM", LATENT),
    Row("deepseek_v3", "DeepseekV3ForCausalLM", LATENT),
    Row("gemma2", "Gemma2ForCausalLM", HEADS | dict(sliding_window=4, query_pre_attn_scalar=8)),
    Row("gemma3", "Gemma3ForCausalLM", HEADS | dict(sliding_window=4, query_pre_attn_scalar=8)),
    Row("mistral", "MistralForCausalLM", HEADS | dict(sliding_window=4)),
    Row("mixtral", "MixtralForCausalLM", GROUPED | dict(num_local_experts=4, num_experts_per_tok=2)),
    Row("gpt2", "GPT2LMHeadModel", NAMED | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    Row("gpt_neox", "GPTNeoXForCausalLM", TEXT),
    Row("gpt_oss", "GptOssForCausalLM", HEADS | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=4)),
    Row("opt", "OPTForCausalLM", TEXT | dict(ffn_dim=48, word_embed_proj_dim=32)),
    Row("bloom", "BloomForCausalLM", NAMED | dict(hidden_size=32, n_layer=2, n_head=4)),
    Row("falcon", "FalconForCausalLM", TEXT | dict(alibi=True)),
    Row("phi", "PhiForCausalLM", TEXT),
    Row("phi3", "Phi3ForCausalLM", GROUPED),
    Row("olmo2", "Olmo2ForCausalLM", GROUPED),
    Row("cohere", "CohereForCausalLM", GROUPED),
    Row("mamba", "MambaForCausalLM", TEXT | dict(state_size=4), unlabelled),
    Row("mamba2", "Mamba2ForCausalLM", TEXT | dict(state_size=4, num_heads=8, head_dim=8, n_groups=1, chunk_size=4), unlabelled),
    Row("rwkv", "RwkvForCausalLM", NAMED | SIZES | dict(attention_hidden_size=32, context_length=16), lambda: words(use_cache=False)),
    Row("recurrent_gemma", "RecurrentGemmaForCausalLM", HEADS | dict(lru_width=32, attention_window_size=4, block_types=["recurrent", "attention"])),
    Row("falcon_h1", "FalconH1ForCausalLM", HEADS | dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4, mamba_chunk_size=4, mamba_expand=1)),
    Row("lfm2", "Lfm2ForCausalLM", GROUPED | dict(layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=8)),
    Row("minimax", "MiniMaxForCausalLM", HEADS | dict(num_local_experts=4, num_experts_per_tok=2, block_size=4, layer_types=["linear_attention", "full_attention"])),
    Row("xlnet", "XLNetLMHeadModel", dict(vocab_size=WORDS, d_model=32, n_layer=2, n_head=4, d_inner=48)),
    Row("reformer", "ReformerModelWithLMHead", dict(vocab_size=WORDS, hidden_size=32, num_attention_heads=2, attention_head_size=16, feed_forward_size=48, attn_layers=["local", "local"], local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_hashes=2, num_buckets=4, axial_pos_shape=[2, 4], axial_pos_embds_dim=[16, 16], max_position_embeddings=8, is_decoder=True, hash_seed=0, hidden_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0), training=True),
]  # fmt: skip
READERS = [  # encoders, and both together
    Row("bert", "BertForMaskedLM", TEXT),
    Row("roberta", "RobertaForMaskedLM", TEXT),
    Row("distilbert", "DistilBertForMaskedLM", dict(vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64)),
    Row("electra", "ElectraForMaskedLM", TEXT | dict(embedding_size=16)),
    Row("albert", "AlbertForMaskedLM", TEXT | dict(embedding_size=16)),
    Row("deberta_v2", "DebertaV2ForMaskedLM", TEXT | dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)),
    Row("modernbert", "ModernBertForMaskedLM", TEXT | dict(local_attention=4, global_attn_every_n_layers=2)),
    Row("longformer", "LongformerForMaskedLM", TEXT | dict(attention_window=4)),
    Row("big_bird", "BigBirdForMaskedLM", TEXT | dict(block_size=2, num_random_blocks=1)),
    Row("convbert", "ConvBertForMaskedLM", TEXT | dict(embedding_size=32, conv_kernel_size=3)),
    Row("funnel", "FunnelForMaskedLM", dict(vocab_size=WORDS, d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1], num_decoder_layers=1)),
    Row("canine", "CanineModel", TEXT | dict(num_hash_functions=2, num_hash_buckets=16, local_transformer_stride=4, downsampling_rate=2), unlabelled),
    Row("fnet", "FNetForMaskedLM", TEXT, unmasked),
    Row("esm", "EsmForMaskedLM", TEXT | dict(position_embedding_type="rotary", mask_token_id=3)),
    Row("layoutlm", "LayoutLMForMaskedLM", TEXT, lambda: words(bbox=draw(BATCH, LENGTH, 4, top=60).cumsum(-1))),
    Row("t5", "T5ForConditionalGeneration", dict(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)),
    Row("bart", "BartForConditionalGeneration", BOTH),
    Row("marian", "MarianMTModel", BOTH),
    Row("pegasus", "PegasusForConditionalGeneration", BOTH),
    Row("prophetnet", "ProphetNetForConditionalGeneration", NAMED | dict(hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, ngram=2)),
    Row("switch_transformers", "SwitchTransformersForConditionalGeneration", dict(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, num_experts=4, decoder_start_token_id=0, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1), host=frozenset({"nonzero"})),
]  # fmt: skip
SENSES = [  # pictures, sound, both with words, and numbers over time
    Row("vit", "ViTForImageClassification", VISION, labelled),
    Row("resnet", "ResNetForImageClassification", RESNET, labelled),
    Row("convnext", "ConvNextForImageClassification", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5), labelled),
    Row("swin", "SwinForImageClassification", STAGES, labelled),
    Row("swinv2", "Swinv2ForImageClassification", STAGES, labelled),
    Row("hiera", "HieraForImageClassification", dict(embed_dim=8, image_size=[32, 32], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], depths=[1, 1], num_heads=[1, 2], masked_unit_size=[4, 4], query_stride=[2, 2], num_query_pool=1, mlp_ratio=2.0, num_labels=5), lambda: labelled(32)),
    Row("beit", "BeitForImageClassification", VISION | dict(use_relative_position_bias=True), labelled),
    Row("dinov2", "Dinov2ForImageClassification", VISION | dict(image_size=24), labelled),
    Row("vit_mae", "ViTMAEForPreTraining", VISION | dict(decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=48), lambda: pixels(noise=draw(BATCH, 4))),
    Row("mobilenet_v2", "MobileNetV2ForImageClassification", dict(depth_multiplier=0.25, num_labels=5, image_size=64), lambda: labelled(64)),
    Row("mobilevit", "MobileViTForImageClassification", dict(hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48], num_labels=5, image_size=64, num_attention_heads=4), lambda: labelled(64)),
    Row("regnet", "RegNetForImageClassification", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4, num_labels=5), labelled),
    Row("poolformer", "PoolFormerForImageClassification", dict(hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], num_labels=5), labelled),
    Row("segformer", "SegformerForSemanticSegmentation", dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=5), lambda: pixels(labels=draw(BATCH, 16, 16, top=5))),
    Row("dpt", "DPTForDepthEstimation", VISION | dict(neck_hidden_sizes=[8, 8, 16, 16], neck_ignore_stages=[], fusion_hidden_size=16, reassemble_factors=[4, 2, 1, 0.5], is_hybrid=False, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3]), pixels),
    Row("detr", "DetrForObjectDetection", DETECT, pixels, ("ResNetConfig", RESNET)),
    Row("deformable_detr", "DeformableDetrForObjectDetection", DETECT | dict(num_feature_levels=2), pixels, ("ResNetConfig", RESNET | dict(out_features=["stage1", "stage2"]))),
    Row("rt_detr", "RTDetrForObjectDetection", dict(d_model=32, encoder_hidden_dim=32, encoder_in_channels=[8, 16], feat_strides=[4, 8], encoder_layers=1, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, num_queries=5, num_feature_levels=2, decoder_in_channels=[32, 32], encode_proj_layers=[1], num_labels=5, use_timm_backbone=False, num_denoising=0, eval_size=None), lambda: pixels(32), ("RTDetrResNetConfig", RESNET | dict(out_features=["stage1", "stage2"]))),
    Row("yolos", "YolosForObjectDetection", VISION | dict(image_size=[16, 16], num_detection_tokens=4), pixels),
    Row("sam", "SamModel", dict(
        vision_config=SIZES | dict(image_size=16, patch_size=4, window_size=2, global_attn_indexes=[1], output_channels=32, num_pos_feats=16, mlp_dim=48),
        prompt_encoder_config=dict(hidden_size=32, image_size=16, patch_size=4, image_embedding_size=4, mask_input_channels=8),
        mask_decoder_config=dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_dim=48, iou_head_hidden_dim=16),
    ), lambda: pixels(input_points=draw(BATCH, 1, 2, 2).abs() * 4)),
    Row("clip", "CLIPModel", dict(text_config=TEXT, vision_config=VISION, projection_dim=16), lambda: unlabelled(**pixels(), return_loss=True)),
    Row("siglip", "SiglipModel", dict(text_config=TEXT | dict(projection_size=32), vision_config=VISION), lambda: unlabelled(**pixels(), return_loss=True)),
    Row("blip", "BlipForConditionalGeneration", dict(text_config=TEXT | dict(encoder_hidden_size=32), vision_config=VISION), lambda: words(**pixels())),
    Row("blip_2", "Blip2ForConditionalGeneration", dict(vision_config=VISION, qformer_config=SIZES | dict(vocab_size=WORDS, encoder_hidden_size=32, max_position_embeddings=64), text_config=NAMED | SIZES | dict(model_type="opt", ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64), num_query_tokens=4, image_token_index=3), lambda: words(**pixels(), input_ids=torch.tensor([[3, 3, 3, 3, 1, 9, 8, 7]]).repeat(BATCH, 1))),
    Row("llava", "LlavaForConditionalGeneration", dict(text_config=GROUPED | dict(model_type="llama"), vision_config=VISION | dict(model_type="clip_vision_model"), image_token_index=3, image_seq_length=4), lambda: words(**pixels(), input_ids=torch.tensor([[1, 3, 3, 3, 3, 9, 8, 7]]).repeat(BATCH, 1))),
    Row("vilt", "ViltModel", TEXT | dict(image_size=16, patch_size=8), lambda: unlabelled(**pixels()), host=frozenset({"nonzero", "_unique2"})),
    Row("perceiver", "PerceiverForMaskedLM", dict(vocab_size=WORDS, d_model=32, d_latents=32, num_latents=4, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4, qk_channels=32, v_channels=32, max_position_embeddings=8), lambda: {"inputs" if k == "input_ids" else k: v for k, v in words().items()}),
    Row("whisper", "WhisperForConditionalGeneration", BOTH | dict(num_mel_bins=8, max_source_positions=8, max_target_positions=16), lambda: dict(input_features=draw(BATCH, 8, 16), labels=draw(BATCH, LENGTH, top=WORDS))),
    Row("wav2vec2", "Wav2Vec2ForCTC", SPEECH, sound, host=frozenset({"masked_select"})),
    Row("hubert", "HubertForCTC", SPEECH, sound, host=frozenset({"masked_select"})),
    Row("wavlm", "WavLMForCTC", SPEECH | dict(num_buckets=8, max_bucket_distance=16), sound, host=frozenset({"masked_select"})),
    Row("audio_spectrogram_transformer", "ASTForAudioClassification", SIZES | dict(patch_size=4, num_mel_bins=8, max_length=16, frequency_stride=4, time_stride=4, num_labels=5), lambda: dict(input_values=draw(BATCH, 16, 8), labels=torch.tensor([1, 3]))),
    Row("encodec", "EncodecModel", dict(num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=16, num_lstm_layers=1, upsampling_ratios=[4, 2], target_bandwidths=[24.0], sampling_rate=1000), lambda: dict(input_values=draw(BATCH, 1, 64))),
    Row("time_series_transformer", "TimeSeriesTransformerForPrediction", SERIES | dict(num_time_features=1), series),
    Row("informer", "InformerForPrediction", SERIES | dict(num_time_features=1), series),
    Row("timesfm", "TimesFmModelForPrediction", SIZES | dict(patch_length=4, context_length=16, horizon_length=4, head_dim=8, freq_size=3), lambda: dict(past_values=draw(BATCH, 16), freq=torch.tensor([0, 1]))),
    Row("autoformer", "AutoformerForPrediction", SERIES | dict(num_time_features=1, label_length=4, moving_average=3), series),
    Row("patchtst", "PatchTSTForPrediction", SIZES | dict(num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=32, ffn_dim=48), lambda: dict(past_values=draw(BATCH, 16, 2), future_values=draw(BATCH, 4, 2))),
    Row("decision_transformer", "DecisionTransformerModel", dict(state_dim=6, act_dim=3, hidden_size=32, max_ep_len=16, n_layer=2, n_head=4), lambda: dict(states=draw(BATCH, 4, 6), actions=draw(BATCH, 4, 3), rewards=draw(BATCH, 4, 1), returns_to_go=draw(BATCH, 4, 1), timesteps=draw(BATCH, 4, top=15), attention_mask=torch.ones(BATCH, 4))),
]  # fmt: skip
ROWS = [*WRITERS, *READERS, *SENSES]


def named(name: str) -> Row:
    """The row of a family. KeyError with all names if there is none."""
    rows = {row.name: row for row in ROWS}
    if name not in rows:
        raise KeyError(f"{name!r} is no family of hub_rows.py: {', '.join(rows)}")
    return rows[name]
