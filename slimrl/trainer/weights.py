"""Loads Hugging Face tensors into Megatron modules under any parallel layout, and matches the names of the two.

A Megatron parameter's name is first made global (layer index over pipeline stages and virtual chunks, expert index
over expert-parallel ranks) and then looked up in the family's weight map.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from slimrl.checkpoints.hf_check import check_tensors
from slimrl.checkpoints.hf_checkpoint import left_out_note, open_hf_checkpoint
from slimrl.models.adapters import is_adapter
from slimrl.models.family import Family
from slimrl.models.weight_map import Entry, WeightMap
from slimrl.trainer.build import unwrap
from slimrl.trainer.value_head import is_value_head

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(decoder\.layers\.\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d+)(\..+)")
_GROUPED_EXPERT = re.compile(r"(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)()")


def model_weight_map(
    chunks: Sequence[nn.Module], family: Family, hf_config: dict[str, Any], *, mtp: bool = True
) -> WeightMap:
    """The family's weight map with the padded vocabulary of these modules, and their MTP layers if they have any.

    Args:
        mtp: False for a map without these layers.
    """
    model = unwrap(chunks[0])
    return family.weight_map(hf_config, model.vocab_size, mtp=mtp and bool(model.config.mtp_num_layers))


def local_weights(chunks: Sequence[nn.Module], weight_map: WeightMap) -> list[tuple[int, Tensor]]:
    """(index in the map's entries, live tensor) of every weight that this rank holds.

    Buffers without an entry, such as counters, are skipped, and so are adapters, a critic's head, and MTP layers if
    the map has none.

    Raises:
        ValueError: the map has no entry for some parameters of the model.
    """
    found: list[tuple[int, Tensor]] = []
    unknown: list[str] = []
    with_mtp = any(entry.rule.mtp for entry in weight_map.entries)
    for name, tensor in _global_tensors(chunks):
        index = weight_map.index_of(name)
        if index is not None:
            found.append((index, tensor))
        elif isinstance(tensor, nn.Parameter) and not is_adapter(name) and (with_mtp or not name.startswith("mtp.")):
            unknown.append(name)
    if unknown:
        raise ValueError(f"no rule of the weight map covers {', '.join(unknown)}")
    return found


def local_adapters(chunks: Sequence[nn.Module], adapters: WeightMap) -> list[tuple[int, Tensor]]:
    """(index in the map's entries, live tensor) of every adapter that this rank holds."""
    held = [(adapters.index_of(name), tensor) for name, tensor in _global_tensors(chunks) if is_adapter(name)]
    assert all(index is not None for index, _ in held), "the modules have other adapters than the map"
    return [(index, tensor) for index, tensor in held if index is not None]


def names_not_finite(chunks: Sequence[nn.Module]) -> list[str]:
    """Names in the whole model of the weights on this rank that have a value which is not finite.

    Each weight is read once, and nothing of its size is allocated.
    """
    held = [
        (name, tensor.detach())
        for name, tensor in _global_tensors(chunks, heads=True)
        if tensor.is_floating_point() and tensor.numel()
    ]
    # A NaN is both the smallest and the largest value. The device is waited for once.
    finite = [torch.stack(tensor.aminmax()).isfinite().all().to(held[0][1].device) for _, tensor in held]
    finite_N = torch.stack(finite).tolist() if finite else []
    return [name for (name, _), is_finite in zip(held, finite_N, strict=True) if not is_finite]


def _global_tensors(chunks: Sequence[nn.Module], *, heads: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers with the names that they have in the whole model.

    Args:
        heads: with that of a critic.
    """
    for chunk in map(unwrap, chunks):
        layers = {name: m.layer_number - 1 for name, m in chunk.named_modules() if isinstance(m, TransformerLayer)}
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            if heads or not is_value_head(chunk, name):
                yield _global_name(name, layers, chunk.config.num_moe_experts), tensor


def shard_place(entry: Entry) -> tuple[int, int]:
    """(index, count): this rank's shard of an entry, and the number of its shards."""
    if entry.rule.shard is None:
        return 0, 1
    if entry.rule.shard.group == "expert_tensor":
        return mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()
    return mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()


def load_hf_weights(
    chunks: Sequence[nn.Module], path: Path, family: Family, hf_config: dict[str, Any], dtype: str | None = None
) -> None:
    """Load a checkpoint folder into the modules; each rank reads the slices that it holds.

    A checkpoint in block FP8 is dequantised as it is read, to `dtype`, or to the checkpoint's if it is None.
    Call it before building the optimizer, which copies the weights.

    Raises:
        ValueError: tensors of the checkpoint are missing, unknown or have the wrong shape; names all of them.
    """
    weight_map = model_weight_map(chunks, family, hf_config)
    with open_hf_checkpoint(path, dtype) as folder, torch.no_grad():
        if note := left_out_note(folder):
            log.info(note)
        has_mtp = check_tensors(folder, family, hf_config)
        if unwrap(chunks[0]).config.mtp_num_layers and not has_mtp:
            raise ValueError(f"{path}: no tensors of the layers for multi-token prediction")
        for index, tensor in local_weights(chunks, weight_map):
            entry = weight_map.entries[index]
            value = entry.to_megatron(folder.read, *shard_place(entry))
            if value.shape != tensor.shape:
                raise ValueError(
                    f"{entry.megatron[0]}: {path} gives {list(value.shape)}, the model has {list(tensor.shape)}"
                )
            tensor.copy_(value)


def _global_name(name: str, layers: dict[str, int], num_experts: int | None) -> str:
    """The name with the global indices of expert and layer; MTP layers are all on one stage and keep their index."""
    expert = _LOCAL_EXPERT.fullmatch(name) or _GROUPED_EXPERT.fullmatch(name)
    if expert:
        assert num_experts is not None
        offset = mpu.get_expert_model_parallel_rank() * (num_experts // mpu.get_expert_model_parallel_world_size())
        before, local, after = expert.groups()
        name = f"{before}{offset + int(local)}{after}"
    in_layer = _LAYER.fullmatch(name)
    if in_layer:
        prefix, rest = in_layer.groups()
        name = f"decoder.layers.{layers[prefix]}.{rest}"
    return name
