"""Qwen3, the dense family: grouped-query attention with a norm over each head's queries and keys, gated MLPs."""

from typing import Any

from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.rules import (
    all_layers,
    attention_rules,
    decoder,
    embedding_rule,
    head_rules,
    mlp_norm_rule,
    mlp_rules,
)
from slimrl.models.weight_map import WeightMap


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for the options of transformers' Qwen3 that no released Qwen3 uses."""
    return grouped_query_config(hf_config, qk_layernorm=True)


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    block = decoder(all_layers(hf_config))
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *attention_rules(hf_config, block, bias=False, qk_norm=True),
            mlp_norm_rule(hf_config, block),
            *mlp_rules(hf_config, block),
            *head_rules(hf_config, padded_vocab_size),
        ]
    )
