"""The chunks of a torch_dist checkpoint of a model, taken from the sharded state of Megatron's modules.

1. Every relevant rank is built on the meta device, and its modules return their sharded state.
2. Each tensor of that state is a shard of an entry of the weight map; Megatron may store it in several chunks (gate and
   up of a gated MLP).
3. A chunk is recorded as plain values: its key, its position in the stored tensor and its position in the shard.

slimrl's checkpoints have a key for each layer and expert, so they do not depend on pipeline and expert parallelism:
only tensor parallelism and expert tensor parallelism decide how tensors are sharded.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor

from slimrl.checkpoints.torch_dist.chunks import SHARDING, Chunk, ShardSchema
from slimrl.config.hf_config import num_experts
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.data.model_weights import Region
from slimrl.models.family import family_of
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import WeightMap
from slimrl.trainer.build import build_local_chunk, padded_vocab
from slimrl.trainer.layout.fake_world import fake_world
from slimrl.trainer.weights import local_weights, shard_place


def shard_schema(
    hf_config: dict[str, Any],
    *,
    tensor: int = 1,
    expert_tensor: int = 1,
    mtp: bool = False,
    singleton_local_shards: bool = True,
    layers_alike: bool | None = None,
) -> ShardSchema:
    """The content of a checkpoint with these sizes of tensor and expert tensor parallelism.

    Args:
        mtp: with the model's layers for multi-token prediction.
        singleton_local_shards: False for checkpoints that were saved without it: one key for all experts.
        layers_alike: of such a checkpoint, whether all layers share a key (`layers_share_keys`); None for what Megatron
            makes of the model's configuration.

    Raises:
        ValueError: the model is not supported, these sizes do not divide it, or its layers are not alike.
    """
    parallel = _spread_experts(
        ParallelConfig(tensor=tensor, expert_tensor=expert_tensor, sequence=tensor > 1), hf_config
    )
    family = family_of(hf_config)
    model = family.megatron_config(hf_config)
    weight_map = family.weight_map(hf_config, padded_vocab(model.vocab_size, tensor), mtp=mtp)
    sharding = {**SHARDING, "singleton_local_shards": singleton_local_shards}
    if layers_alike and not all(model.transformer.get("moe_layer_freq") or [1]):
        raise ValueError("the checkpoint stores all layers alike, config.json has layers with and without experts")
    if layers_alike is not None:
        sharding["non_homogeneous_layers"] = not layers_alike
    chunks: dict[tuple[str, tuple[int, ...]], Chunk] = {}
    objects: set[str] = set()
    world_size = parallel.smallest_world()
    for rank in range(world_size):
        with fake_world(parallel, rank=rank, world_size=world_size):
            for item in _rank_items(parallel, model, weight_map, sharding, mtp):
                if isinstance(item, str):
                    objects.add(item)
                else:
                    assert chunks.setdefault((item.key, item.offset), item) == item, item
    ordered = sorted(chunks.values(), key=lambda chunk: (chunk.entry, chunk.shard))
    _check_complete(ordered, weight_map)
    return ShardSchema(weight_map=weight_map, chunks=tuple(ordered), objects=tuple(sorted(objects)))


def _spread_experts(parallel: ParallelConfig, hf_config: dict[str, Any]) -> ParallelConfig:
    """Use as much expert parallelism as the layout's ranks allow, so that each rank builds few experts."""
    experts = num_experts(hf_config)
    room = parallel.smallest_world() // parallel.expert_tensor
    return replace(parallel, expert=math.gcd(experts, room) if experts else 1)


def _rank_items(
    parallel: ParallelConfig, model: MegatronModelConfig, weight_map: WeightMap, sharding: dict[str, Any], mtp: bool
) -> Iterator[Chunk | str]:
    """The chunks, and keys of objects, that this rank of the fake world would save."""
    chunk = build_local_chunk(parallel, model, mtp=mtp)
    if sharding.get("non_homogeneous_layers") is False:
        # A list of layers with experts makes Megatron store layer by layer, also where it lists all of them; its
        # default, which has experts in every layer, does not.
        chunk.config.moe_layer_freq = 1
    entries = {id(tensor): index for index, tensor in local_weights([chunk], weight_map)}
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    for name, item in chunk.sharded_state_dict(metadata={**sharding, "dp_cp_group": group}).items():
        if isinstance(item, ShardedObject):
            assert item.data is None, f"{name} is stored as an object with content"
            yield item.unique_key
            continue
        assert isinstance(item, ShardedTensor | ShardedTensorFactory), f"{name}: {type(item).__name__}"
        if id(item.data) not in entries:
            continue  # the tied output layer's copy of the embedding, or a buffer that is no weight
        stored = list(nested_values(item.build())) if isinstance(item, ShardedTensorFactory) else [item]
        for tensor in stored:
            if is_main_replica(tensor.replica_id):
                yield _chunk(tensor, item.data, entries[id(item.data)], weight_map)


def _chunk(stored: ShardedTensor, shard: Tensor, entry: int, weight_map: WeightMap) -> Chunk:
    index, count = shard_place(weight_map.entries[entry])
    assert stored.data is not None
    return Chunk(
        entry=entry,
        shard=index,
        num_shards=count,
        slices=_place(stored.data, shard),
        key=stored.key,
        global_shape=tuple(stored.global_shape),
        offset=tuple(stored.global_offset),
    )


def _place(view: Tensor, whole: Tensor) -> Region:
    """The slices of `whole` that give `view`."""
    assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata, "a stored chunk is not a view of its weight"
    assert whole.is_contiguous()
    assert view.stride() == whole.stride(), "a stored chunk is not a block of its weight"
    rest, slices = int(view.storage_offset()), []
    for size, stride in zip(view.shape, whole.stride(), strict=True):
        start, rest = divmod(rest, stride)
        slices.append(slice(start, start + size))
    return tuple(slices)


def _check_complete(chunks: list[Chunk], weight_map: WeightMap) -> None:
    """Assert that every entry of the map is stored, and that chunks cover every stored tensor once."""
    held = {chunk.entry for chunk in chunks}
    missing = [entry.megatron[0] for index, entry in enumerate(weight_map.entries) if index not in held]
    assert not missing, f"{len(missing)} weights are not stored, the first is {missing[0]}"
    stored: dict[str, int] = {}
    for chunk in chunks:
        stored[chunk.key] = stored.get(chunk.key, 0) + chunk.numel
    wrong = [chunk.key for chunk in chunks if stored[chunk.key] != math.prod(chunk.global_shape)]
    assert not wrong, f"{wrong[0]} is not covered exactly once"
