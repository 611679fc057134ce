"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): its rules and its part of Megatron's config.

Queries (where `q_lora_rank` is set) and keys and values are projected down to a latent, normed, and projected up to
all heads. The down projections are whole on every tensor-parallel rank: Transformer Engine's spec has them so, and
megatron_patches makes the local spec do the same. The up projections are cut by heads.
Both norms of latents use `rms_norm_eps`, as SGLang's do; transformers takes 1e-6 there whatever the config says.
"""

from typing import Any

from slimrl.models.hf_config import required, rope_scaling, rope_theta
from slimrl.models.rules import Block, input_norm_rule, norm_rule, output_projection_rule
from slimrl.models.weight_map import HfTensor, Rule, Shard

YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""What transformers takes where config.json does not say."""


def latent_attention_rules(hf_config: dict[str, Any], block: Block) -> list[Rule]:
    """Multi-latent attention with its input norm; the down projections, which SGLang fuses, are neighbours."""
    hidden, heads = required(hf_config, "hidden_size"), required(hf_config, "num_attention_heads")
    latent, rope_dim = required(hf_config, "kv_lora_rank"), required(hf_config, "qk_rope_head_dim")
    key_dim, value_dim = required(hf_config, "qk_nope_head_dim"), required(hf_config, "v_head_dim")
    query_down, query_up = _query_rules(hf_config, block, heads * (key_dim + rope_dim))
    return [
        input_norm_rule(hf_config, block, fused_into=None),
        *query_down,
        _linear(block, "linear_kv_down_proj", "kv_a_proj_with_mqa", (latent + rope_dim, hidden), down=True),
        *query_up,
        _latent_norm(block, "kv_layernorm", "linear_kv_up_proj", "kv_a_layernorm", latent),
        _linear(block, "linear_kv_up_proj", "kv_b_proj", (heads * (key_dim + value_dim), latent)),
        output_projection_rule(hidden, heads * value_dim, block),
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


def _query_rules(hf_config: dict[str, Any], block: Block, rows: int) -> tuple[list[Rule], list[Rule]]:
    """Down to the latent and up to the queries of all heads, `rows` wide together."""
    hidden, latent = required(hf_config, "hidden_size"), hf_config.get("q_lora_rank")
    if latent is None:
        return [], [_linear(block, "linear_q_proj", "q_proj", (rows, hidden))]
    return [_linear(block, "linear_q_down_proj", "q_a_proj", (latent, hidden), down=True)], [
        _latent_norm(block, "q_layernorm", "linear_q_up_proj", "q_a_layernorm", latent),
        _linear(block, "linear_q_up_proj", "q_b_proj", (rows, latent)),
    ]


def _linear(block: Block, megatron: str, hf: str, shape: tuple[int, int], *, down: bool = False) -> Rule:
    """`down`: whole on every rank, and one of those that SGLang fuses, which must reach it together."""
    return Rule(
        megatron=(f"{block.megatron}self_attention.{megatron}.weight",),
        hf=(HfTensor(name=f"{block.hf}self_attn.{hf}.weight", shape=shape),),
        shard=None if down else Shard(dim=0),
        layers=block.layers,
        atomic=f"{block.hf}self_attn.fused_qkv_a_proj" if down else None,
        quantizable=True,
    )


def _latent_norm(block: Block, megatron: str, fused_into: str, hf: str, size: int) -> Rule:
    """Transformer Engine keeps the norm in the projection behind it."""
    prefix = block.megatron + "self_attention."
    names = (f"{prefix}{megatron}.weight", f"{prefix}{fused_into}.layer_norm_weight")
    return norm_rule(names, f"{block.hf}self_attn.{hf}.weight", size, block)


def _positions(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings; the factor of unscaled positions is 1, for Megatron scales the softmax by it in any case."""
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
        # Without them cosine and sine are scaled by 0.1 ln(factor) + 1, which Megatron computes of 1 and 0.
        "mscale": float(mscale or 1.0),
        "mscale_all_dim": float(mscale_all_dim or 0.0),
        **{name: float(scaling.get(name) or default) for name, default in YARN_DEFAULTS.items()},
    }
