"""MiniMax-M2, M2.5 and M2.7: every layer has experts with sigmoid scores and a bias, and none of them is shared.

Queries are normalised over all heads together, and keys too. Experts have the names of Mixtral. Released files have no
layers for multi-token prediction, though config.json tells of some.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from slimrl.models.engine_rules import NORM_OVER_HEADS, SUFFIX, down, gate_up
from slimrl.models.engine_slice import EngineRule
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
from slimrl.models.families.served_keys import unserved_without
from slimrl.models.hf_config import head_dim, partial_rotary_factor, required
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import WeightMap

MATRICES = ("w1", "w3", "w2")
"""An expert's gate, up and down projection."""

SGLANG_NEEDS = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"}
"""Keys of released configs without which SGLang leaves the norms or the bias out, or fails."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for the options of MiniMax's older models, which no rule covers."""
    _refuse_variants(hf_config)
    config = grouped_query_config(
        hf_config,
        rotary_percent=partial_rotary_factor(hf_config),
        qk_layernorm=True,
        num_moe_experts=_num_experts(hf_config),
        moe_router_topk=int(required(hf_config, "num_experts_per_tok")),
        moe_ffn_hidden_size=int(required(hf_config, "intermediate_size")),
        moe_layer_freq=[1] * len(all_layers(hf_config)),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
    )
    return replace(config, qk_norm_over_heads=True, float32_router=True)


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    layers, experts = decoder(all_layers(hf_config)), _num_experts(hf_config)
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "intermediate_size")
    moe = "block_sparse_moe."
    router = {"hf_name": f"{moe}gate.weight", "bias": f"{moe}e_score_correction_bias", "dtype": "float32"}
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *attention_rules(hf_config, layers, bias=False, qk_norm=True, norm_over_heads=True),
            mlp_norm_rule(hf_config, layers),
            *router_rules(hidden, experts, layers, **router),
            *expert_rules(hidden, wide, experts, layers, hf_name=f"{moe}experts", matrices=MATRICES),
            *head_rules(hf_config, padded_vocab_size),
        ]
    )


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang would serve another model than this config describes; None if it would not.

    SGLang (srt/models/minimax_m2.py) knows the keys of released configs, some of which transformers 5 does not save.
    """
    rotated = round(head_dim(hf_config) * partial_rotary_factor(hf_config))
    return unserved_without(hf_config, {**SGLANG_NEEDS, "rotary_dim": rotated})


def _num_experts(hf_config: dict[str, Any]) -> int:
    return int(required(hf_config, "num_local_experts", "num_experts"))


def _refuse_variants(hf_config: dict[str, Any]) -> None:
    """Raises ValueError for a value other than that of released models, where there is one."""
    released = {**SGLANG_NEEDS, "qk_norm_type": "per_layer", "shared_intermediate_size": 0, "sliding_window": None}
    wrong = [name for name, value in released.items() if hf_config.get(name, value) != value]
    if any(kind != 1 for kind in hf_config.get("attn_type_list") or ()):
        wrong.append("attn_type_list")
    if wrong:
        given = ", ".join(f"{name}: {hf_config[name]!r}" for name in wrong)
        raise ValueError(f"config.json: not supported for minimax_m2: {given}")


ENGINE_RULES = (
    NORM_OVER_HEADS,
    EngineRule(pattern=rf"(.+\.experts)\.w13_{SUFFIX}", slices=partial(gate_up, names=MATRICES[:2])),
    EngineRule(pattern=rf"(.+\.experts)\.w2_{SUFFIX}", slices=partial(down, name=MATRICES[2])),
)
"""What SGLang's parameters hold, where other models differ."""
