"""Qwen2 and Qwen2.5, dense: grouped-query attention with biases of queries, keys and values; gated MLPs."""

from typing import Any

from slimrl.models.families.rules import dense_decoder_rules
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import WeightMap


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for sliding windows and scaled positions."""
    return grouped_query_config(hf_config, add_qkv_bias=True)


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    return WeightMap(dense_decoder_rules(hf_config, padded_vocab_size, bias=True, qk_norm=False))
