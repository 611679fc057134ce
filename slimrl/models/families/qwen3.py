"""Qwen3, dense: grouped-query attention with a norm over each head's queries and keys; gated MLPs."""

from typing import Any

from slimrl.models.families.rules import dense_decoder_rules
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import WeightMap


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for the options of transformers' Qwen3 that no released Qwen3 uses."""
    return grouped_query_config(hf_config, qk_layernorm=True)


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    return WeightMap(dense_decoder_rules(hf_config, padded_vocab_size, bias=False, qk_norm=True))
