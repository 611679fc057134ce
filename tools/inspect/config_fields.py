"""Keys of config.json that decide nothing, and other values of keys, for finding out what they decide."""

from collections.abc import Callable, Iterator
from typing import Any

from slimrl_tools.inspect.model_facts import STORAGE_KEYS

from slimrl.config.wrapper import WRAPPED_IN
from slimrl.models.families.mtp import MTP_KEYS
from slimrl.models.hf_config import head_dim, partial_rotary_factor

IRRELEVANT_KEYS = frozenset(
    {
        *STORAGE_KEYS,
        *MTP_KEYS,
        WRAPPED_IN,
        "_attn_implementation",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "eos_token_id",
        "enable_attention_fp32_softmax",
        "enable_lm_head_fp32",
        "enable_moe_fp32_combine",
        "ep_size",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "mamba_ssm_dtype",
        "mtp_transformer_layers",
        "num_mtp_modules",
        "use_mtp",
        "max_window_layers",
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
layers for multi-token prediction, which it leaves out, dtypes of an engine's computations, and windows, which
`use_sliding_window` turns on."""


_KINDS = ("full_attention", "indexed_attention")
"""What transformers calls layers of a kind of which a model has nothing else; the second is of models with indexers."""

REPEATED_KEYS: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "expert_hidden_dim": lambda config: [config.get("moe_intermediate_size")],
    "full_attention_interval": lambda config: [1 + [*config["layer_types"], "full_attention"].index("full_attention")],
    "head_dim": lambda config: [config.get("qk_rope_head_dim")],
    "layer_types": lambda config: [
        [kind] * config["num_hidden_layers"] for kind in _KINDS[: 2 if config.get("index_topk") else 1]
    ],
    "num_key_value_heads": lambda config: [config["num_attention_heads"]],
    "partial_rotary_factor": lambda config: [(config.get("rope_parameters") or {}).get("partial_rotary_factor")],
    "rotary_dim": lambda config: [round(head_dim(config) * partial_rotary_factor(config))],
    "qk_head_dim": lambda config: [config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)],
}
"""Redundant keys: harmless unread if they have one of these values."""


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
