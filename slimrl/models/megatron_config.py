"""What a family tells the trainer about a model: Megatron's settings, as plain values."""

from dataclasses import dataclass
from typing import Any

from slimrl.models.hf_config import head_dim, partial_rotary_factor, required, rope_scaling, rope_theta


@dataclass(frozen=True, kw_only=True)
class MegatronModelConfig:
    transformer: dict[str, Any]
    """Keyword arguments of TransformerConfig (MLATransformerConfig with `multi_latent_attention`): the architecture
    alone, no layout and no precision. `activation_func` is a name in torch.nn.functional."""
    multi_latent_attention: bool
    vocab_size: int
    """Rows of the Hugging Face embedding, without padding."""
    rotary_base: float
    rotary_percent: float
    tie_embeddings: bool
    max_position: int
    """Longest context of the model, in tokens."""
    llama3_rope_factor: float | None = None
    """Scaling factor of Llama 3.1's rotary embedding; None without scaling or with another kind."""
    mtp_layers: int = 0
    """Layers for multi-token prediction that a checkpoint of the model may have."""
    qk_norm_over_heads: bool = False
    """Whether the norm of queries is over all heads together, and that of keys."""
    float32_router: bool = False
    """Whether checkpoints hold the routers' weights in float32, so that trainers do too."""

    @property
    def zero_centred_norms(self) -> bool:
        """Whether norms multiply by 1 + weight; those of gated delta nets' results multiply by the weight in any
        model."""
        return bool(self.transformer.get("layernorm_zero_centered_gamma"))

    @property
    def sparse_attention(self) -> bool:
        """Whether indexers choose the keys that are attended to."""
        return self.transformer.get("experimental_attention_variant") == "dsa"

    @property
    def cached_elements(self) -> int:
        """Elements of a token's keys and values in all layers that have them: of grouped-query attention those of its
        heads, of multi-latent attention the latent and the rotated key (arXiv:2405.04434, section 2.1)."""
        facts = self.transformer
        layers = int(facts["num_layers"]) - sum(map(bool, facts.get("linear_attention_freq") or []))
        if self.multi_latent_attention:
            return layers * (int(facts["kv_lora_rank"]) + int(facts["qk_pos_emb_head_dim"]))
        return layers * int(facts["num_query_groups"]) * 2 * int(facts["kv_channels"])


def grouped_query_config(
    hf_config: dict[str, Any], *, rotary_percent: float = 1.0, mtp_layers: int = 0, **transformer: Any
) -> MegatronModelConfig:
    """Megatron's settings for a decoder with grouped-query attention; `transformer` is what the family adds.

    Raises:
        ValueError: as decoder_config; or positions scaled in another way than Llama 3.1's.
    """
    groups = int(hf_config.get("num_key_value_heads") or required(hf_config, "num_attention_heads"))
    return decoder_config(
        hf_config,
        {"num_query_groups": groups, "kv_channels": head_dim(hf_config), **transformer},
        rotary_percent=rotary_percent,
        llama3_rope_factor=_llama3_rope_factor(hf_config),
        mtp_layers=mtp_layers,
    )


def decoder_config(
    hf_config: dict[str, Any],
    transformer: dict[str, Any],
    *,
    rotary_percent: float = 1.0,
    multi_latent_attention: bool = False,
    llama3_rope_factor: float | None = None,
    mtp_layers: int = 0,
) -> MegatronModelConfig:
    """Megatron's settings for a decoder with RMSNorm and gated MLPs; `transformer` has the rest: attention, experts,
    biases.

    Raises:
        ValueError: an activation other than SiLU, sliding windows, biases or partial rotation that the arguments do
            not declare.
    """
    _refuse_variants(hf_config, bias=bool(transformer.get("add_qkv_bias")), rotary_percent=rotary_percent)
    if "ffn_hidden_size" not in transformer:
        transformer = {"ffn_hidden_size": int(required(hf_config, "intermediate_size")), **transformer}
    return MegatronModelConfig(
        transformer={
            "num_layers": int(required(hf_config, "num_hidden_layers")),
            "hidden_size": int(required(hf_config, "hidden_size")),
            "num_attention_heads": int(required(hf_config, "num_attention_heads")),
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(required(hf_config, "rms_norm_eps")),
            "gated_linear_unit": True,
            "activation_func": "silu",
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **transformer,
        },
        multi_latent_attention=multi_latent_attention,
        vocab_size=int(required(hf_config, "vocab_size")),
        rotary_base=rope_theta(hf_config),
        rotary_percent=rotary_percent,
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        max_position=int(required(hf_config, "max_position_embeddings")),
        llama3_rope_factor=llama3_rope_factor,
        mtp_layers=mtp_layers,
    )


LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fixed in megatron-core's Llama 3.1 scaling of positions; only the factor can be set."""


def _llama3_rope_factor(hf_config: dict[str, Any]) -> float | None:
    scaling = rope_scaling(hf_config)
    kind = scaling.pop("rope_type")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} is not supported for {hf_config.get('model_type')}")
    factor = float(required(scaling, "factor"))
    wrong = [f"{name}: {scaling.get(name)!r}" for name, value in LLAMA3_ROPE.items() if scaling.get(name) != value]
    if wrong:
        held = ", ".join(f"{name}: {value}" for name, value in LLAMA3_ROPE.items())
        raise ValueError(
            f"config.json: positions scaled with {', '.join(wrong)} are not supported; megatron-core has {held}"
        )
    return factor


def _refuse_variants(hf_config: dict[str, Any], *, bias: bool, rotary_percent: float) -> None:
    """Raises ValueError for options of transformers' configs that no rule covers."""
    refused = {
        "hidden_act": hf_config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(hf_config.get("attention_bias")) and not bias,
        "mlp_bias": bool(hf_config.get("mlp_bias")),
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
    }
    wrong = [f"{name}: {hf_config[name]!r}" for name, bad in refused.items() if bad]
    if partial_rotary_factor(hf_config, rotary_percent) != rotary_percent:
        wrong.append(f"partial_rotary_factor: {partial_rotary_factor(hf_config)}")
    if wrong:
        raise ValueError(f"config.json: not supported for {hf_config.get('model_type')}: {', '.join(wrong)}")
