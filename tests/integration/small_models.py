"""Small random checkpoints of every family, written by transformers, with nothing left at a value that hides a mistake.

Norms are not 1, biases are not 0, the vocabulary is odd, so that every tensor-parallel layout pads it, and no two
sizes are equal that could be exchanged.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slimrl.config import hf_config
from slimrl.models.family import family_of
from slimrl.toys.toy_configs import TOYS, ToySize

VOCAB = 131

EXPECTED_NAME = "expected.safetensors"
"""The tensors as they are used, of a checkpoint that does not hold them so."""

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
_HEADS_OF_16 = {**_SHARED, "head_dim": 16}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    **_HEADS_OF_16,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
_GLM4_MOE = {
    "model_type": "glm4_moe",
    **_HEADS_OF_16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    **_SHARED,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_DELTA_NETS = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_OLMOE = {
    "model_type": "olmoe",
    **_SHARED,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
_SHARED_EXPERT = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_QWEN3_NEXT = {"model_type": "qwen3_next", **_HEADS_OF_16, **_SHARED_EXPERT, "norm_topk_prob": True, **_DELTA_NETS}
# Positions in three dimensions, as released configs have them; those of a text are equal.
_QWEN3_5_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
}
_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    # With 8 rotated dimensions, pairs of all three kinds: kept, mixed and stretched.
    "original_max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    # With heads of 16, wavelengths of all three kinds: kept, mixed and stretched.
    "rope_theta": 200_000.0,
}

# Fewer heads tie many scores at 0.
_INDEXERS = {"index_topk": 12, "index_head_dim": 24, "index_n_heads": 18}
_WITHOUT_GROUPS = {**_DEEPSEEK_V3, "n_group": 1, "topk_group": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_HEADS_OF_16},
    "qwen3_tied": {"model_type": "qwen3", **_HEADS_OF_16, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_SHARED},
    "qwen2_tied": {"model_type": "qwen2", **_SHARED, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **_SHARED},
    "llama_scaled_tied": {
        "model_type": "llama",
        **_HEADS_OF_16,
        "rope_parameters": _LLAMA3_ROPE,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_not_normalised": {**_QWEN3_MOE, "norm_topk_prob": False},
    "qwen3_moe_mixed": {**_QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_plain": {**_GLM4_MOE, "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0},
    "glm4_moe_grouped": {**_GLM4_MOE, "n_group": 4, "num_experts_per_tok": 4, "topk_group": 2},
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next_mixed": {
        **_QWEN3_NEXT,
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [1],
        "partial_rotary_factor": 0.5,
        "linear_num_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        **_HEADS_OF_16,
        **_DELTA_NETS,
        "linear_num_value_heads": 12,
        "rope_parameters": _QWEN3_5_ROPE,
    },
    "qwen3_5_mixed": {
        "model_type": "qwen3_5_text",
        **_HEADS_OF_16,
        **_DELTA_NETS,
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **{name: size for name, size in _HEADS_OF_16.items() if name != "intermediate_size"},
        **_SHARED_EXPERT,
        **_DELTA_NETS,
        "rope_parameters": _QWEN3_5_ROPE,
    },
    "deepseek_v3": {**_DEEPSEEK_V3, "rope_parameters": _YARN},
    "deepseek_v3_unscaled": _DEEPSEEK_V3,
    "deepseek_v3_mscale_of_factor": {
        **_DEEPSEEK_V3,
        "rope_parameters": {**_YARN, "mscale": None, "mscale_all_dim": None, "beta_slow": 2.0},
    },
    "glm4_moe_lite": {
        **_WITHOUT_GROUPS,
        "model_type": "glm4_moe_lite",
        # What transformers saves in its place.
        "first_k_dense_replace": None,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "rms_norm_eps": 1e-6,
    },
    "deepseek_v32": {**_DEEPSEEK_V3, **_INDEXERS, "model_type": "deepseek_v32", "rope_parameters": _YARN},
    "glm_moe_dsa": {**_WITHOUT_GROUPS, **_INDEXERS, "model_type": "glm_moe_dsa", "rms_norm_eps": 1e-6},
    "glm_moe_dsa_shared": {
        **_WITHOUT_GROUPS,
        **_INDEXERS,
        "model_type": "glm_moe_dsa",
        "rms_norm_eps": 1e-6,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "hy_v3": {
        "model_type": "hy_v3",
        **_HEADS_OF_16,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "router_scaling_factor": 2.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_theta": 5000.0,
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        **_HEADS_OF_16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 8,
        "rope_theta": 5000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_HEADS_OF_16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 8,
        # Small, so that it changes something.
        "swiglu_limit": 0.7,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            # With heads of 16, pairs of all three kinds: kept, mixed and stretched.
            "original_max_position_embeddings": 1024,
            "rope_theta": 10_000.0,
        },
    },
    "olmoe": _OLMOE,
    "olmoe_grouped": {**_OLMOE, "num_key_value_heads": 2, "norm_topk_prob": True, "tie_word_embeddings": True},
    "moonlight": {
        **_WITHOUT_GROUPS,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 2.446,
    },
}
"""config.json by name: a family, and what is special."""


WITH_EXPERTS = tuple(name for name, config in TOYS.items() if hf_config.num_experts(config(ToySize())))
"""Families of models with experts, each of which has a toy and a config above under its name."""


def small_model(name: str, path: Path, **changes: Any) -> Path:
    """Write the model of CONFIGS, with `changes` to its config, into a new folder."""
    config = {**CONFIGS[name], **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    whole = model.config.to_dict()
    randomise(model, zero_centred=family_of(whole).megatron_config(whole).zero_centred_norms)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    if hf_config.stacks_experts(whole):
        save_file(apart(load_file(path / "model.safetensors")), path / EXPECTED_NAME)
    return path


def randomise(model: torch.nn.Module, *, zero_centred: bool) -> None:
    """Give norms, biases and sinks values that change what a model computes.

    Args:
        zero_centred: norms multiply by 1 + weight.
    """
    for tensor_name, parameter in model.named_parameters():
        if "norm" in tensor_name:
            # Norms of delta nets multiply by the weight in any model.
            centred = zero_centred and "linear_attn" not in tensor_name
            torch.nn.init.normal_(parameter, 0.0 if centred else 1.0, 0.1)
        elif tensor_name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        elif tensor_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 0.0, 1.0)
    for tensor_name, buffer in model.named_buffers():
        if tensor_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.1)


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of gpt-oss's experts one by one, matrices [out, in], under the names of slimrl."""
    apart = {}
    for name, tensor in tensors.items():
        path, experts, kind = name.partition(".experts.")
        if not experts:
            apart[name] = tensor
            continue
        matrix, bias, _ = kind.partition("_bias")
        for expert, value in enumerate(tensor):
            own = f"{path}.experts.{expert}.{matrix}"
            apart[f"{own}.bias" if bias else f"{own}.weight"] = (value if bias else value.T).contiguous()
    return apart


def add_mtp_layers(path: Path, count: int) -> Path:
    """Give a checkpoint random layers for multi-token prediction, with copies of its embedding and output layer."""
    config = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    config[mtp_key(config)] = count
    generator = torch.Generator().manual_seed(1)
    zero_centred = family_of(config).megatron_config(config).zero_centred_norms
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for spec in family_of(config).hf_tensor_specs(config, mtp=True):
        if spec.name in tensors:
            continue
        original = copies.get(spec.name.split(".", 3)[-1])
        mean = 1.0 if "norm" in spec.name and not zero_centred else 0.0
        random = torch.empty(spec.shape).normal_(mean, 0.1, generator=generator)
        tensors[spec.name] = tensors[original].clone() if original else random
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def mtp_key(config: dict[str, Any]) -> str:
    """Key of config.json with the number of layers for multi-token prediction."""
    return "mtp_num_hidden_layers" if config["model_type"].startswith("qwen3_5") else "num_nextn_predict_layers"


def num_experts(name: str) -> int:
    """0 for a dense model."""
    return hf_config.num_experts(CONFIGS[name])
