"""The pieces of which a torch_dist checkpoint of a model consists, as plain values that any process can work with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slimrl.models.layout_ops import GateUp
from slimrl.models.weight_map import Entry, Slices, WeightMap

SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": True,
}
"""How megatron-core shards what slimrl saves: the one form of optimizer state that loads under any layout, and a key of
its own for every layer and expert."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of a stored tensor, and the block of a Megatron shard that it is."""

    entry: int
    """Index in the weight map's entries."""
    shard: int
    num_shards: int
    slices: Slices
    """Where in the shard; one per dimension."""
    key: str
    global_shape: tuple[int, ...]
    """Of the stored tensor; it may have leading dimensions that the shard lacks, as long as there are layers or
    experts."""
    offset: tuple[int, ...]
    """Where in the stored tensor; one per dimension of `global_shape`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the block, with the leading dimensions of the stored tensor, which are 1."""
        return (1,) * (len(self.global_shape) - len(self.slices)) + self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ShardSchema:
    weight_map: WeightMap
    pieces: tuple[Piece, ...]
    """In the order of the map's entries, then of shards: the pieces of one shard are neighbours."""
    objects: tuple[str, ...]
    """Keys of what is stored beside tensors: placeholders of quantised layers' states, all of them None."""


def stored_apart(entry: Entry, pieces: Sequence[Piece]) -> bool:
    """Whether the pieces of a shard are its parts of the Hugging Face tensors as they are: gate and up, one by one."""
    if not isinstance(entry.rule.op, GateUp) or len(pieces) != 2:
        return False
    gate, up = pieces
    return gate.slices[0].start == 0 and up.slices[0].start == gate.slices[0].stop and gate.shape == up.shape
