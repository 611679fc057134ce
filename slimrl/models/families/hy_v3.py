"""Hy3 of Tencent: grouped-query attention with norms of queries and keys, experts as in DeepSeek-V3 by other names."""

import re
from typing import Any

from slimrl.config.hf_config import num_dense_layers
from slimrl.models.engine_slice import EngineRule, EngineShape, EngineSlice
from slimrl.models.families.deepseek_moe import MoeNames, moe_config, moe_weight_map
from slimrl.models.families.mtp import num_mtp_layers, numbered_layer_name
from slimrl.models.families.rules import attention_rules
from slimrl.models.families.served_keys import unserved_without
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import WeightMap

NAMES = MoeNames(
    router="mlp.router.gate.weight",
    bias="mlp.expert_bias",
    shared="shared_mlp",
    mtp_norm="final_layernorm",
    mtp_copies=False,
)
ALWAYS_TRUE = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
"""Keys of released configs that other values would make another model."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for routers that Megatron does not have, or attention without norms of queries and keys."""
    if wrong := [f"{name}: false" for name in ALWAYS_TRUE if not hf_config.get(name, True)]:
        raise ValueError(f"config.json: not supported for hy_v3: {', '.join(wrong)}")
    return grouped_query_config(
        hf_config, qk_layernorm=True, mtp_layers=num_mtp_layers(hf_config), **moe_config(hf_config)
    )


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    return moe_weight_map(
        hf_config,
        padded_vocab_size,
        lambda prefix: attention_rules(hf_config, prefix, bias=False, qk_norm=True),
        names=NAMES,
        mtp=mtp,
    )


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang would serve another model than this config describes; None if it would not."""
    dense = num_dense_layers(hf_config)
    return unserved_without(hf_config, {"qk_norm": True, "route_norm": True, "first_k_dense_replace": dense})


def draft_layer_name(name: str, config: Any) -> str:
    return numbered_layer_name(name, config).replace(".shared_head.norm.", ".final_layernorm.")


def _router(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [EngineSlice(hf_name=f"{match[1]}.router.gate.weight", in_model_dtype=True)]


ENGINE_RULES = (EngineRule(pattern=r"(.+\.mlp)\.gate\.weight", slices=_router),)
