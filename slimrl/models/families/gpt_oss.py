"""gpt-oss: attention with sinks, every other layer with a sliding window; experts with biases and a clamped activation.

Every head has a sink: a score beside those of the tokens, whose share of the softmax goes to no value. Files hold the
experts of a layer as one tensor, rows of gate and up alternating, in MXFP4 as published (checkpoints/mxfp4.py) or
plain; the names here are those that stacked_experts.py gives to each expert.
"""

import re
from collections.abc import Iterator
from typing import Any

from slimrl.models.engine_rules import unfused
from slimrl.models.engine_slice import EngineRule, EngineShape, EngineSlice
from slimrl.models.families.rules import (
    LayerPrefix,
    all_layers,
    attention_rules,
    decoder,
    embedding_rule,
    head_rules,
    mlp_norm_rule,
)
from slimrl.models.hf_config import head_dim, required, rope_scaling
from slimrl.models.layout_ops import Identity, InterleavedGateUp, LayoutOp
from slimrl.models.megatron_config import MegatronModelConfig, decoder_config
from slimrl.models.weight_map import HfTensor, Rule, Shard, WeightMap

SLIDING, FULL = "sliding_attention", "full_attention"

FIXED = {"hidden_act": "silu", "swiglu_alpha": 1.702, "attention_bias": True, "attention_dropout": 0.0}
"""Keys of config.json -> the only value that Megatron or SGLang computes with; 1.702 is the factor of quick GELU."""

YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""transformers' values, if config.json has none."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for another activation, positions that are scaled in another way than by yarn, or layers of
    another kind."""
    layers, kinds = all_layers(hf_config), layer_kinds(hf_config)
    _refuse_variants(hf_config, kinds)
    return decoder_config(
        hf_config,
        {
            "num_query_groups": int(required(hf_config, "num_key_value_heads")),
            "kv_channels": head_dim(hf_config),
            "add_qkv_bias": True,
            "add_bias_linear": True,
            # Grouped experts with biases refuse it.
            "bias_dropout_fusion": False,
            "softmax_type": "learnable",
            # Megatron counts the tokens before the query's own.
            "window_size": (int(required(hf_config, "sliding_window")) - 1, 0),
            "window_attn_skip_freq": [int(kind == SLIDING) for kind in kinds],
            # Transformer Engine shares sinks among context-parallel ranks in this way alone.
            "cp_comm_type": "a2a",
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": float(required(hf_config, "swiglu_limit")),
            "glu_linear_offset": 1.0,
            "num_moe_experts": _num_experts(hf_config),
            "moe_router_topk": int(required(hf_config, "num_experts_per_tok")),
            "moe_ffn_hidden_size": int(required(hf_config, "intermediate_size")),
            "moe_layer_freq": [1] * len(layers),
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,
            "moe_router_load_balancing_type": "none",
            **_yarn(hf_config),
        },
    )


def layer_kinds(hf_config: dict[str, Any]) -> list[str]:
    """SLIDING or FULL for each layer; in turn, where config.json does not say it."""
    given = hf_config.get("layer_types")
    return list(given) if given else [FULL if layer % 2 else SLIDING for layer in all_layers(hf_config)]


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    prefix, hidden = decoder(all_layers(hf_config)), required(hf_config, "hidden_size")
    megatron, hf = prefix.megatron + "self_attention.", prefix.hf + "self_attn."
    sinks = Rule(
        megatron=(megatron + "core_attention.softmax_offset",),
        hf=(HfTensor(name=hf + "sinks", shape=(required(hf_config, "num_attention_heads"),)),),
        shard=Shard(dim=0),
        layers=prefix.layers,
    )
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *attention_rules(hf_config, prefix, bias=True, qk_norm=False),
            _whole(prefix, "self_attention.linear_proj.bias", "self_attn.o_proj.bias", hidden),
            sinks,
            mlp_norm_rule(hf_config, prefix),
            _whole(prefix, "mlp.router.weight", "mlp.router.weight", _num_experts(hf_config), hidden),
            _whole(prefix, "mlp.router.bias", "mlp.router.bias", _num_experts(hf_config)),
            *_expert_rules(hf_config, prefix),
            *head_rules(hf_config, padded_vocab_size),
        ]
    )


def _whole(prefix: LayerPrefix, megatron: str, hf: str, *shape: int) -> Rule:
    """A tensor of a layer that no rank shards."""
    tensor = HfTensor(name=prefix.hf + hf, shape=shape)
    return Rule(megatron=(prefix.megatron + megatron,), hf=(tensor,), layers=prefix.layers)


def _expert_rules(hf_config: dict[str, Any], prefix: LayerPrefix) -> list[Rule]:
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "intermediate_size")
    experts = f"{prefix.hf}mlp.experts."

    def rule(linear: str, name: str, kind: str, shape: tuple[int, ...], op: LayoutOp, dim: int | None) -> Rule:
        stacked = experts + (name if kind == "weight" else f"{name}_{kind}")
        return Rule(
            megatron=(
                f"{prefix.megatron}mlp.experts.local_experts.{{expert}}.{linear}.{kind}",
                f"{prefix.megatron}mlp.experts.{linear}.{kind}{{expert}}",
            ),
            hf=(HfTensor(name=f"{experts}{{expert}}.{name}.{kind}", shape=shape, stacked=stacked),),
            op=op,
            shard=None if dim is None else Shard(dim=dim, group="expert_tensor"),
            layers=prefix.layers,
            num_experts=_num_experts(hf_config),
            quantizable=kind == "weight",
        )

    up, down = ("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")
    return [
        rule(*up, "weight", (2 * wide, hidden), InterleavedGateUp(), 0),
        rule(*up, "bias", (2 * wide,), InterleavedGateUp(), 0),
        rule(*down, "weight", (hidden, wide), Identity(), 1),
        rule(*down, "bias", (hidden,), Identity(), None),
    ]


def _num_experts(hf_config: dict[str, Any]) -> int:
    return int(required(hf_config, "num_local_experts", "num_experts"))


def _yarn(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Fields of YarnConfig (trainer/yarn.py)."""
    rope = YARN_DEFAULTS | {name: value for name, value in rope_scaling(hf_config).items() if value is not None}
    return {
        "yarn_rotary_scaling_factor": float(required(rope, "factor")),
        "yarn_original_max_position_embeddings": int(required(rope, "original_max_position_embeddings")),
        "yarn_beta_fast": float(rope["beta_fast"]),
        "yarn_beta_slow": float(rope["beta_slow"]),
        "yarn_correction_range_round_to_int": bool(rope["truncate"]),
    }


