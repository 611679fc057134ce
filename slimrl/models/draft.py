"""The draft model of an engine with speculative decoding: what a resync sends to it, and its names of parameters.

A draft model holds a model's layer for multi-token prediction, under names of its own.
"""

from typing import Any

from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import FAMILIES, family_of

_SHARED = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors that draft models share with the engine's model: they are parameters of that one."""


def num_draft_layers(hf_config: dict[str, Any]) -> int:
    """Layers for multi-token prediction that the config describes."""
    weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
    return sum(name.endswith(".eh_proj.weight") for rule in weight_map.rules for name in rule.megatron)


def draft_specs(hf_config: dict[str, Any], dtype: str) -> list[TensorSpec]:
    """Tensors of the layers for multi-token prediction, without the embedding and the output layer.

    SGLang's draft models share those two with the engine's model, which has received them by then.

    Args:
        dtype: of tensors without one of their own.
    """
    weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
    return [spec for spec in weight_map.without_copies().specs(dtype) if spec.mtp]


def layer_name(model_class: str, config: Any, name: str) -> str:
    """The name that a draft model's parameter would have if the engine's model held the layer.

    Args:
        model_class: name of the class of SGLang's model. The names of other models than drafts stay as they are.
        config: the Hugging Face config that the model has.
    """
    drafts = (family.draft for family in FAMILIES if family.draft is not None)
    draft = next((draft for draft in drafts if draft.model_class == model_class), None)
    return name if draft is None or name in _SHARED else draft.layer_name(name, config)
