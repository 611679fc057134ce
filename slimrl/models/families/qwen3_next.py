"""Qwen3-Next: three of four layers are gated delta nets, the others attention with an output gate; softmax experts.

A gated delta net (arXiv:2412.06464) is linear attention: a state of fixed size per value head takes the place of keys
and values. All norms are zero-centred (they multiply by 1 + weight), except the one after a delta net.
"""

import math
import re
from itertools import accumulate, pairwise
from typing import Any

from slimrl.models.engine_rules import SUFFIX, qkv, unfused
from slimrl.models.engine_slice import EngineRule, EngineShape, EngineSlice
from slimrl.models.families.mtp import mtp_layer_rules, num_mtp_layers
from slimrl.models.families.qwen3_moe import experts_config, num_experts, sparse_layers
from slimrl.models.families.rules import (
    LayerPrefix,
    all_layers,
    attention_rules,
    decoder,
    embedding_rule,
    expert_rules,
    head_rules,
    input_norm_rule,
    mlp_norm_rule,
    mlp_rules,
    norm_rule,
    router_rules,
    shared_expert_rules,
)
from slimrl.models.hf_config import partial_rotary_factor, required, rope_theta
from slimrl.models.layout_ops import DeltaNetInput
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import HfTensor, Rule, Shard, WeightMap

DEFAULT_ROTARY_FACTOR = 0.25
"""Fraction of a head's dimensions that are rotated, if config.json has no value."""

DEFAULT_INTERVAL = 4
"""Interval of the layers with full attention, if config.json says nothing else: every fourth layer."""

LAYER_KINDS = ("linear_attention", "full_attention")
"""Possible values in the config's `layer_types`."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for kinds of layers that no rule covers."""
    linear = set(linear_layers(hf_config))
    return grouped_query_config(
        hf_config,
        rotary_percent=partial_rotary_factor(hf_config, DEFAULT_ROTARY_FACTOR),
        mtp_layers=_num_mtp_layers(hf_config),
        qk_layernorm=True,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(layer in linear) for layer in all_layers(hf_config)],
        **_delta_net_sizes(hf_config),
        moe_shared_expert_intermediate_size=int(required(hf_config, "shared_expert_intermediate_size")),
        moe_shared_expert_gate=True,
        **experts_config(hf_config),
    )


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    layers, sparse, linear = all_layers(hf_config), sparse_layers(hf_config), linear_layers(hf_config)
    with_attention = decoder(tuple(layer for layer in layers if layer not in linear))
    with_mlp = decoder(tuple(layer for layer in layers if layer not in sparse))
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *delta_net_rules(hf_config, decoder(linear)),
            *attention_rules(hf_config, with_attention, bias=False, qk_norm=True, gated=True),
            mlp_norm_rule(hf_config, decoder(layers)),
            *mlp_rules(hf_config, with_mlp),
            *_moe_rules(hf_config, decoder(sparse)),
            *head_rules(hf_config, padded_vocab_size),
            *(_mtp_rules(hf_config) if mtp and _num_mtp_layers(hf_config) else ()),
        ]
    )


