"""The chunks of a model's torch_dist checkpoint, as plain values that can be sent to any process."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slimrl.data.model_weights import Region
from slimrl.models.layout_ops import GateUp
from slimrl.models.weight_map import Entry, WeightMap

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": True,
}
"""How megatron-core shards what slimrl saves: optimizer state that loads under any layout, and a key of its own for
every layer and expert."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of a stored tensor, which is also a block of a Megatron shard."""

    entry: int
    """Index of the chunk's entry in the weight map's entries."""
    shard: int
    num_shards: int
    slices: Region
    """Slices of the shard that the chunk fills; one per dimension."""
    key: str
    global_shape: tuple[int, ...]
    """Shape of the stored tensor, which may have more leading dimensions than the shard: layers or experts."""
    offset: tuple[int, ...]
    """Offset of the chunk's first element in the stored tensor; one per dimension of `global_shape`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the chunk in the stored tensor, with 1 for each additional leading dimension."""
        return (1,) * (len(self.global_shape) - len(self.slices)) + self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ShardSchema:
    weight_map: WeightMap
    chunks: tuple[Chunk, ...]
    """Chunks in the order of the map's entries, then of shards."""
    objects: tuple[str, ...]
    """Keys of stored objects that are no tensors: placeholders of quantised layers' states, all of them None."""


def gate_and_up_apart(entry: Entry, chunks: Sequence[Chunk]) -> bool:
    """Whether the chunks of a shard are gate and up, one by one."""
    if not isinstance(entry.rule.op, GateUp) or len(chunks) != 2:
        return False
    gate, up = chunks
    return gate.slices[0].start == 0 and up.slices[0].start == gate.slices[0].stop and gate.shape == up.shape
