"""OLMoE: every layer has experts with softmax scores, and none of them is shared.

Queries are normalised over all heads together, and keys too.
"""

import json
from dataclasses import replace
from typing import Any

from slimrl.models.families.qwen3_moe import experts_config, num_experts
from slimrl.models.families.rules import (
    all_layers,
    attention_rules,
    decoder,
    embedding_rule,
    expert_rules,
    head_rules,
    mlp_norm_rule,
    router_rules,
)
from slimrl.models.hf_config import required
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import WeightMap

SGLANG_HAS = {"norm_topk_prob": False, "rms_norm_eps": 1e-05}
"""Values of released configs that SGLang takes whatever the config says."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for clipped queries, keys and values, which no released model has."""
    if hf_config.get("clip_qkv") is not None:
        raise ValueError(f"config.json: not supported for olmoe: clip_qkv: {hf_config['clip_qkv']!r}")
    experts = experts_config(hf_config, width="intermediate_size")
    return replace(grouped_query_config(hf_config, qk_layernorm=True, **experts), qk_norm_over_heads=True)


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    layers, experts = decoder(all_layers(hf_config)), num_experts(hf_config)
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "intermediate_size")
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *attention_rules(hf_config, layers, bias=False, qk_norm=True, norm_over_heads=True),
            mlp_norm_rule(hf_config, layers),
            *router_rules(hidden, experts, layers, bias=None),
            *expert_rules(hidden, wide, experts, layers),
            *head_rules(hf_config, padded_vocab_size),
        ]
    )


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang would serve another model than this config describes; None if it would not."""
    wrong = {name: hf_config.get(name) for name, value in SGLANG_HAS.items() if hf_config.get(name) != value}
    if not wrong:
        return None
    held = {name: SGLANG_HAS[name] for name in wrong}
    return (
        f"SGLang (srt/models/olmoe.py) has {json.dumps(held)[1:-1]} alone; config.json has {json.dumps(wrong)[1:-1]}."
    )