def linear_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Indices of the layers that are gated delta nets.

    Raises:
        ValueError: `layer_types` has another kind of layer, or not one for each layer.
    """
    layers, kinds = all_layers(hf_config), hf_config.get("layer_types")
    if not kinds:
        return _linear_by_interval(layers, int(hf_config.get("full_attention_interval") or DEFAULT_INTERVAL))
    if len(kinds) != len(layers) or not set(kinds) <= set(LAYER_KINDS):
        raise ValueError(f"config.json: not supported for qwen3_next: layer_types: {kinds!r}")
    return tuple(layer for layer, kind in zip(layers, kinds, strict=True) if kind == "linear_attention")


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang would serve another model than this config describes; None if it would not.

    SGLang (srt/configs/qwen3_next.py) knows the keys of the released models alone. A config that transformers 5 saves
    has `layer_types` and `rope_parameters` in their place.
    """
    layers, linear = all_layers(hf_config), linear_layers(hf_config)
    if sparse_layers(hf_config) != layers:
        return "SGLang gives every layer of a qwen3_next experts, and config.json leaves some without."
    given = {"partial_rotary_factor": DEFAULT_ROTARY_FACTOR, **hf_config}
    tried = [int(given.get("full_attention_interval") or DEFAULT_INTERVAL), *range(1, len(layers) + 2)]
    intervals = [n for n in tried if _linear_by_interval(layers, n) == linear]
    if not intervals:
        return "SGLang knows the layers of a qwen3_next by full_attention_interval, and these layer_types follow none."
    needed = {
        "full_attention_interval": intervals[0],
        "rope_theta": rope_theta(hf_config),
        "partial_rotary_factor": partial_rotary_factor(hf_config, DEFAULT_ROTARY_FACTOR),
    }
    missing = ", ".join(f"{name}: {value}" for name, value in needed.items() if given.get(name) != value)
    if not missing:
        return None
    return f"SGLang reads neither layer_types nor rope_parameters of a qwen3_next. Set {missing} in config.json too."


def _linear_by_interval(layers: tuple[int, ...], interval: int) -> tuple[int, ...]:
    """The layers without every `interval`-th one."""
    return tuple(layer for layer in layers if (layer + 1) % interval)


def delta_net_rules(hf_config: dict[str, Any], prefix: LayerPrefix) -> list[Rule]:
    """A gated delta net with its input norm. Its convolution is over [queries; keys; values], each cut by itself."""
    sizes = _delta_net_sizes(hf_config)
    hidden, kernel = required(hf_config, "hidden_size"), sizes["linear_conv_kernel_dim"]
    keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
    key_dim, value_dim = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
    sections = (keys * key_dim, keys * key_dim, values * value_dim)
    megatron, hf = prefix.megatron + "self_attention.", prefix.hf + "linear_attn."

    def rule(name: str, shape: tuple[int, ...], shard: Shard, *, hf_name: str = "", quantizable: bool = False) -> Rule:
        return Rule(
            megatron=(megatron + name,),
            hf=(HfTensor(name=hf + (hf_name or name), shape=shape),),
            shard=shard,
            layers=prefix.layers,
            quantizable=quantizable,
        )

    in_proj = Rule(
        megatron=(megatron + "in_proj.weight",),
        hf=(
            HfTensor(name=hf + "in_proj_qkvz.weight", shape=(sum(sections) + values * value_dim, hidden)),
            HfTensor(name=hf + "in_proj_ba.weight", shape=(2 * values, hidden), quantizable=False),
        ),
        op=DeltaNetInput(values // keys, key_dim, value_dim),
        shard=Shard(dim=0),
        layers=prefix.layers,
        quantizable=True,
    )
    return [
        input_norm_rule(hf_config, prefix, fused_into="self_attention.in_proj"),
        in_proj,
        rule("conv1d.weight", (sum(sections), 1, kernel), Shard(dim=0, sections=sections)),
        rule("dt_bias", (values,), Shard(dim=0)),
        rule("A_log", (values,), Shard(dim=0)),
        norm_rule((megatron + "out_norm.weight",), hf + "norm.weight", value_dim, prefix),
        rule("out_proj.weight", (hidden, values * value_dim), Shard(dim=1), quantizable=True),
    ]


def _moe_rules(hf_config: dict[str, Any], prefix: LayerPrefix) -> list[Rule]:
    """Router, shared expert with its gate, and routed experts."""
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "moe_intermediate_size")
    gate = Rule(
        megatron=(prefix.megatron + "mlp.shared_experts.gate_weight",),
        hf=(HfTensor(name=prefix.hf + "mlp.shared_expert_gate.weight", shape=(1, hidden)),),
        layers=prefix.layers,
    )
    shared = int(required(hf_config, "shared_expert_intermediate_size"))
    return [
        *router_rules(hidden, num_experts(hf_config), prefix, bias=None),
        gate,
        *shared_expert_rules(hidden, shared, prefix, hf_name="shared_expert"),
        *expert_rules(hidden, wide, num_experts(hf_config), prefix),
    ]


