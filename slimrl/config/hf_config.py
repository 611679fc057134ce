"""The config.json of a Hugging Face checkpoint folder and the sizes in it, read without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.config.wrapper import stored_config, text_config


def read_hf_config(model_path: Path) -> dict[str, Any]:
    """The checkpoint folder's config.json; of a wrapped model that of its text model, see wrapper.py.

    Raises:
        ValueError: there is none, it is not a JSON object, or it wraps a text model that is not supported.
    """
    config = read_stored_config(model_path)
    try:
        return text_config(config)
    except ValueError as error:
        raise ValueError(f"{model_path}: {error}") from error


def read_stored_config(model_path: Path) -> dict[str, Any]:
    """The checkpoint folder's config.json as it is.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    path = model_path / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        other = ", and this is one of Megatron's" if (path.parent / ".metadata").is_file() else ""
        raise ValueError(f"{path}: no such file; a Hugging Face checkpoint folder is needed{other}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, not an object")
    return config


def write_hf_config(folder: Path, hf_config: Mapping[str, Any]) -> None:
    """Write config.json, of a wrapped model in its whole form."""
    (folder / "config.json").write_text(json.dumps(stored_config(hf_config), indent=2) + "\n")


EXPERTS_WITH_BIASES = STACKED_EXPERTS = ("gpt_oss",)
"""`model_type` of models whose experts have biases; and of those of which files, and SGLang, have a tensor of all
experts of a layer as one."""


WITH_SINKS = ("gpt_oss",)
"""`model_type` of models whose attention has sinks."""


def first_of(hf_config: dict[str, Any], *names: str) -> int:
    """The first of these keys that is present and not null, else 0."""
    return next((int(hf_config[name]) for name in names if hf_config.get(name) is not None), 0)


def num_experts(hf_config: dict[str, Any]) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    return first_of(hf_config, "num_experts", "n_routed_experts", "num_local_experts")


def expert_columns(hf_config: dict[str, Any]) -> int:
    """Intermediate size of a routed expert."""
    return first_of(hf_config, "moe_intermediate_size", "intermediate_size")


def stacks_experts(hf_config: dict[str, Any]) -> bool:
    """Whether files hold a tensor of all experts of a layer as one, and SGLang loads nothing else."""
    return hf_config.get("model_type") in STACKED_EXPERTS


def num_dense_layers(hf_config: dict[str, Any]) -> int:
    """Layers at the beginning of a model with experts that have an MLP instead, by the key of DeepSeek-V3 or by the
    list that transformers 5 saves in its place; 0 where neither is there."""
    if hf_config.get("first_k_dense_replace") is not None:
        return int(hf_config["first_k_dense_replace"])
    kinds = hf_config.get("mlp_layer_types") or []
    return next((layer for layer, kind in enumerate(kinds) if kind != "dense"), len(kinds))


def shared_columns(hf_config: dict[str, Any]) -> int:
    """Intermediate size of the shared experts together; 0 if there are none."""
    own = first_of(hf_config, "shared_expert_intermediate_size")
    return own or expert_columns(hf_config) * first_of(hf_config, "n_shared_experts", "num_shared_experts")


def num_kv_heads(hf_config: dict[str, Any]) -> int:
    """Key-value heads; 0 for multi-latent attention, which has none of its own."""
    if hf_config.get("kv_lora_rank"):
        return 0
    return first_of(hf_config, "num_key_value_heads", "num_attention_heads")
