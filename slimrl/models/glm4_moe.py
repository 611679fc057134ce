"""GLM-4.5: grouped-query attention that rotates a part of each head, then DeepSeek-V3's kind of experts."""

from typing import Any

from slimrl.models.hf_config import partial_rotary_factor
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.mtp import embedding_copies, head_copies, mtp_rules, num_mtp_layers
from slimrl.models.rules import (
    Block,
    all_layers,
    attention_rules,
    decoder,
    embedding_rule,
    head_rules,
    mlp_norm_rule,
    mlp_rules,
)
from slimrl.models.sigmoid_moe import dense_layers, sigmoid_moe_config, sigmoid_moe_rules, sparse_layers
from slimrl.models.weight_map import Rule, WeightMap

DEFAULT_ROTARY_FACTOR = 0.5
"""Share of a head's dimensions that are rotated where config.json does not say."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for routers and positions that Megatron does not have."""
    return grouped_query_config(
        hf_config,
        rotary_percent=partial_rotary_factor(hf_config, DEFAULT_ROTARY_FACTOR),
        add_qkv_bias=_has_bias(hf_config),
        qk_layernorm=_has_qk_norm(hf_config),
        mtp_layers=num_mtp_layers(hf_config),
        **sigmoid_moe_config(hf_config),
    )


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    def attention(block: Block) -> list[Rule]:
        rules = attention_rules(hf_config, block, bias=_has_bias(hf_config), qk_norm=_has_qk_norm(hf_config))
        return [*rules, mlp_norm_rule(hf_config, block)]

    def sparse_layer_rules(block: Block) -> list[Rule]:
        return [*attention(block), *sigmoid_moe_rules(hf_config, block)]

    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size, embedding_copies(hf_config) if mtp else ()),
            *attention(decoder(all_layers(hf_config))),
            *mlp_rules(hf_config, decoder(dense_layers(hf_config))),
            *sigmoid_moe_rules(hf_config, decoder(sparse_layers(hf_config))),
            *head_rules(hf_config, padded_vocab_size, head_copies(hf_config) if mtp else ()),
            *(mtp_rules(hf_config, sparse_layer_rules) if mtp else ()),
        ]
    )


def _has_bias(hf_config: dict[str, Any]) -> bool:
    return bool(hf_config.get("attention_bias"))


def _has_qk_norm(hf_config: dict[str, Any]) -> bool:
    return bool(hf_config.get("use_qk_norm"))