def _mtp_rules(hf_config: dict[str, Any]) -> list[Rule]:
    """Rules of the layer for multi-token prediction, which has full attention."""
    names = {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "final_layernorm": "mtp.norm",
    }

    def layer_rules(prefix: LayerPrefix) -> list[Rule]:
        attention = attention_rules(hf_config, prefix, bias=False, qk_norm=True, gated=True)
        return [*attention, mlp_norm_rule(hf_config, prefix), *_moe_rules(hf_config, prefix)]

    return mtp_layer_rules(required(hf_config, "hidden_size"), 0, names, layer_rules, layer_prefix="mtp.layers.0.")


def _num_mtp_layers(hf_config: dict[str, Any]) -> int:
    """Number of layers for multi-token prediction: published checkpoints have one, though their config.json does not
    say so.

    Raises:
        ValueError: more than one.
    """
    number = num_mtp_layers(hf_config, default=1)
    if number > 1:
        raise ValueError(f"config.json: not supported for qwen3_next: {number} layers for multi-token prediction")
    return number


def _delta_net_sizes(hf_config: dict[str, Any]) -> dict[str, int]:
    """Sizes of the gated delta nets by their names in Megatron, which are those in config.json.

    Raises:
        ValueError: a size is missing, or value heads do not divide among key heads.
    """
    names = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")
    sizes = {f"linear_{name}": int(required(hf_config, f"linear_{name}")) for name in names}
    if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        raise ValueError(
            f"config.json: linear_num_value_heads: {sizes['linear_num_value_heads']} is no multiple of "
            f"linear_num_key_heads: {sizes['linear_num_key_heads']}"
        )
    return sizes


def draft_layer_name(name: str, config: Any) -> str:
    """The name in the layer that the checkpoint calls `mtp`."""
    return f"mtp.{name.removeprefix('model.')}"


def _gated_qkv(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Slices of an attention projection, which SGLang holds in the layer itself; each query head has a gate
    of its output."""
    return qkv(match, shape, hf_path=".self_attn", per_query=2)


def _in_layer(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Slices of the other parameters of attention."""
    layer, name, suffix = match.groups()
    return [EngineSlice(hf_name=f"{layer}.self_attn.{name}.{suffix}", shard_dim=1 if name == "o_proj" else None)]


def _convolution(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Channels of queries, keys and values, of each of which every rank holds a part."""
    unit = math.gcd(*shape.convolved)
    return [
        EngineSlice(
            hf_name=match.group(),
            part=(first // unit, end // unit, sum(shape.convolved) // unit),
            shard_dim=0,
            first_row=first,
        )
        for first, end in pairwise(accumulate(shape.convolved, initial=0))
    ]


ENGINE_RULES = tuple(
    EngineRule(pattern=pattern, slices=slices, attention=True)
    for pattern, slices in (
        (rf"(.+\.layers\.\d+)\.qkv_proj\.{SUFFIX}", _gated_qkv),
        (r"(.+\.layers\.\d+)\.(o_proj|q_norm|k_norm)\.(weight|weight_scale_inv)", _in_layer),
        (r".+\.linear_attn\.conv1d\.weight", _convolution),
        (r".+\.linear_attn\.(in_proj_qkvz|in_proj_ba)\.(weight|weight_scale_inv)", unfused(shard_dim=0)),
        (r".+\.linear_attn\.(A_log|dt_bias)", unfused(shard_dim=0, in_model_dtype=True)),
        (r".+\.linear_attn\.out_proj\.(weight|weight_scale_inv)", unfused(shard_dim=1)),
    )
)
"""What SGLang's parameters hold: attention is in the layer itself, delta nets are under `linear_attn`."""
