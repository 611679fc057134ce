"""Qwen3-MoE: Qwen3 with a softmax top-k router and routed experts in place of most or all MLPs."""

from typing import Any

from slimrl.models.families.rules import (
    all_layers,
    attention_rules,
    decoder,
    embedding_rule,
    expert_rules,
    head_rules,
    mlp_norm_rule,
    mlp_rules,
    router_rules,
)
from slimrl.models.hf_config import required
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import WeightMap


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for the options of transformers' Qwen3-MoE that no released one uses."""
    return grouped_query_config(hf_config, qk_layernorm=True, **experts_config(hf_config))


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    layers, sparse = all_layers(hf_config), sparse_layers(hf_config)
    every = decoder(layers)
    with_mlp, with_experts = decoder(tuple(layer for layer in layers if layer not in sparse)), decoder(sparse)
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "moe_intermediate_size")
    experts = num_experts(hf_config)
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *attention_rules(hf_config, every, bias=False, qk_norm=True),
            mlp_norm_rule(hf_config, every),
            *mlp_rules(hf_config, with_mlp),
            *router_rules(hidden, experts, with_experts, bias=None),
            *expert_rules(hidden, wide, experts, with_experts),
            *head_rules(hf_config, padded_vocab_size),
        ]
    )


def experts_config(
    hf_config: dict[str, Any], *, normalised: bool = False, width: str = "moe_intermediate_size"
) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig for the experts and their router.

    Args:
        normalised: the chosen experts' weights add up to 1 in every model of the family; else the config says it.
        width: key of an expert's intermediate size.
    """
    sparse = set(sparse_layers(hf_config))
    return {
        "num_moe_experts": num_experts(hf_config),
        "moe_router_topk": int(required(hf_config, "num_experts_per_tok")),
        "moe_ffn_hidden_size": int(required(hf_config, width)),
        "moe_layer_freq": [int(layer in sparse) for layer in all_layers(hf_config)],
        "moe_router_score_function": "softmax",
        # A softmax over the chosen experts' logits gives the same as normalised probabilities.
        "moe_router_pre_softmax": not (normalised or required(hf_config, "norm_topk_prob")),
        "moe_router_load_balancing_type": "none",
    }


def num_experts(hf_config: dict[str, Any]) -> int:
    return int(required(hf_config, "num_experts", "num_local_experts"))


def sparse_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Layers with experts; the others have an MLP."""
    dense = set(hf_config.get("mlp_only_layers") or ())
    step = int(hf_config.get("decoder_sparse_step") or 1)
    return tuple(layer for layer in all_layers(hf_config) if layer not in dense and (layer + 1) % step == 0)
