"""Qwen3-MoE: Qwen3 with a softmax top-k router and routed experts in place of most or all MLPs."""

from dataclasses import replace
from typing import Any

from slimrl.models import qwen3
from slimrl.models.hf_config import required
from slimrl.models.layout_ops import GateUp
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.qwen3 import HF_LAYER, LAYER
from slimrl.models.weight_map import HfTensor, Rule, Shard, WeightMap


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for a config whose attention or activation is not Qwen3's."""
    dense = qwen3.megatron_config(hf_config)
    sparse = set(_sparse_layers(hf_config))
    moe = dict(
        num_moe_experts=num_experts(hf_config),
        moe_router_topk=int(required(hf_config, "num_experts_per_tok")),
        moe_ffn_hidden_size=int(required(hf_config, "moe_intermediate_size")),
        moe_layer_freq=[int(layer in sparse) for layer in range(dense.transformer["num_layers"])],
        moe_router_score_function="softmax",
        # Probabilities that sum to 1 over the chosen experts are a softmax over their logits alone.
        moe_router_pre_softmax=not required(hf_config, "norm_topk_prob"),
        moe_router_load_balancing_type="none",
    )
    return replace(dense, transformer={**dense.transformer, **moe})


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    layers = tuple(range(required(hf_config, "num_hidden_layers")))
    sparse = _sparse_layers(hf_config)
    dense = tuple(layer for layer in layers if layer not in sparse)
    return WeightMap(
        [
            qwen3.embedding_rule(hf_config, padded_vocab_size),
            *qwen3.attention_rules(hf_config, layers),
            *qwen3.mlp_rules(hf_config, dense),
            *expert_rules(hf_config, sparse),
            *qwen3.head_rules(hf_config, padded_vocab_size),
        ]
    )


def num_experts(hf_config: dict[str, Any]) -> int:
    return int(required(hf_config, "num_experts", "num_local_experts"))


def expert_rules(hf_config: dict[str, Any], layers: tuple[int, ...]) -> list[Rule]:
    """Router and routed experts."""
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "moe_intermediate_size")
    experts = num_experts(hf_config)
    local, grouped = LAYER + "mlp.experts.local_experts.{expert}.", LAYER + "mlp.experts."
    hf = HF_LAYER + "mlp.experts.{expert}."
    return [
        Rule(
            megatron=(LAYER + "mlp.router.weight",),
            hf=(HfTensor(name=HF_LAYER + "mlp.gate.weight", shape=(experts, hidden)),),
            layers=layers,
        ),
        Rule(
            megatron=(local + "linear_fc1.weight", grouped + "linear_fc1.weight{expert}"),
            hf=(
                HfTensor(name=hf + "gate_proj.weight", shape=(wide, hidden)),
                HfTensor(name=hf + "up_proj.weight", shape=(wide, hidden)),
            ),
            op=GateUp(),
            shard=Shard(dim=0, group="expert_tensor"),
            layers=layers,
            num_experts=experts,
        ),
        Rule(
            megatron=(local + "linear_fc2.weight", grouped + "linear_fc2.weight{expert}"),
            hf=(HfTensor(name=hf + "down_proj.weight", shape=(hidden, wide)),),
            shard=Shard(dim=1, group="expert_tensor"),
            layers=layers,
            num_experts=experts,
        ),
    ]


def _sparse_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    dense = set(hf_config.get("mlp_only_layers") or ())
    step = int(hf_config.get("decoder_sparse_step") or 1)
    return tuple(
        layer
        for layer in range(required(hf_config, "num_hidden_layers"))
        if layer not in dense and (layer + 1) % step == 0
    )
