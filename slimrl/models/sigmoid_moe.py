"""Experts as DeepSeek-V3 and GLM-4.5 have them: sigmoid scores, a bias that moves the choice, shared experts.

The first `first_k_dense_replace` layers have an MLP instead.
"""

from typing import Any

from slimrl.models.hf_config import required
from slimrl.models.rules import Block, all_layers, expert_rules, router_rules, shared_expert_rules
from slimrl.models.weight_map import Rule

SCORED_EXPERTS_PER_GROUP = 2
"""Of each group of experts, those whose scores add up to the group's; Megatron takes top-k over the chosen groups."""


def sigmoid_moe_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig for the experts and their router.

    Raises:
        ValueError: a score function, weights that do not sum to 1, or groups of experts that Megatron's router lacks.
    """
    _refuse_variants(hf_config)
    sparse = set(sparse_layers(hf_config))
    config = {
        "num_moe_experts": num_experts(hf_config),
        "moe_router_topk": int(required(hf_config, "num_experts_per_tok")),
        "moe_ffn_hidden_size": int(required(hf_config, "moe_intermediate_size")),
        "moe_shared_expert_intermediate_size": shared_width(hf_config),
        "moe_layer_freq": [int(layer in sparse) for layer in all_layers(hf_config)],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(required(hf_config, "routed_scaling_factor")),
        "moe_router_load_balancing_type": "none",
    }
    if _is_grouped(hf_config):
        config["moe_router_num_groups"] = int(required(hf_config, "n_group"))
        config["moe_router_group_topk"] = int(required(hf_config, "topk_group"))
    return config


def sigmoid_moe_rules(hf_config: dict[str, Any], block: Block) -> list[Rule]:
    """Router with its bias, routed experts and shared experts; the norm before them is not among these."""
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "moe_intermediate_size")
    experts = num_experts(hf_config)
    return [
        *router_rules(hidden, experts, block, bias=True),
        *shared_expert_rules(hidden, shared_width(hf_config), block),
        *expert_rules(hidden, wide, experts, block),
    ]


def dense_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    return all_layers(hf_config)[: int(required(hf_config, "first_k_dense_replace"))]


def sparse_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    return all_layers(hf_config)[int(required(hf_config, "first_k_dense_replace")) :]


def num_experts(hf_config: dict[str, Any]) -> int:
    return int(required(hf_config, "n_routed_experts", "num_local_experts", "num_experts"))


def shared_width(hf_config: dict[str, Any]) -> int:
    """Width of the one MLP that the shared experts are."""
    return int(required(hf_config, "n_shared_experts")) * int(required(hf_config, "moe_intermediate_size"))


def _is_grouped(hf_config: dict[str, Any]) -> bool:
    """One group, or all groups chosen, is a choice among all experts."""
    groups, chosen = int(hf_config.get("n_group") or 1), int(hf_config.get("topk_group") or 1)
    return 1 <= chosen < groups


def _refuse_variants(hf_config: dict[str, Any]) -> None:
    topk, chosen = int(required(hf_config, "num_experts_per_tok")), int(hf_config.get("topk_group") or 1)
    refused = {
        "scoring_func": hf_config.get("scoring_func", "sigmoid") != "sigmoid",
        "topk_method": hf_config.get("topk_method", "noaux_tc") != "noaux_tc",
        "norm_topk_prob": not hf_config.get("norm_topk_prob", True),
        "num_experts_per_tok": topk < 2,
        "n_shared_experts": int(required(hf_config, "n_shared_experts")) < 1,
        "topk_group": _is_grouped(hf_config) and topk // chosen != SCORED_EXPERTS_PER_GROUP,
        "moe_layer_freq": (hf_config.get("moe_layer_freq") or 1) != 1,
    }
    wrong = [f"{name}: {hf_config[name]!r}" for name, bad in refused.items() if bad]
    if wrong:
        raise ValueError(f"config.json: not supported for {hf_config.get('model_type')}: {', '.join(wrong)}")