def _refuse_variants(hf_config: dict[str, Any], kinds: list[str]) -> None:
    wrong = {name: hf_config[name] for name, value in FIXED.items() if hf_config.get(name, value) != value}
    rope = rope_scaling(hf_config)
    wrong |= {name: rope[name] for name in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(name)}
    if rope["rope_type"] != "yarn":
        wrong["rope_type"] = rope["rope_type"]
    if len(kinds) != len(all_layers(hf_config)) or not {*kinds} <= {SLIDING, FULL}:
        wrong["layer_types"] = kinds
    if wrong:
        given = ", ".join(f"{name}: {value!r}" for name, value in wrong.items())
        raise ValueError(f"config.json: not supported for gpt_oss: {given}")


def _experts(match: re.Match[str], shape: EngineShape) -> Iterator[tuple[str, int, range]]:
    """Prefix of each expert's tensors, its index in the parameter, and the ranks that hold it."""
    for expert in range(shape.num_experts):
        yield (f"{match[1]}.{expert}.", *shape.expert_location(expert))


def _gate_up(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Rows of gate and up alternate here too."""
    bias = match[2] is not None
    return [
        EngineSlice(
            hf_name=f"{prefix}gate_up_proj.{'bias' if bias else 'weight'}",
            expert=index,
            ranks=ranks,
            shard_dim=0,
            size=2 * shape.dense_width,
            in_model_dtype=bias,
        )
        for prefix, index, ranks in _experts(match, shape)
    ]


def _down(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    return [
        EngineSlice(hf_name=f"{prefix}down_proj.weight", expert=index, ranks=ranks, shard_dim=1, size=shape.dense_width)
        for prefix, index, ranks in _experts(match, shape)
    ]


def _down_bias(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """The first of the ranks that share an expert adds the bias; the others hold zeros."""
    return [
        EngineSlice(hf_name=f"{prefix}down_proj.bias", expert=index, ranks=ranks[:1], in_model_dtype=True)
        for prefix, index, ranks in _experts(match, shape)
    ]


ENGINE_RULES = (
    EngineRule(pattern=r".+\.self_attn\.sinks", slices=unfused(shard_dim=0, in_model_dtype=True), attention=True),
    EngineRule(pattern=r"(.+\.experts)\.w13_weight(_bias)?", slices=_gate_up),
    EngineRule(pattern=r"(.+\.experts)\.w2_weight", slices=_down),
    EngineRule(pattern=r"(.+\.experts)\.w2_weight_bias", slices=_down_bias),
)
"""What SGLang's parameters hold; biases of experts and sinks are in types of their own there."""
