"""`trainer.megatron`: fields of megatron-core's own configurations, given by their names in a recipe."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

SECTIONS = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
"""A field goes to every one of these (TransformerConfig as part of the first) that has it."""

OWNED = {
    "tensor_model_parallel_size": "trainer.parallel.tensor",
    "pipeline_model_parallel_size": "trainer.parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "trainer.parallel.virtual_pipeline",
    "expert_model_parallel_size": "trainer.parallel.expert",
    "expert_tensor_parallel_size": "trainer.parallel.expert_tensor",
    "context_parallel_size": "trainer.parallel.context",
    "sequence_parallel": "trainer.parallel.sequence",
    "bf16": "trainer.precision",
    "fp16": "trainer.precision",
    "params_dtype": "trainer.precision",
    "pipeline_dtype": "trainer.precision",
    "lr": "trainer.optimizer.lr",
    "min_lr": "trainer.optimizer.min_lr",
    "weight_decay": "trainer.optimizer.weight_decay",
    "adam_beta1": "trainer.optimizer.beta1",
    "adam_beta2": "trainer.optimizer.beta2",
    "adam_eps": "trainer.optimizer.eps",
    "clip_grad": "trainer.optimizer.clip_grad",
    "use_distributed_optimizer": "trainer.optimizer.distributed",
}
"""Fields that have a setting of their own, which is the one to use."""


def fields_for(section: type, megatron: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `trainer.megatron` that one of megatron-core's dataclasses takes, in its own types.

    Raises:
        ValueError: a name is in none of megatron-core's dataclasses, or has a setting of its own, or a value is
            unknown to the field.
    """
    for name in megatron:
        if name in OWNED:
            raise ValueError(f"trainer.megatron.{name}: set {OWNED[name]} instead")
        if not any(name in _names(known) for known in SECTIONS):
            raise ValueError(f"trainer.megatron.{name}: no such field in the installed megatron-core")
    types = {field.name: field.type for field in dataclasses.fields(section)}
    return {name: _convert(name, types[name], value) for name, value in megatron.items() if name in types}


def _names(section: type) -> set[str]:
    return {field.name for field in dataclasses.fields(section)}


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
