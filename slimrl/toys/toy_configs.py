"""config.json of a small model of each family, by its sizes, without the tokenizer's values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ToySize:
    """The defaults make 1.15 million parameters, which learn the calculator task within minutes on two CPU cores."""

    layers: int = 4
    hidden: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    experts_per_token: int = 2
    moe_intermediate: int = 96
    """Width of one expert's MLP."""
    mtp_layers: int = 0
    """Layers for multi-token prediction, in families that have them; slimrl does not train them."""
    max_position: int = 1024
    rope_theta: float = 1000.0
    """Base of the rotary embedding; small, since conversations have a few hundred tokens."""
    init_std: float = 0.1
    """Standard deviation of all weights but norms, which multiply by 1; about 1 / sqrt(hidden)."""


def _decoder(size: ToySize, architecture: str, model_type: str, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Keys that all families share, without those that this one lacks."""
    shared = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": None,
        "dtype": "float32",
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.max_position,
        "initializer_range": size.init_std,
        "rms_norm_eps": 1e-6,
        "rope_theta": size.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    return {name: value for name, value in shared.items() if name not in without}


def _qwen3_moe(size: ToySize) -> dict[str, Any]:
    return {
        **_decoder(size, "Qwen3MoeForCausalLM", "qwen3_moe"),
        "moe_intermediate_size": size.moe_intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _delta_nets(size: ToySize) -> dict[str, Any]:
    """Keys of gated delta nets. The last of every four layers has attention, and the last of fewer."""
    return {
        "full_attention_interval": min(4, size.layers),
        "linear_num_key_heads": size.kv_heads,
        "linear_num_value_heads": size.heads,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
        "linear_conv_kernel_dim": 4,
    }


def _qwen3_next(size: ToySize) -> dict[str, Any]:
    return {
        **_qwen3_moe(size),
        **_decoder(size, "Qwen3NextForCausalLM", "qwen3_next"),
        **_delta_nets(size),
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": size.moe_intermediate,
        "num_nextn_predict_layers": size.mtp_layers,
    }


def _qwen3_5(
    size: ToySize, architecture: str = "Qwen3_5ForCausalLM", model_type: str = "qwen3_5_text"
) -> dict[str, Any]:
    """Positions in three dimensions as in released models, each for about a third of the pairs that are rotated."""
    pairs = size.head_dim // 8
    return {
        **_decoder(size, architecture, model_type, without=("rope_theta", "use_sliding_window")),
        **_delta_nets(size),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": size.rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
        },
        "mtp_num_hidden_layers": size.mtp_layers,
    }


def _qwen3_5_moe(size: ToySize) -> dict[str, Any]:
    config = _qwen3_5(size, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text") | {
        "moe_intermediate_size": size.moe_intermediate,
        "shared_expert_intermediate_size": size.moe_intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
    }
    del config["intermediate_size"]
    return config


def _deepseek_moe(size: ToySize) -> dict[str, Any]:
    """Experts chosen by sigmoid scores plus a bias, one shared expert, a dense first layer."""
    return {
        "moe_intermediate_size": size.moe_intermediate,
        "n_routed_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": size.mtp_layers,
    }


def _glm4_moe(size: ToySize) -> dict[str, Any]:
    return {
        **_decoder(size, "Glm4MoeForCausalLM", "glm4_moe", without=("use_sliding_window",)),
        **_deepseek_moe(size),
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    }


def _deepseek_v3(size: ToySize) -> dict[str, Any]:
    """Config of DeepSeek-V3: each head has `head_dim` dimensions without rotation, and half as many with it."""
    return {
        **_decoder(size, "DeepseekV3ForCausalLM", "deepseek_v3", without=("use_sliding_window", "head_dim")),
        **_deepseek_moe(size),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_key_value_heads": size.heads,
        "q_lora_rank": size.hidden // 2,
        "kv_lora_rank": size.hidden // 2,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.head_dim // 2,
        "v_head_dim": size.head_dim,
        # yarn as in the published model
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": size.max_position // 4,
        },
    }


def _glm4_moe_lite(size: ToySize) -> dict[str, Any]:
    """The same without scaling of positions."""
    others = ("architectures", "model_type", "moe_layer_freq", "scoring_func", "rope_scaling")
    own = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
    return own | {name: value for name, value in _deepseek_v3(size).items() if name not in others}


def _deepseek_v32(size: ToySize) -> dict[str, Any]:
    """DeepSeek-V3 with an indexer in each layer; conversations are shorter than what it chooses."""
    return {
        **_deepseek_v3(size),
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": size.max_position,
        "index_n_heads": 16,
        "index_head_dim": 32,
    }


def _glm_moe_dsa(size: ToySize) -> dict[str, Any]:
    """The same with GLM's positions; every other layer takes the choice of the one before."""
    return {
        **{name: value for name, value in _deepseek_v32(size).items() if name != "rope_scaling"},
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "indexer_rope_interleave": True,
        "indexer_types": ["shared" if layer % 2 else "full" for layer in range(size.layers)],
    }


def _hy_v3(size: ToySize) -> dict[str, Any]:
    return {
        **_decoder(size, "HYV3ForCausalLM", "hy_v3", without=("use_sliding_window",)),
        "moe_intermediate_size": size.moe_intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "router_scaling_factor": 1.5,
        "route_norm": True,
        "qk_norm": True,
        "num_nextn_predict_layers": size.mtp_layers,
    }


def _minimax_m2(size: ToySize) -> dict[str, Any]:
    """Half of each head's dimensions are rotated."""
    without = ("use_sliding_window", "attention_bias")
    return {
        **_decoder(size, "MiniMaxM2ForCausalLM", "minimax_m2", without=without),
        "intermediate_size": size.moe_intermediate,
        "num_local_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "rotary_dim": size.head_dim // 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


def _gpt_oss(size: ToySize) -> dict[str, Any]:
    """Every other layer sees 32 tokens, fewer than conversations have; yarn as in the published model."""
    return {
        **_decoder(size, "GptOssForCausalLM", "gpt_oss", without=("use_sliding_window",)),
        "intermediate_size": size.moe_intermediate,
        "num_local_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "attention_bias": True,
        "sliding_window": 32,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": size.max_position // 4,
            "truncate": False,
        },
    }


def _olmoe(size: ToySize) -> dict[str, Any]:
    """Heads divide the hidden size."""
    return {
        **_decoder(size, "OlmoeForCausalLM", "olmoe", without=("use_sliding_window", "head_dim")),
        "intermediate_size": size.moe_intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    }


TOYS: dict[str, Callable[[ToySize], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3": lambda size: _decoder(size, "Qwen3ForCausalLM", "qwen3"),
    # Implicit biases of queries, keys and values, and heads that divide the hidden size.
    "qwen2": lambda size: _decoder(size, "Qwen2ForCausalLM", "qwen2", without=("attention_bias", "head_dim")),
    "llama": lambda size: (
        _decoder(size, "LlamaForCausalLM", "llama", without=("use_sliding_window",)) | {"mlp_bias": False}
    ),
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
    "olmoe": _olmoe,
    "hy_v3": _hy_v3,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
}
"""Function that makes the config of each family, by the family's name."""
