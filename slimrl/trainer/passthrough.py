"""`trainer.megatron`: fields of megatron-core's own configurations, given by their names in a recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from slimrl.config.passthrough import LATENT_ATTENTION, OF_THE_MODEL, OWNED

SECTIONS = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
"""A field goes to every one of these that has it."""


def fields_for(section: type, megatron: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `trainer.megatron` that one of megatron-core's dataclasses takes, in its own types.

    Raises:
        ValueError: a name is in none of megatron-core's dataclasses, has a setting of its own, or is the model's; or a
            value is unknown to the field.
    """
    owned = OWNED["trainer.megatron"]
    for name in megatron:
        if name in owned:
            raise ValueError(f"trainer.megatron.{name}: set {owned[name]} instead")
        if name in LATENT_ATTENTION:
            raise ValueError(f"trainer.megatron.{name}: {OF_THE_MODEL}")
        if not any(name in _types(known) for known in SECTIONS):
            raise ValueError(f"trainer.megatron.{name}: no such field in the installed megatron-core")
    names = _types(section).keys()
    return converted(section, {name: value for name, value in megatron.items() if name in names})


def converted(section: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of fields of one of megatron-core's dataclasses, in its own types; words become what they name.

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
        owner: Any = F
    elif kind is AttnBackend:
        owner = AttnBackend
    elif "torch.dtype" in str(kind):
        owner = torch
    else:
        return value
    if not hasattr(owner, value):
        raise ValueError(f"trainer.megatron.{name}: {value!r} is unknown")
    return getattr(owner, value)
