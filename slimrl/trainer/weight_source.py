"""The trainer's live weights as Hugging Face tensors: their layout, this rank's pieces, and whole tensors on rank 0.

Weights of layers with adapters have these merged in: W + alpha / rank * B A, added in float32 and rounded to W's dtype.
A shard of a Megatron weight gives one piece of each Hugging Face tensor in the weight. At construction the ranks
exchange which shards they hold.

For an export, rank 0 gathers whole tensors:

1. Every piece gets one owner: rank 0 if it holds the piece, else the holders take turns.
2. The tensors, in order, are split into windows of bounded size.
3. For each window every rank sends its pieces to rank 0 in one flat message, and rank 0 assembles the tensors.

Rank 0 holds the tensors of one window at a time besides its own weights.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimrl.checkpoints.file_groups import group_by_bytes
from slimrl.checkpoints.safetensors_file import element_bytes, spec_bytes
from slimrl.data.model_weights import Region, SourceLayout, SourcePiece, TensorSpec, piece_of
from slimrl.models.adapters import layer_name
from slimrl.models.family import Family
from slimrl.models.hf_config import dtype_name
from slimrl.models.weight_map import WeightMap
from slimrl.trainer.lora.attach import adapters_of
from slimrl.trainer.weights import local_adapters, local_weights, model_weight_map, shard_place

WINDOW_BYTES = 64 * 1024**2
"""Most bytes gathered at a time; a single larger tensor is gathered whole."""

Shard = tuple[int, int]
"""(entry of the weight map, index of the shard)"""


class MegatronWeightSource:
    """Implements WeightSource. All ranks of the default process group construct it together.

    Args:
        chunks: this rank's modules, wrapped or not; each call reads their current weights.
        dtype: of the tensors, as in torch without the prefix; None for the checkpoint's.
        adapters: the map of the model's adapters, to give these in place of its weights.
        mtp: with layers for multi-token prediction, if the modules have any.
        copies: also under the further names that a checkpoint gives some tensors.

    Raises:
        ValueError: no rank holds some weights of the model, or the modules have weights that no rule covers.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        family: Family,
        hf_config: dict[str, Any],
        dtype: str | None = None,
        window_bytes: int = WINDOW_BYTES,
        *,
        adapters: WeightMap | None = None,
        mtp: bool = True,
        copies: bool = True,
    ) -> None:
        self._rank = dist.get_rank()
        self._map = adapters or model_weight_map(chunks, family, hf_config, mtp=mtp)
        if not copies:
            self._map = self._map.without_copies()
        self._dtype = dtype or dtype_name(hf_config)
        held = local_adapters(chunks, adapters) if adapters else local_weights(chunks, self._map)
        self._local = {index: tensor.detach() for index, tensor in held}
        by_weight = {id(weight): of_layer for weight, of_layer in adapters_of(chunks)}
        self._adapters = {index: by_weight[id(weight)] for index, weight in held if id(weight) in by_weight}
        self._device = next(iter(self._local.values())).device if self._local else torch.device("cpu")
        self._places = {
            name: (index, position)
            for index, entry in enumerate(self._map.entries)
            for position, tensor in enumerate(entry.hf)
            for name in tensor.names
        }
        self._layout = self._gather_layout()
        self._windows = group_by_bytes(self._layout, spec_bytes, window_bytes)

    def layout(self) -> SourceLayout:
        """All tensors, in the order in which `tensors` yields them; equal on every rank."""
        return self._layout

    def groups(self, name: str) -> Tensor:
        """This rank's pieces of a tensor, with its adapters merged in; see WeightSource.groups."""
        index, position = self._places[name]
        rule, adapters = self._map.entries[index].rule, self._adapters.get(index)
        groups = rule.op.groups(self._local[index])[position]
        layer = layer_name(rule.hf[position])
        if adapters is None or layer not in adapters.names:
            return groups
        return (groups.float() + adapters.delta(layer).view(groups.shape)).to(groups.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """(name, tensor) on rank 0, (name, None) on the others, which must iterate to the end too.

        A tensor is valid until the next one is requested, and may share memory with the live weights.
        """
        for window in self._windows:
            received = self._gather(window)
            for spec in window:
                yield spec.name, None if received is None else _whole(spec, received.pop(spec.name))

    def _gather_layout(self) -> SourceLayout:
        mine = {index: shard_place(self._map.entries[index]) for index in self._local}
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, mine)
        counts: dict[int, int] = {}
        holders: dict[Shard, list[int]] = defaultdict(list)
        for rank, places in enumerate(held):
            for index, (shard, count) in places.items():
                counts[index] = count
                holders[index, shard].append(rank)
        missing = [
            entry.megatron[0]
            for index, entry in enumerate(self._map.entries)
            if not all((index, shard) in holders for shard in range(counts.get(index, 1)))
        ]
        if missing:
            raise ValueError(f"no rank holds {len(missing)} weights of the model, the first is {missing[0]}")
        return self._map.layout(
            self._dtype, lambda index: [tuple(holders[index, shard]) for shard in range(counts[index])]
        )

    def _gather(self, window: Sequence[TensorSpec]) -> dict[str, list[tuple[Region, Tensor]]] | None:
        """The pieces of the window's tensors on rank 0, in the dtype of the export; None elsewhere."""
        by_owner: dict[int, list[tuple[TensorSpec, SourcePiece]]] = defaultdict(list)
        for spec in window:
            for number, piece in enumerate(self._layout[spec]):
                owner = 0 if 0 in piece.holders else piece.holders[number % len(piece.holders)]
                by_owner[owner].append((spec, piece))
        if self._rank != 0:
            if mine := by_owner.get(self._rank):
                flat = torch.cat([self._own(*each).contiguous().reshape(-1).view(torch.uint8) for each in mine])
                _exchange([dist.P2POp(dist.isend, flat, 0)])
            return None
        received: dict[str, list[tuple[Region, Tensor]]] = defaultdict(list)
        for spec, piece in by_owner.pop(0, []):
            received[spec.name].append((piece.region, self._own(spec, piece)))
        sizes = {
            rank: [_region_bytes(spec, piece.region) for spec, piece in pieces] for rank, pieces in by_owner.items()
        }
        buffers = {rank: torch.empty(sum(own), dtype=torch.uint8, device=self._device) for rank, own in sizes.items()}
        _exchange([dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in buffers.items()])
        for rank, pieces in by_owner.items():
            for (spec, piece), raw in zip(pieces, buffers[rank].split(sizes[rank]), strict=True):
                value = _typed(raw, getattr(torch, spec.dtype))
                received[spec.name].append((piece.region, value.reshape(_region_shape(piece.region))))
        return received

    def _own(self, spec: TensorSpec, piece: SourcePiece) -> Tensor:
        return piece_of(self.groups(spec.name), piece).to(getattr(torch, spec.dtype))


def _whole(spec: TensorSpec, pieces: Sequence[tuple[Region, Tensor]]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0][1]
    whole = torch.empty(spec.shape, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
    for region, value in pieces:
        whole[region] = value
    return whole


def _region_shape(region: Region) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in region)


def _region_bytes(spec: TensorSpec, region: Region) -> int:
    return torch.Size(_region_shape(region)).numel() * element_bytes(spec.dtype)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as elements; a copy only if they are not aligned to the element size."""
    return (raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()).view(dtype)


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
