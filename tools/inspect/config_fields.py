"""Kinds of megatron-core's fields and of config.json's keys, for comparing the two."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from slimrl_tools.inspect.model_facts import STORAGE_KEYS

from slimrl.models.family import FAMILIES, family_of
from slimrl.models.hf_config import published_config, published_names

MODEL_PREFIXES = ("linear_", "dsa_", "mamba_")

OTHER_MODEL_FIELDS = frozenset(
    {
        "activation_func_clamp_value",
        "apply_residual_connection_post_layernorm",
        "attention_output_gate",
        "experimental_attention_variant",
        "glu_linear_offset",
        "heterogeneous_block_specs",
        "layernorm_zero_centered_gamma",
        "moe_apply_probs_on_input",
        "moe_expert_capacity_factor",
        "moe_latent_size",
        "moe_router_force_load_balancing",
        "moe_router_topk_limited_devices",
        "moe_shared_expert_gate",
        "moe_token_dropping",
        "mrope_section",
        "mtp_num_layers",
        "multi_latent_attention",
        "no_rope_freq",
        "qk_l2_norm",
        "rotary_interleaved",
        "softmax_scale",
        "softmax_type",
        "window_attn_skip_freq",
        "window_size",
    }
)
"""Fields of TransformerConfig and MLATransformerConfig that change what the model computes, and that no family sets."""

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
"""Fields that change training, not what the weights compute. All others: speed, memory, rounding, layout."""

IRRELEVANT_KEYS = frozenset(
    {
        *STORAGE_KEYS,
        "_attn_implementation",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
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
        "return_dict",
        "router_aux_loss_coef",
        "seq_aux",
        "sliding_window",
        "use_cache",
    }
)
"""Keys of config.json that do not change what the trainer builds: tokens, storage, dropout and losses of pretraining,
layers for multi-token prediction, which it leaves out, and windows, which `use_sliding_window` turns on."""


REPEATED_KEYS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "head_dim": lambda config: [config.get("qk_rope_head_dim")],
    "layer_types": lambda config: [["full_attention"] * config["num_hidden_layers"]],
    "num_key_value_heads": lambda config: [config["num_attention_heads"]],
    "partial_rotary_factor": lambda config: [(config.get("rope_parameters") or {}).get("partial_rotary_factor")],
    "qk_head_dim": lambda config: [config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)],
}
"""Redundant keys: harmless unread if they have one of these values."""


def kind_of_field(name: str) -> str:
    """What a change of this field changes: "model", "training" or "execution"."""
    if name in TRAINING_FIELDS:
        return "training"
    of_the_model = name in OTHER_MODEL_FIELDS or name.startswith(MODEL_PREFIXES) or name in _set_by_families()
    return "model" if of_the_model else "execution"


@cache
def _set_by_families() -> frozenset[str]:
    """Fields that a family sets for a published model."""
    model_types = {model_type for family in FAMILIES for model_type in family.model_types}
    configs = (config for config in map(published_config, published_names()) if config["model_type"] in model_types)
    return frozenset(name for config in configs for name in family_of(config).megatron_config(config).transformer)


def matters(key: str, hf_config: dict[str, Any]) -> bool:
    """Whether an unread key of config.json may mean another model."""
    value = hf_config[key]
    if key in IRRELEVANT_KEYS or not value:
        return False
    return key not in REPEATED_KEYS or value not in REPEATED_KEYS[key](hf_config)


def variants(value: Any) -> Iterator[Any]:
    """Other possible values of a key of config.json, to find out what it decides."""
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
