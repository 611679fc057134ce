"""The config.json of a Hugging Face checkpoint folder and the sizes in it, read without torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.base.strict_json import json_object
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


_SIZE = re.compile(
    "vocab_size|hidden_size|intermediate_size|moe_intermediate_size|num_hidden_layers|head_dim|[a-z_]*_head_dim|[a-z]+_lora_rank"
    "|num_[a-z_]*heads|num_experts|num_local_experts|n_routed_experts|n_shared_experts|num_experts_per_tok|n_group"
    "|topk_group|first_k_dense_replace|num_nextn_predict_layers|max_position_embeddings|index_n_heads|index_topk"
)
"""Keys of config.json whose values are numbers of something"""


def read_stored_config(model_path: Path) -> dict[str, Any]:
    """The checkpoint folder's config.json as it is.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    path = model_path / "config.json"
    try:
        config = json_object(path)
    except FileNotFoundError:
        other = ", and this is one of Megatron's" if (path.parent / ".metadata").is_file() else ""
        raise ValueError(f"{path}: no such file; a Hugging Face checkpoint folder is needed{other}") from None
    _check_sizes(path, config)
    return config


def _check_sizes(path: Path, config: dict[str, Any]) -> None:
    """Raises ValueError for a size or a count, of a wrapped text model too, that is none."""
    text = config.get("text_config")
    for name, value in [*config.items(), *(text.items() if isinstance(text, dict) else ())]:
        if value is not None and _SIZE.fullmatch(name) and (type(value) is not int or not 0 <= value < 2**31):
            raise ValueError(f"{path}: {name} is {json.dumps(value)[:60]}, not a count")


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
