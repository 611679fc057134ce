"""GLM-4.5: grouped-query attention with partial rotation of each head, experts as in DeepSeek-V3."""

from typing import Any

from slimrl.models.families.deepseek_moe import moe_config, moe_weight_map
from slimrl.models.families.mtp import num_mtp_layers
from slimrl.models.families.rules import attention_rules
from slimrl.models.hf_config import partial_rotary_factor
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import WeightMap

DEFAULT_ROTARY_FACTOR = 0.5
"""Fraction of a head's dimensions that are rotated, if config.json has no value."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for routers and positions that Megatron does not have."""
    return grouped_query_config(
        hf_config,
        rotary_percent=partial_rotary_factor(hf_config, DEFAULT_ROTARY_FACTOR),
        add_qkv_bias=_has_bias(hf_config),
        qk_layernorm=_has_qk_norm(hf_config),
        mtp_layers=num_mtp_layers(hf_config),
        **moe_config(hf_config),
    )


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    bias, qk_norm = _has_bias(hf_config), _has_qk_norm(hf_config)
    return moe_weight_map(
        hf_config,
        padded_vocab_size,
        lambda prefix: attention_rules(hf_config, prefix, bias=bias, qk_norm=qk_norm),
        mtp=mtp,
    )


def _has_bias(hf_config: dict[str, Any]) -> bool:
    return bool(hf_config.get("attention_bias"))


def _has_qk_norm(hf_config: dict[str, Any]) -> bool:
    return bool(hf_config.get("use_qk_norm"))
