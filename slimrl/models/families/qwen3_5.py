"""The text models of Qwen3.5 and Qwen3.6, dense or with experts: Qwen3-Next's layers, a delta net's input in four
tensors.

Names and config are those of transformers' Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM. Positions are those of a text:
the three of `mrope_section` are equal. Routers always normalise.
"""

import math
import re
from itertools import accumulate, pairwise
from typing import Any

from slimrl.models.engine_rules import SUFFIX, unfused
from slimrl.models.engine_slice import EngineRule, EngineShape, EngineSlice
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
from slimrl.models.families.qwen3_moe import experts_config
from slimrl.models.families.rules import all_layers, decoder, embedding_rule, head_rules, mlp_norm_rule, mlp_rules
from slimrl.models.hf_config import required
from slimrl.models.layout_ops import DeltaNetParts
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import HfTensor, Rule, WeightMap

DENSE, WITH_EXPERTS = "qwen3_5_text", "qwen3_5_moe_text"
"""Values of `model_type`, which say whether every layer has an MLP or experts."""


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for kinds of layers that no rule covers, and for options that no released model has."""
    _refuse_variants(hf_config)
    experts: dict[str, Any] = {}
    if hf_config.get("model_type") == WITH_EXPERTS:
        experts = experts_config(hf_config, normalised=True) | shared_expert_config(hf_config)
        # No layer has an MLP of its own, and released configs do not say how wide it would be.
        experts["ffn_hidden_size"] = experts["moe_ffn_hidden_size"]
    return delta_net_config(hf_config, mtp_layers=at_most_one_mtp_layer(hf_config), **experts)


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None, *, mtp: bool = False) -> WeightMap:
    every = decoder(all_layers(hf_config))
    feed_forward = shared_moe_rules if hf_config.get("model_type") == WITH_EXPERTS else mlp_rules
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *_mixer_rules(hf_config),
            mlp_norm_rule(hf_config, every),
            *feed_forward(hf_config, every),
            *head_rules(hf_config, padded_vocab_size),
            *(mtp_rules(hf_config, feed_forward) if mtp and at_most_one_mtp_layer(hf_config) else ()),
        ]
    )


def unserved(hf_config: dict[str, Any]) -> str | None:
    """Why SGLang (srt/configs/qwen3_5.py) would serve another model than this config describes; None if it would
    not."""
    if not hf_config.get("rope_parameters"):
        return f"SGLang serves no {hf_config.get('model_type')} without rope_parameters. Set them in config.json."
    return delta_nets.unserved(hf_config, "the partial_rotary_factor of rope_parameters")


def _refuse_variants(hf_config: dict[str, Any]) -> None:
    refused = {
        "attn_output_gate": not hf_config.get("attn_output_gate", True),
        "output_gate_type": hf_config.get("output_gate_type") not in (None, "swish", "silu"),
        "norm_topk_prob": not hf_config.get("norm_topk_prob", True),
        "mlp_only_layers": bool(hf_config.get("mlp_only_layers")),
        "decoder_sparse_step": (hf_config.get("decoder_sparse_step") or 1) != 1,
        "mtp_use_dedicated_embeddings": bool(hf_config.get("mtp_use_dedicated_embeddings")),
    }
    wrong = [f"{name}: {hf_config[name]!r}" for name, bad in refused.items() if bad]
    if wrong:
        raise ValueError(f"config.json: not supported for {hf_config.get('model_type')}: {', '.join(wrong)}")


def _mixer_rules(hf_config: dict[str, Any]) -> list[Rule]:
    """The input of a delta net is four tensors in Megatron's order; queries, keys and values of the first are cut each
    by itself."""
    sections, heads = convolved(hf_config), delta_net_sizes(hf_config)["linear_num_value_heads"]
    rows = {"qkv": sum(sections), "z": sections[-1], "b": heads, "a": heads}
    inputs = tuple(
        HfTensor(
            name=f"{IN_LAYER}in_proj_{name}.weight",
            shape=(size, required(hf_config, "hidden_size")),
            sections=sections if name == "qkv" else (),
            quantizable=name in ("qkv", "z"),
        )
        for name, size in rows.items()
    )
    # Released files hold these in float32 among bfloat16: see Megatron-LM's pull request 3634.
    return mixer_rules(hf_config, inputs, DeltaNetParts(tuple(rows.values())), state_dtype="float32")


def _delta_net_input(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """Slices of queries, keys, values and gates, of each of which every rank holds a part."""
    path, suffix = match.groups()
    sizes = (*shape.convolved, shape.convolved[-1])
    unit, tile = math.gcd(*sizes), shape.tile_rows if suffix == "weight_scale_inv" else 1
    return [
        EngineSlice(
            hf_name=f"{path}.in_proj_{name}.{suffix}",
            part=(first // unit, end // unit, sum(sizes) // unit),
            shard_dim=0,
            first_row=0 if name == "z" else first // tile,
        )
        for name, (first, end) in zip(("qkv", "qkv", "qkv", "z"), pairwise(accumulate(sizes, initial=0)), strict=True)
    ]


def _betas_and_alphas(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    path, suffix = match.groups()
    return [
        EngineSlice(hf_name=f"{path}.in_proj_{name}.{suffix}", part=(half, half + 1, 2), shard_dim=0)
        for half, name in enumerate("ba")
    ]


def _embedding(match: re.Match[str], shape: EngineShape) -> list[EngineSlice]:
    """SGLang gives every rank the whole where groups of ranks have requests of their own, which other families shard
    within a group."""
    replicas = shape.tensor_parallel if shape.attention_data_parallel > 1 else 1
    return [EngineSlice(hf_name=match.group(), shard_dim=0, size=shape.vocab_size, replicas=replicas)]


ENGINE_RULES = (
    *delta_nets.ENGINE_RULES,
    EngineRule(pattern=rf"(.+\.linear_attn)\.in_proj_qkvz\.{SUFFIX}", slices=_delta_net_input, attention=True),
    EngineRule(pattern=rf"(.+\.linear_attn)\.in_proj_ba\.{SUFFIX}", slices=_betas_and_alphas, attention=True),
    EngineRule(pattern=r".+\.embed_tokens\.weight", slices=_embedding),
    EngineRule(pattern=r".+\.linear_attn\.A_log", slices=unfused(shard_dim=0), attention=True),
)
"""What parameters of SGLang's models hold, where the rules that families share do not say it."""
