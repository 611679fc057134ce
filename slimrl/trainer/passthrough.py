"""`trainer.megatron`: fields of megatron-core's configuration classes, set by name in a recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.fusions import fused_bias_geglu
from megatron.core.transformer.enums import AttnBackend


def fields_for(section: type, megatron: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `trainer.megatron` that belong to one of megatron-core's dataclasses, in its types.

    That each belongs to one, and has no setting of its own, was checked as the recipe was read (config/passthrough.py).

    Raises:
        ValueError: a word is unknown to its field.
    """
    names = _types(section).keys()
    return converted(section, {name: value for name, value in megatron.items() if name in names})


def converted(section: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for fields of one of megatron-core's dataclasses, with words converted to what they name.

    Raises:
        ValueError: a word is unknown to its field.
    """
    types = _types(section)
    return {name: _convert(name, types[name], value) for name, value in values.items()}


def _types(section: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(section)}


def _convert(name: str, kind: Any, value: Any) -> Any:
    """Activation functions, dtypes and enumerations are written as words in a recipe."""
    if not isinstance(value, str):
        return value
    if name == "activation_func":
        # megatron-core has two functions quick_gelu, and looks for the one beside its fused kernel.
        owner: Any = next((one for one in (F, fused_bias_geglu) if hasattr(one, value)), activations)
    elif kind is AttnBackend:
        owner = AttnBackend
    elif "torch.dtype" in str(kind):
        owner = torch
    else:
        return value
    if not hasattr(owner, value):
        raise ValueError(f"trainer.megatron.{name}: {value!r} is unknown")
    return getattr(owner, value)
