"""Puts adapters into a model's linear layers and freezes all of its own weights.

The adapters of a layer are a module inside it, so names of the model's own weights stay. A forward hook of the layer
adds their output. Megatron leaves weights without gradient out of gradient buffers and optimizers.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.post_training.modelopt.layers import Linear as ReplicatedLinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from slimrl.config.lora_rules import adapter_targets
from slimrl.config.schema.trainer import LoraConfig
from slimrl.models.adapters import ADAPTERS, adapted_tensors
from slimrl.models.family import Family
from slimrl.trainer.lora.layer_adapters import LayerAdapters
from slimrl.trainer.weights import local_weights, model_weight_map

LOCAL_LAYERS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


def attach_adapters(chunk: GPTModel, *, family: Family, hf_config: dict[str, Any], lora: LoraConfig, seed: int) -> None:
    """Freeze the weights of a chunk and add its adapters, if the rank is above 0.

    Call it before data parallelism wraps the chunk.

    Raises:
        ValueError: a weight with adapters is in a layer that is not Megatron's own.
    """
    if not lora.rank:
        return
    weight_map, targets = model_weight_map([chunk], family, hf_config), adapter_targets(lora, hf_config)
    chunk.requires_grad_(False)
    owners = {id(module.weight): module for module in chunk.modules() if isinstance(module, LOCAL_LAYERS)}
    for index, weight in local_weights([chunk], weight_map):
        entry = weight_map.entries[index]
        if not adapted_tensors(entry.rule, targets):
            continue
        layer = owners.get(id(weight))
        if layer is None:
            raise ValueError(
                f"trainer.lora: {entry.megatron[0]} is in a layer of Transformer Engine, which takes no adapters"
            )
        sequence = bool(chunk.config.sequence_parallel)
        adapters = LayerAdapters(entry, weight, targets, lora, sequence=sequence, seed=seed)
        setattr(layer, ADAPTERS, adapters)
        layer.register_forward_hook(_add_output)
        layer.sharded_state_dict = functools.partial(_sharded_state_dict, layer)  # type: ignore[assignment]
    if chunk.pre_process:
        # Recomputation finds no gradient in a block none of whose inputs has one.
        chunk.embedding.register_forward_hook(_ask_for_gradient)


def adapters_of(chunks: Sequence[nn.Module]) -> Iterator[tuple[Tensor, LayerAdapters]]:
    """(weight, its adapters) of each layer with adapters."""
    for chunk in chunks:
        for module in chunk.modules():
            adapters = getattr(module, ADAPTERS, None)
            if isinstance(adapters, LayerAdapters):
                yield module.weight, adapters  # type: ignore[misc]


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Let the model compute with its own weights alone in the block: the reference policy of a run with adapters."""
    switched = [adapters for _, adapters in adapters_of(chunks)]
    for adapters in switched:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters in switched:
            adapters.enabled = True


def _add_output(layer: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
    adapters: LayerAdapters = getattr(layer, ADAPTERS)
    if not adapters.enabled:
        return None
    result, bias = output
    return result + adapters(args[0]), bias


def _ask_for_gradient(embedding: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _sharded_state_dict(
    layer: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The layer's own, in which adapters are taken for unsharded, with adapters as they are sharded."""
    own = type(layer).sharded_state_dict(layer, prefix, sharded_offsets, metadata)
    assert metadata is not None
    adapters = getattr(layer, ADAPTERS).sharded_state(f"{prefix}{ADAPTERS}.", sharded_offsets, metadata["dp_cp_group"])
    return {**own, **adapters}
