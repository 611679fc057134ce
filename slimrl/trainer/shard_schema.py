"""What a torch_dist checkpoint of a model holds, piece by piece, learned from Megatron's own modules.

1. Every rank that matters is built on the meta device, and its modules are asked for their sharded state.
2. Each tensor of that state is a weight of the model, so an entry of the weight map and a shard of it; Megatron may
   store it in several pieces (gate and up of a gated MLP).
3. A piece is written down as plain values: its key, where it lies in the stored tensor and where in the shard.

Layers and experts have keys of their own in what slimrl saves, so that pipeline and expert parallelism make no
difference to it: tensor parallelism and that of the experts alone decide where tensors are cut.
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

from slimrl.config.model_rules import num_experts
from slimrl.config.schema import ParallelConfig
from slimrl.models.family import family_of
from slimrl.models.shard_pieces import SHARDING, Piece, ShardSchema
from slimrl.models.weight_map import Slices, WeightMap
from slimrl.trainer.build import build_local_chunk, padded_vocab
from slimrl.trainer.fake_world import fake_world, smallest_world
from slimrl.trainer.weights import local_weights, shard_place


def shard_schema(
    hf_config: dict[str, Any],
    *,
    tensor: int = 1,
    expert_tensor: int = 1,
    mtp: bool = False,
    singleton_local_shards: bool = True,
) -> ShardSchema:
    """What a checkpoint holds that is cut for this much tensor parallelism, of the model and of its experts.

    Args:
        mtp: with the model's layers for multi-token prediction.
        singleton_local_shards: False for checkpoints that were saved without it: one key for all experts, and one for
            all layers where they are alike.

    Raises:
        ValueError: the model is not supported, or does not divide so.
    """
    parallel = _spread_experts(
        ParallelConfig(tensor=tensor, expert_tensor=expert_tensor, sequence=tensor > 1), hf_config
    )
    weight_map = family_of(hf_config).weight_map(hf_config, padded_vocab_of(hf_config, tensor), mtp=mtp)
    sharding = {**SHARDING, "singleton_local_shards": singleton_local_shards}
    pieces: dict[tuple[str, tuple[int, ...]], Piece] = {}
    objects: set[str] = set()
    world_size = smallest_world(parallel)
    for rank in range(world_size):
        with fake_world(parallel, rank=rank, world_size=world_size):
            for item in _rank_items(parallel, hf_config, weight_map, sharding, mtp):
                if isinstance(item, str):
                    objects.add(item)
                else:
                    assert pieces.setdefault((item.key, item.offset), item) == item, item
    ordered = sorted(pieces.values(), key=lambda piece: (piece.entry, piece.shard))
    _check_complete(ordered, weight_map)
    return ShardSchema(weight_map=weight_map, pieces=tuple(ordered), objects=tuple(sorted(objects)))


def _spread_experts(parallel: ParallelConfig, hf_config: dict[str, Any]) -> ParallelConfig:
    """As much expert parallelism as the ranks of the layout have room for, so that each builds few experts."""
    experts = num_experts(hf_config)
    room = smallest_world(parallel) // parallel.expert_tensor
    return replace(parallel, expert=math.gcd(experts, room) if experts else 1)


def padded_vocab_of(hf_config: dict[str, Any], tensor: int) -> int:
    """Rows of the Megatron embedding under this much tensor parallelism."""
    return padded_vocab(family_of(hf_config).megatron_config(hf_config).vocab_size, tensor)


def _rank_items(
    parallel: ParallelConfig, hf_config: dict[str, Any], weight_map: WeightMap, sharding: dict[str, Any], mtp: bool
) -> Iterator[Piece | str]:
    """What this rank of the fake world would save: pieces, and keys of objects."""
    chunk = build_local_chunk(parallel, family_of(hf_config).megatron_config(hf_config), mtp=mtp)
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
                yield _piece(tensor, item.data, entries[id(item.data)], weight_map)


def _piece(stored: ShardedTensor, shard: Tensor, entry: int, weight_map: WeightMap) -> Piece:
    index, count = shard_place(weight_map.entries[entry])
    assert stored.data is not None
    return Piece(
        entry=entry,
        shard=index,
        num_shards=count,
        slices=_place(stored.data, shard),
        key=stored.key,
        global_shape=tuple(stored.global_shape),
        offset=tuple(stored.global_offset),
    )


def _place(view: Tensor, whole: Tensor) -> Slices:
    """Which block of `whole` a view of it is."""
    assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata, "a stored piece is no view of its weight"
    assert whole.is_contiguous()
    assert view.stride() == whole.stride(), "a stored piece is no block of its weight"
    rest, slices = int(view.storage_offset()), []
    for size, stride in zip(view.shape, whole.stride(), strict=True):
        start, rest = divmod(rest, stride)
        slices.append(slice(start, start + size))
    return tuple(slices)


def _check_complete(pieces: list[Piece], weight_map: WeightMap) -> None:
    """Every entry of the map is stored, every stored tensor is covered, and shards are as large as the map says."""
    held = {piece.entry for piece in pieces}
    missing = [entry.megatron[0] for index, entry in enumerate(weight_map.entries) if index not in held]
    assert not missing, f"{len(missing)} weights are not stored, the first is {missing[0]}"
    stored: dict[str, int] = {}
    for piece in pieces:
        stored[piece.key] = stored.get(piece.key, 0) + piece.numel
    wrong = [piece.key for piece in pieces if stored[piece.key] != math.prod(piece.global_shape)]
    assert not wrong, f"{wrong[0]} is not covered exactly once"
