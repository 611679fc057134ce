"""Small random checkpoints with a real tokenizer, in the Hugging Face format, for quickstarts and tests.

Weights are drawn tensor by tensor from the family's own list of names and shapes, so that the same seed gives the same
file, and every family with a weight map can have a toy.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from slimrl_tools.toy_tokenizer import build_tokenizer
from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.data.seeds import derive_seed
from slimrl.models.family import family_of
from slimrl.models.safetensors_folder import write_safetensors


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
    max_position: int = 1024
    rope_theta: float = 1000.0
    """Base of the rotary embedding; small, since conversations are a few hundred tokens long."""
    init_std: float = 0.1
    """Standard deviation of all weights but norms, which are 1; about 1 / sqrt(hidden)."""


def write_toy(family: str, out: Path, size: ToySize, seed: int) -> int:
    """Write a random float32 checkpoint with tokenizer and chat template into a new folder, complete or not at all.

    Returns:
        Number of parameters.

    Raises:
        ValueError: an unknown family, sizes that do not fit together, or `out` exists.
    """
    if family not in TOYS:
        raise ValueError(f"no toy of family {family!r}; there is {', '.join(TOYS)}")
    _check(size)
    if out.exists():
        raise ValueError(f"{out} exists; it is not overwritten")
    tokenizer = build_tokenizer()
    config = TOYS[family](size) | {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    specs = family_of(config).hf_tensor_specs(config)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        write_safetensors(partial, specs, _random_tensors(specs, size.init_std, seed))
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokenizer.save_pretrained(partial)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(torch.Size(spec.shape).numel() for spec in specs)


def _qwen3(size: ToySize) -> dict[str, Any]:
    """What the dense and the Mixture-of-Experts family share."""
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


def _qwen3_dense(size: ToySize) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | _qwen3(size)


def _qwen3_moe(size: ToySize) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_qwen3(size),
        "moe_intermediate_size": size.moe_intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


TOYS: dict[str, Callable[[ToySize], dict[str, Any]]] = {"qwen3_moe": _qwen3_moe, "qwen3": _qwen3_dense}
"""config.json by family, without what the tokenizer says."""


def _check(size: ToySize) -> None:
    if size.heads % size.kv_heads:
        raise ValueError(f"--kv-heads {size.kv_heads} does not divide --heads {size.heads}")
    if size.experts_per_token > size.experts:
        raise ValueError(f"--experts-per-token {size.experts_per_token} is more than --experts {size.experts}")
    if size.head_dim % 2:
        raise ValueError(f"--head-dim {size.head_dim} is odd; rotary embeddings need pairs")


def _random_tensors(specs: list[TensorSpec], std: float, seed: int) -> Iterator[tuple[str, Tensor]]:
    for spec in specs:
        if spec.name.endswith("norm.weight"):
            yield spec.name, torch.ones(spec.shape)
            continue
        generator = torch.Generator().manual_seed(derive_seed(seed, spec.name))
        yield spec.name, torch.empty(spec.shape).normal_(0.0, std, generator=generator)
