"""config.json of a small model of each family, by its sizes; what a tokenizer says is left out."""

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
    """Width of one expert."""
    mtp_layers: int = 0
    """Layers for multi-token prediction behind the others, for families that have them; slimrl does not train them."""
    max_position: int = 1024
    rope_theta: float = 1000.0
    """Base of the rotary embedding; small, since conversations are a few hundred tokens long."""
    init_std: float = 0.1
    """Standard deviation of all weights but norms, which are 1; about 1 / sqrt(hidden)."""


def _decoder(size: ToySize) -> dict[str, Any]:
    """What all families share."""
    return {
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


def _qwen3(size: ToySize) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | _decoder(size)


def _qwen3_moe(size: ToySize) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_decoder(size),
        "moe_intermediate_size": size.moe_intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2(size: ToySize) -> dict[str, Any]:
    """Qwen2 has biases of queries, keys and values without saying so, and heads that share the hidden size."""
    config = _decoder(size)
    del config["attention_bias"], config["head_dim"]
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | config


def _llama(size: ToySize) -> dict[str, Any]:
    config = _decoder(size)
    del config["use_sliding_window"]
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False} | config


def _sigmoid_moe(size: ToySize) -> dict[str, Any]:
    """Experts chosen by sigmoid scores plus a bias, one expert shared by all tokens, one dense layer before."""
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
    config = _decoder(size)
    del config["use_sliding_window"]
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **config,
        **_sigmoid_moe(size),
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    }


def _deepseek_v3(size: ToySize) -> dict[str, Any]:
    """Each head has `head_dim` dimensions without and half as many with rotation."""
    config = _decoder(size)
    del config["use_sliding_window"], config["head_dim"]
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **config,
        **_sigmoid_moe(size),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_key_value_heads": size.heads,
        "q_lora_rank": size.hidden // 2,
        "kv_lora_rank": size.hidden // 2,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.head_dim // 2,
        "v_head_dim": size.head_dim,
        # As the published model, and since SGLang has no others for it on a CPU: positions scaled by yarn.
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


TOYS: dict[str, Callable[[ToySize], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3": _qwen3,
    "qwen2": _qwen2,
    "llama": _llama,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
}
"""config.json by family."""
