"""What Qwen3-Next and Qwen3.5 share: three of four layers are gated delta nets, the others attention with a gate.

A gated delta net (arXiv:2412.06464) is linear attention: a state of fixed size per value head takes the place of keys
and values. All norms are zero-centred (they multiply by 1 + weight), except the one after a delta net.
"""

import math
import re
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from slimrl.models.engine_rules import SUFFIX, qkv, unfused
from slimrl.models.engine_slice import EngineRule, EngineShape, EngineSlice
from slimrl.models.families.mtp import mtp_layer_rules, num_mtp_layers
from slimrl.models.families.qwen3_moe import num_experts
from slimrl.models.families.rules import (
    LayerPrefix,
    all_layers,
    attention_rules,
    decoder,
    expert_rules,
    input_norm_rule,
    mlp_norm_rule,
    router_rules,
    shared_expert_rules,
)
from slimrl.models.hf_config import partial_rotary_factor, required
from slimrl.models.layout_ops import DeltaNetParts, LayoutOp
from slimrl.models.megatron_config import MegatronModelConfig, grouped_query_config
from slimrl.models.weight_map import HfTensor, Rule, Shard

DEFAULT_ROTARY_FACTOR = 0.25
"""Fraction of a head's dimensions that are rotated, if config.json has no value."""

DEFAULT_INTERVAL = 4
"""Interval of the layers with full attention, if config.json says nothing else: every fourth layer."""

IN_LAYER = "model.layers.{layer}.linear_attn."
"""Start of the names of a delta net's tensors."""

LAYER_KINDS = ("linear_attention", "full_attention")
"""Possible values in the config's `layer_types`."""


def delta_net_config(hf_config: dict[str, Any], *, mtp_layers: int, **transformer: Any) -> MegatronModelConfig:
    """Megatron's settings; `transformer` is what the family adds.

    Raises:
        ValueError: kinds of layers that no rule covers, or what grouped_query_config refuses.
    """
    linear = set(linear_layers(hf_config))
    return grouped_query_config(
        hf_config,
        rotary_percent=partial_rotary_factor(hf_config, DEFAULT_ROTARY_FACTOR),
        mtp_layers=mtp_layers,
        qk_layernorm=True,
        attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(layer in linear) for layer in all_layers(hf_config)],
        **delta_net_sizes(hf_config),
        **transformer,
    )


