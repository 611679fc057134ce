"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): its rules and its part of Megatron's config.

Keys and values, and queries where `q_lora_rank` is set, are projected down to a latent, normed, and projected up to
all heads. Every tensor-parallel rank holds the down projections whole: Transformer Engine's spec does so, and
megatron_patches makes the local spec do the same. The up projections are sharded by heads.
Both latent norms use `rms_norm_eps`, as in SGLang; transformers uses 1e-6 whatever the config says.
"""

from typing import Any

from slimrl.models.families.rules import LayerPrefix, input_norm_rule, norm_rule, output_projection_rule
from slimrl.models.hf_config import required, rope_scaling, rope_theta
from slimrl.models.weight_map import HfTensor, Rule, Shard

YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""transformers' values, if config.json has none."""


def latent_attention_rules(hf_config: dict[str, Any], prefix: LayerPrefix) -> list[Rule]:
    """Multi-latent attention with its input norm; the down projections, which SGLang fuses, come next to each other."""
    hidden, heads = required(hf_config, "hidden_size"), required(hf_config, "num_attention_heads")
    latent, rope_dim = required(hf_config, "kv_lora_rank"), required(hf_config, "qk_rope_head_dim")
    key_dim, value_dim = required(hf_config, "qk_nope_head_dim"), required(hf_config, "v_head_dim")
    query_down, query_up = _query_rules(hf_config, prefix, heads * (key_dim + rope_dim))
    return [
        input_norm_rule(hf_config, prefix, fused_into=None),
        *query_down,
        _linear(prefix, "linear_kv_down_proj", "kv_a_proj_with_mqa", (latent + rope_dim, hidden), down=True),
        *query_up,
        _latent_norm(prefix, "kv_layernorm", "linear_kv_up_proj", "kv_a_layernorm", latent),
        _linear(prefix, "linear_kv_up_proj", "kv_b_proj", (heads * (key_dim + value_dim), latent)),
        output_projection_rule(hidden, heads * value_dim, prefix),
    ]


def latent_attention_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of Megatron's MLATransformerConfig for attention and its rotary embedding.

    Raises:
        ValueError: a form of attention or a scaling of positions that Megatron's class lacks.
    """
    if not hf_config.get("rope_interleave", True):
        raise ValueError("config.json: rope_interleave: False is not supported, only interleaved pairs are")
    return {
        "num_query_groups": int(required(hf_config, "num_attention_heads")),
        "kv_channels": int(required(hf_config, "v_head_dim")),
        "qk_layernorm": True,
        "q_lora_rank": hf_config.get("q_lora_rank"),
        "kv_lora_rank": int(required(hf_config, "kv_lora_rank")),
        "qk_head_dim": int(required(hf_config, "qk_nope_head_dim")),
        "qk_pos_emb_head_dim": int(required(hf_config, "qk_rope_head_dim")),
        "v_head_dim": int(required(hf_config, "v_head_dim")),
        "rotary_base": rope_theta(hf_config),
        "rotary_percent": 1.0,
        **_positions(hf_config),
    }


def _query_rules(hf_config: dict[str, Any], prefix: LayerPrefix, rows: int) -> tuple[list[Rule], list[Rule]]:
    """(down to the latent, up to the queries of all heads); `rows`: of all queries together."""
    hidden, latent = required(hf_config, "hidden_size"), hf_config.get("q_lora_rank")
    if latent is None:
        return [], [_linear(prefix, "linear_q_proj", "q_proj", (rows, hidden))]
    return [_linear(prefix, "linear_q_down_proj", "q_a_proj", (latent, hidden), down=True)], [
        _latent_norm(prefix, "q_layernorm", "linear_q_up_proj", "q_a_layernorm", latent),
        _linear(prefix, "linear_q_up_proj", "q_b_proj", (rows, latent)),
    ]


def _linear(prefix: LayerPrefix, megatron: str, hf: str, shape: tuple[int, int], *, down: bool = False) -> Rule:
    """`down`: whole on every rank; SGLang fuses the down projections."""
    return Rule(
        megatron=(f"{prefix.megatron}self_attention.{megatron}.weight",),
        hf=(HfTensor(name=f"{prefix.hf}self_attn.{hf}.weight", shape=shape),),
        shard=None if down else Shard(dim=0),
        layers=prefix.layers,
        fused_group=f"{prefix.hf}self_attn.fused_qkv_a_proj" if down else None,
        quantizable=True,
    )


def _latent_norm(prefix: LayerPrefix, megatron: str, fused_into: str, hf: str, size: int) -> Rule:
    """Transformer Engine fuses the norm into the projection after it."""
    attention = prefix.megatron + "self_attention."
    names = (f"{attention}{megatron}.weight", f"{attention}{fused_into}.layer_norm_weight")
    return norm_rule(names, f"{prefix.hf}self_attn.{hf}.weight", size, prefix)


def _positions(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings. Without scaling the factor is 1, since Megatron scales the softmax by it in any case."""
    scaling = rope_scaling(hf_config)
    kind = scaling.pop("rope_type")
    if kind == "default":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if kind != "yarn":
        raise ValueError(f"config.json: rope type {kind!r} is not supported for {hf_config.get('model_type')}")
    if scaling.get("attention_factor") is not None or scaling.get("truncate") is False:
        raise ValueError("config.json: yarn with attention_factor or without truncate is not supported")
    mscale, mscale_all_dim = scaling.get("mscale") or None, scaling.get("mscale_all_dim") or None
    if bool(mscale) != bool(mscale_all_dim) and mscale != 1:
        raise ValueError("config.json: yarn with one of mscale and mscale_all_dim is ambiguous and not supported")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(required(scaling, "factor")),
        "original_max_position_embeddings": int(required(scaling, "original_max_position_embeddings")),
        # With neither given, cosine and sine are scaled by 0.1 ln(factor) + 1, which 1 and 0 make Megatron compute.
        "mscale": float(mscale or 1.0),
        "mscale_all_dim": float(mscale_all_dim or 0.0),
        **{name: float(scaling.get(name) or default) for name, default in YARN_DEFAULTS.items()},
    }
