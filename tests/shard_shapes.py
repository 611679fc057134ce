"""Shapes of shards as a weight map has them."""

import torch
from torch import Tensor

from slimrl.data.model_weights import Region
from slimrl.models.weight_map import Entry


def shard_shape(entry: Entry, count: int) -> tuple[int, ...]:
    """Shape of one of `count` equal shards of the Megatron tensor."""

    def on_meta(_: str, slices: Region) -> Tensor:
        return torch.empty([part.stop - part.start for part in slices], device="meta")

    return tuple(entry.to_megatron(on_meta, 0, count).shape)
