"""What fields of megatron-core's configuration and keys of config.json are about, for comparing the two."""

from collections.abc import Callable, Iterator
from typing import Any

MODEL_PREFIXES = ("linear_", "dsa_", "mamba_")

MODEL_FIELDS = frozenset(
    {
        "activation_func",
        "activation_func_clamp_value",
        "add_bias_linear",
        "add_qkv_bias",
        "apply_residual_connection_post_layernorm",
        "attention_output_gate",
        "beta_fast",
        "beta_slow",
        "experimental_attention_variant",
        "ffn_hidden_size",
        "gated_linear_unit",
        "glu_linear_offset",
        "heterogeneous_block_specs",
        "hidden_size",
        "kv_channels",
        "kv_lora_rank",
        "layernorm_epsilon",
        "layernorm_zero_centered_gamma",
        "moe_apply_probs_on_input",
        "moe_expert_capacity_factor",
        "moe_ffn_hidden_size",
        "moe_latent_size",
        "moe_layer_freq",
        "moe_router_enable_expert_bias",
        "moe_router_force_load_balancing",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_topk_limited_devices",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size",
        "moe_token_dropping",
        "mrope_section",
        "mscale",
        "mscale_all_dim",
        "mtp_num_layers",
        "multi_latent_attention",
        "no_rope_freq",
        "normalization",
        "num_attention_heads",
        "num_layers",
        "num_moe_experts",
        "num_query_groups",
        "original_max_position_embeddings",
        "q_lora_rank",
        "qk_head_dim",
        "qk_l2_norm",
        "qk_layernorm",
        "qk_pos_emb_head_dim",
        "rope_type",
        "rotary_base",
        "rotary_interleaved",
        "rotary_percent",
        "rotary_scaling_factor",
        "softmax_scale",
        "softmax_type",
        "v_head_dim",
        "window_attn_skip_freq",
        "window_size",
    }
)
"""Fields of TransformerConfig and MLATransformerConfig that change the function that the model computes."""

TRAINING_FIELDS = frozenset(
    {
        "attention_dropout",
        "embedding_init_method",
        "embedding_init_method_std",
        "hidden_dropout",
        "init_method",
        "init_method_std",
        "moe_aux_loss_coeff",
        "moe_input_jitter_eps",
        "moe_router_bias_update_rate",
        "moe_router_load_balancing_type",
        "moe_z_loss_coeff",
        "mtp_loss_scaling_factor",
        "output_layer_init_method",
        "qk_clip",
        "qk_clip_alpha",
        "qk_clip_threshold",
    }
)
"""Fields that change how it is trained, not what its weights compute. All others: speed, memory, rounding, layout."""

IRRELEVANT_KEYS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "ep_size",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "seq_aux",
        "sliding_window",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of config.json that do not change what the trainer builds: tokens, storage, dropout and losses of another
training, layers for multi-token prediction, which it leaves out, and windows, which `use_sliding_window` turns on."""


REPEATED_KEYS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "head_dim": lambda config: [config.get("qk_rope_head_dim")],
    "layer_types": lambda config: [["full_attention"] * config["num_hidden_layers"]],
    "num_key_value_heads": lambda config: [config["num_attention_heads"]],
    "partial_rotary_factor": lambda config: [(config.get("rope_parameters") or {}).get("partial_rotary_factor")],
    "qk_head_dim": lambda config: [config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)],
}
"""Keys that families need not read where they have one of these values, which say nothing new."""


def kind_of_field(name: str) -> str:
    """What a change of this field changes: "model", "training" or "execution"."""
    if name in MODEL_FIELDS or name.startswith(MODEL_PREFIXES):
        return "model"
    return "training" if name in TRAINING_FIELDS else "execution"


def matters(key: str, hf_config: dict[str, Any]) -> bool:
    """Whether a key of config.json that nothing reads may mean another model than the one that is built."""
    value = hf_config[key]
    if key in IRRELEVANT_KEYS or not value:
        return False
    return key not in REPEATED_KEYS or value not in REPEATED_KEYS[key](hf_config)


def variants(value: Any) -> Iterator[Any]:
    """Other values that a key of config.json might have had, for finding out what it decides."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * 2, value / 2 if isinstance(value, float) else value + 1, 1)
    elif value is None:
        yield from (64, 0.5, True)
    elif isinstance(value, str):
        yield "another"
    elif isinstance(value, list):
        yield from (value[:-1], [*value, 0], [*value, 1])
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from ({**value, name: other} for other in variants(item))
