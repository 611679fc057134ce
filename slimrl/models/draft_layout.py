"""Names of the parameters of SGLang's draft models, as engine_layout.py knows those of an engine's model.

A draft model holds a model's layer for multi-token prediction, under names of its own. The checkpoint numbers the
layer after the model's own layers (DeepSeek-V3, GLM-4.5), or calls it `mtp` (Qwen3-Next).
"""

import re
from collections.abc import Callable
from typing import Any

_SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors that draft models share with the engine's model: they are parameters of that one."""


def layer_name(model_class: str, config: Any, name: str) -> str:
    """The name that a draft model's parameter would have if the engine's model held the layer.

    Args:
        model_class: name of the class of SGLang's model. The names of other models than drafts stay as they are.
        config: the Hugging Face config that the model has.
    """
    rename = _RENAMES.get(model_class)
    return name if rename is None or name in _SHARED else rename(name, config)


def _numbered(name: str, config: Any) -> str:
    return re.sub(r"^model\.(decoder\.)?", f"model.layers.{config.num_hidden_layers}.", name)


def _apart(name: str, config: Any) -> str:
    return f"mtp.{name.removeprefix('model.')}"


_RENAMES: dict[str, Callable[[str, Any], str]] = {
    "DeepseekV3ForCausalLMNextN": _numbered,
    "Glm4MoeForCausalLMNextN": _numbered,
    "Glm4MoeLiteForCausalLMNextN": _numbered,
    "Qwen3NextForCausalLMMTP": _apart,
}
