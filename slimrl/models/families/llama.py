"""Llama 3, 3.1, 3.2 and 3.3: grouped-query attention and gated MLPs without biases; scaled positions from 3.1 on."""

from typing import Any

from slimrl.models.families.rules import dense_decoder_rules
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import WeightMap


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for biases, and for positions scaled otherwise than Llama 3.1's."""
    return grouped_query_config(hf_config)


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    return WeightMap(dense_decoder_rules(hf_config, padded_vocab_size, bias=False, qk_norm=False))