def shared_expert_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of Megatron's TransformerConfig for the shared expert and its gate."""
    width = int(required(hf_config, "shared_expert_intermediate_size"))
    return {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": True}


def linear_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    """Indices of the layers that are gated delta nets.

    Raises:
        ValueError: `layer_types` has another kind of layer, or not one for each layer.
    """
    layers, kinds = all_layers(hf_config), hf_config.get("layer_types")
    if not kinds:
        return _linear_by_interval(layers, int(hf_config.get("full_attention_interval") or DEFAULT_INTERVAL))
    if len(kinds) != len(layers) or not set(kinds) <= set(LAYER_KINDS):
        raise ValueError(f"config.json: not supported for {hf_config.get('model_type')}: layer_types: {kinds!r}")
    return tuple(layer for layer, kind in zip(layers, kinds, strict=True) if kind == "linear_attention")


def unserved(hf_config: dict[str, Any], unread: str, **needed: float) -> str | None:
    """Why SGLang would serve another model than this config describes; None if it would not.

    SGLang knows the keys of the released models alone: `full_attention_interval`, where transformers 5 saves
    `layer_types`, and some of `rope_parameters` outside of them.

    Args:
        unread: what SGLang does not read of the positions; `needed`: keys that say it, with their values.
    """
    family, layers, linear = hf_config.get("model_type"), all_layers(hf_config), linear_layers(hf_config)
    tried = [int(hf_config.get("full_attention_interval") or DEFAULT_INTERVAL), *range(1, len(layers) + 2)]
    interval = next((interval for interval in tried if _linear_by_interval(layers, interval) == linear), None)
    if interval is None:
        return f"SGLang knows the layers of a {family} by full_attention_interval, and these layer_types follow none."
    given = {"partial_rotary_factor": DEFAULT_ROTARY_FACTOR, **hf_config}
    needed = {
        "full_attention_interval": interval,
        **needed,
        "partial_rotary_factor": partial_rotary_factor(hf_config, DEFAULT_ROTARY_FACTOR),
    }
    missing = ", ".join(f"{name}: {value}" for name, value in needed.items() if given.get(name) != value)
    if not missing:
        return None
    return f"SGLang reads neither layer_types nor {unread} of a {family}. Set {missing} in config.json too."


def _linear_by_interval(layers: tuple[int, ...], interval: int) -> tuple[int, ...]:
    """The layers without every `interval`-th one."""
    return tuple(layer for layer in layers if (layer + 1) % interval)


def mixer_rules(
    hf_config: dict[str, Any], inputs: tuple[HfTensor, ...], op: LayoutOp, *, state_dtype: str | None = None
) -> list[Rule]:
    """Delta nets, and attention in the other layers, each with its input norm.

    Args:
        inputs: the tensors of a delta net's input projection, and `op` their layout.
        state_dtype: of the decay A_log and of the norm of the result; None for the checkpoint's.
    """
    layers, linear = all_layers(hf_config), linear_layers(hf_config)
    with_attention = decoder(tuple(layer for layer in layers if layer not in linear))
    return [
        *_delta_net_rules(hf_config, decoder(linear), inputs, op, state_dtype),
        *gated_attention_rules(hf_config, with_attention),
    ]


def gated_attention_rules(hf_config: dict[str, Any], prefix: LayerPrefix) -> list[Rule]:
    """Attention whose result is multiplied by a gate, with its input norm."""
    return attention_rules(hf_config, prefix, bias=False, qk_norm=True, gated=True)


def _delta_net_rules(
    hf_config: dict[str, Any],
    prefix: LayerPrefix,
    inputs: tuple[HfTensor, ...],
    op: LayoutOp,
    state_dtype: str | None,
) -> list[Rule]:
    """A gated delta net with its input norm. Its convolution is over [queries; keys; values], each cut by itself."""
    sizes, sections = delta_net_sizes(hf_config), convolved(hf_config)
    hidden, kernel = required(hf_config, "hidden_size"), sizes["linear_conv_kernel_dim"]
    heads, value_dim = sizes["linear_num_value_heads"], sizes["linear_value_head_dim"]
    channels, megatron = sum(sections), prefix.megatron + "self_attention."

    def rule(name: str, tensors: tuple[HfTensor, ...], *, dim: int = 0, **fields: Any) -> Rule:
        return Rule(megatron=(megatron + name,), hf=tensors, shard=Shard(dim=dim), layers=prefix.layers, **fields)

    def tensor(name: str, *shape: int, **fields: Any) -> tuple[HfTensor]:
        return (HfTensor(name=IN_LAYER + name, shape=shape, **fields),)

    norm = tensor("norm.weight", value_dim, dtype=state_dtype)
    convolution = tensor("conv1d.weight", channels, 1, kernel, sections=sections)
    return [
        input_norm_rule(hf_config, prefix, fused_into="self_attention.in_proj"),
        rule("in_proj.weight", inputs, op=op, quantizable=True),
        rule("conv1d.weight", convolution, op=DeltaNetParts((channels,))),
        rule("dt_bias", tensor("dt_bias", heads)),
        rule("A_log", tensor("A_log", heads, dtype=state_dtype)),
        Rule(megatron=(megatron + "out_norm.weight",), hf=norm, layers=prefix.layers),
        rule("out_proj.weight", tensor("out_proj.weight", hidden, heads * value_dim), dim=1, quantizable=True),
    ]


def shared_moe_rules(hf_config: dict[str, Any], prefix: LayerPrefix) -> list[Rule]:
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


def mtp_rules(
    hf_config: dict[str, Any], feed_forward: Callable[[dict[str, Any], LayerPrefix], list[Rule]]
) -> list[Rule]:
    """Rules of the one layer for multi-token prediction, which has attention."""
    names = {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "final_layernorm": "mtp.norm",
    }

    def layer_rules(prefix: LayerPrefix) -> list[Rule]:
        attention = gated_attention_rules(hf_config, prefix)
        return [*attention, mlp_norm_rule(hf_config, prefix), *feed_forward(hf_config, prefix)]

    return mtp_layer_rules(required(hf_config, "hidden_size"), 0, names, layer_rules, layer_prefix="mtp.layers.0.")


def at_most_one_mtp_layer(hf_config: dict[str, Any], default: int = 0) -> int:
    """Number of layers for multi-token prediction; `default` if the config says nothing.

    Raises:
        ValueError: more than one.
    """
    number = num_mtp_layers(hf_config, default)
    if number > 1:
        family = hf_config.get("model_type")
        raise ValueError(f"config.json: not supported for {family}: {number} layers for multi-token prediction")
    return number


def delta_net_sizes(hf_config: dict[str, Any]) -> dict[str, int]:
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


def convolved(hf_config: dict[str, Any]) -> tuple[int, int, int]:
    """Channels of the queries, keys and values of a delta net, which go through a convolution."""
    keys, values = (
        int(required(hf_config, f"linear_num_{kind}_heads")) * int(required(hf_config, f"linear_{kind}_head_dim"))
        for kind in ("key", "value")
    )
    return keys, keys, values


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
        (r".+\.linear_attn\.dt_bias", unfused(shard_dim=0, in_model_dtype=True)),
        (r".+\.linear_attn\.out_proj\.(weight|weight_scale_inv)", unfused(shard_dim=1)),
    )
)
"""What SGLang's parameters hold but for the input projections: attention is in the layer itself, delta nets are under
`linear_attn`."""
