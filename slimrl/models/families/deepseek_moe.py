"""Experts as DeepSeek-V3 and GLM-4.5 have them: sigmoid scores, an expert bias, shared experts.

The first `first_k_dense_replace` layers, or those that `mlp_layer_types` calls dense, have an MLP instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimrl.config.hf_config import num_dense_layers
from slimrl.models.families.mtp import embedding_copies, head_copies, mtp_rules
from slimrl.models.families.rules import (
    LayerPrefix,
    all_layers,
    decoder,
    embedding_rule,
    expert_rules,
    head_rules,
    mlp_norm_rule,
    mlp_rules,
    router_rules,
    shared_expert_rules,
)
from slimrl.models.hf_config import required
from slimrl.models.weight_map import Rule, WeightMap

SCORED_EXPERTS_PER_GROUP = 2
"""A group's score is the sum of its best two experts' scores; Megatron sums the best top-k / chosen groups."""


@dataclass(frozen=True, kw_only=True)
class MoeNames:
    """What Hugging Face calls the parts of a layer, where models differ."""

    router: str = "mlp.gate.weight"
    bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "shared_experts"
    mtp_norm: str = "shared_head.norm"
    """The last norm of a layer for multi-token prediction"""
    mtp_copies: bool = True
    """Whether such a layer repeats the embedding and the output layer"""


DEEPSEEK = MoeNames()


def moe_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig for the experts and their router.

    Raises:
        ValueError: a score function, weights that do not sum to 1, or groups of experts that Megatron's router lacks.
    """
    _refuse_variants(hf_config)
    num_dense = _dense_layers(hf_config)
    config = {
        "num_moe_experts": _num_experts(hf_config),
        "moe_router_topk": int(required(hf_config, "num_experts_per_tok")),
        "moe_ffn_hidden_size": int(required(hf_config, "moe_intermediate_size")),
        "moe_shared_expert_intermediate_size": _shared_width(hf_config),
        "moe_layer_freq": [int(layer >= num_dense) for layer in all_layers(hf_config)],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(required(hf_config, "routed_scaling_factor", "router_scaling_factor")),
        "moe_router_load_balancing_type": "none",
    }
    if _is_grouped(hf_config):
        config["moe_router_num_groups"] = int(required(hf_config, "n_group"))
        config["moe_router_group_topk"] = int(required(hf_config, "topk_group"))
    return config


def moe_weight_map(
    hf_config: dict[str, Any],
    padded_vocab_size: int | None,
    attention_rules: Callable[[LayerPrefix], list[Rule]],
    *,
    names: MoeNames = DEEPSEEK,
    mtp: bool,
) -> WeightMap:
    """All weights of such a model.

    Args:
        attention_rules: of attention with its input norm.
        mtp: with the layers for multi-token prediction.
    """
    layers, num_dense = all_layers(hf_config), _dense_layers(hf_config)
    copies = mtp and names.mtp_copies

    def attention(prefix: LayerPrefix) -> list[Rule]:
        return [*attention_rules(prefix), mlp_norm_rule(hf_config, prefix)]

    def whole_layer(prefix: LayerPrefix) -> list[Rule]:
        return attention(prefix) + _moe_rules(hf_config, prefix, names)

    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size, embedding_copies(hf_config) if copies else ()),
            *attention(decoder(layers)),
            *mlp_rules(hf_config, decoder(layers[:num_dense])),
            *_moe_rules(hf_config, decoder(layers[num_dense:]), names),
            *head_rules(hf_config, padded_vocab_size, head_copies(hf_config) if copies else ()),
            *(mtp_rules(hf_config, whole_layer, final_norm=names.mtp_norm) if mtp else ()),
        ]
    )


def _moe_rules(hf_config: dict[str, Any], prefix: LayerPrefix, names: MoeNames) -> list[Rule]:
    """Router with its bias, shared experts and routed experts."""
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "moe_intermediate_size")
    experts = _num_experts(hf_config)
    return [
        *router_rules(hidden, experts, prefix, hf_name=names.router, bias=names.bias),
        *shared_expert_rules(hidden, _shared_width(hf_config), prefix, hf_name=names.shared),
        *expert_rules(hidden, wide, experts, prefix),
    ]


def _dense_layers(hf_config: dict[str, Any]) -> int:
    """Raises ValueError if the config does not say how many there are, or lists others than the first ones."""
    required(hf_config, "first_k_dense_replace", "mlp_layer_types")
    count, kinds = num_dense_layers(hf_config), hf_config.get("mlp_layer_types")
    expected = ["dense"] * count + ["sparse"] * (len(all_layers(hf_config)) - count)
    if kinds is not None and kinds != expected:
        raise ValueError(
            f"config.json: mlp_layer_types: {kinds}: with first_k_dense_replace: "
            f"{hf_config.get('first_k_dense_replace')} only {count} dense layers before sparse ones are supported"
        )
    return count


def _num_experts(hf_config: dict[str, Any]) -> int:
    return int(required(hf_config, "n_routed_experts", "num_local_experts", "num_experts"))


def _shared_width(hf_config: dict[str, Any]) -> int:
    return _num_shared(hf_config) * int(required(hf_config, "moe_intermediate_size"))


def _num_shared(hf_config: dict[str, Any]) -> int:
    return int(required(hf_config, "n_shared_experts", "num_shared_experts"))


def _is_grouped(hf_config: dict[str, Any]) -> bool:
    """Whether the router chooses among the experts of the best groups. With one group, or with all chosen, it chooses
    among all experts."""
    groups, chosen = int(hf_config.get("n_group") or 1), int(hf_config.get("topk_group") or 1)
    return 1 <= chosen < groups


def _refuse_variants(hf_config: dict[str, Any]) -> None:
    topk, chosen = int(required(hf_config, "num_experts_per_tok")), int(hf_config.get("topk_group") or 1)
    refused = {
        "scoring_func": hf_config.get("scoring_func", "sigmoid") != "sigmoid",
        "topk_method": hf_config.get("topk_method", "noaux_tc") != "noaux_tc",
        "norm_topk_prob": not hf_config.get("norm_topk_prob", True),
        "num_experts_per_tok": topk < 2,
        "n_shared_experts": _num_shared(hf_config) < 1,
        "topk_group": _is_grouped(hf_config) and topk // chosen != SCORED_EXPERTS_PER_GROUP,
        "moe_layer_freq": (hf_config.get("moe_layer_freq") or 1) != 1,
    }
    wrong = [f"{name}: {hf_config[name]!r}" for name, bad in refused.items() if bad]
    if wrong:
        raise ValueError(f"config.json: not supported for {hf_config.get('model_type')}: {', '.join(wrong)}")
