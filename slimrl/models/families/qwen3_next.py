"""Qwen3-Next: gated delta nets and gated attention, softmax experts, and a shared expert with a gate."""

from typing import Any

from slimrl.models.engine_rules import SUFFIX, unfused
from slimrl.models.engine_slice import EngineRule
from slimrl.models.families import delta_nets
from slimrl.models.families.delta_nets import (
    IN_LAYER,
    at_most_one_mtp_layer,
    convolved,
    delta_net_config,
    delta_net_sizes,
    mixer_rules,
    mtp_rules,
    shared_expert_config,
    shared_moe_rules,
)
from slimrl.models.families.qwen3_moe import experts_config, sparse_layers
from slimrl.models.families.rules import all_layers, decoder, embedding_rule, head_rules, mlp_norm_rule, mlp_rules
from slimrl.models.hf_config import required, rope_theta
from slimrl.models.layout_ops import DeltaNetInput
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import HfTensor, Rule, WeightMap

MTP_LAYERS = 1
"""Layers for multi-token prediction of published checkpoints, whose config.json does not name them."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for kinds of layers that no rule covers."""
    mtp_layers = at_most_one_mtp_layer(hf_config, MTP_LAYERS)
    experts = experts_config(hf_config) | shared_expert_config(hf_config)
    return delta_net_config(hf_config, mtp_layers=mtp_layers, **experts)


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    layers, sparse = all_layers(hf_config), sparse_layers(hf_config)
    with_mlp = decoder(tuple(layer for layer in layers if layer not in sparse))
    has_mtp = mtp and at_most_one_mtp_layer(hf_config, MTP_LAYERS)
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *_mixer_rules(hf_config),
            mlp_norm_rule(hf_config, decoder(layers)),
            *mlp_rules(hf_config, with_mlp),
            *shared_moe_rules(hf_config, decoder(sparse)),
            *head_rules(hf_config, padded_vocab_size),
            *(mtp_rules(hf_config, shared_moe_rules) if has_mtp else ()),
        ]
    )


def _mixer_rules(hf_config: dict[str, Any]) -> list[Rule]:
    """The input of a delta net is two tensors, interleaved by key head."""
    sizes, hidden, (*_, values) = delta_net_sizes(hf_config), required(hf_config, "hidden_size"), convolved(hf_config)
    keys, heads = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    inputs = (
        HfTensor(name=IN_LAYER + "in_proj_qkvz.weight", shape=(sum(convolved(hf_config)) + values, hidden)),
        HfTensor(name=IN_LAYER + "in_proj_ba.weight", shape=(2 * heads, hidden), quantizable=False),
    )
    op = DeltaNetInput(heads // keys, sizes["linear_key_head_dim"], sizes["linear_value_head_dim"])
    return mixer_rules(hf_config, inputs, op)


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang (srt/configs/qwen3_next.py) would serve another model than this config describes; None if it would
    not."""
    if sparse_layers(hf_config) != all_layers(hf_config):
        return "SGLang gives every layer of a qwen3_next experts, and config.json leaves some without."
    return delta_nets.unserved(hf_config, "rope_parameters", rope_theta=rope_theta(hf_config))


ENGINE_RULES = (
    *delta_nets.ENGINE_RULES,
    EngineRule(
        pattern=rf".+\.linear_attn\.(in_proj_qkvz|in_proj_ba)\.{SUFFIX}", slices=unfused(shard_dim=0), attention=True
    ),
    EngineRule(pattern=r".+\.linear_attn\.A_log", slices=unfused(shard_dim=0, in_model_dtype=True), attention=True),
)
"""What parameters of SGLang's model hold, where the rules that families share do not say it."""
