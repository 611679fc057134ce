"""The trainer's live weights as Hugging Face tensors: where each lies, this rank's pieces, and whole ones on rank 0.

A shard of a Megatron weight gives one piece of each Hugging Face tensor that the weight holds. At construction the
ranks tell each other which shards they have.

Whole tensors, for an export, come together on rank 0:

1. Every piece gets one owner, rank 0 where it can, else its holders take turns.
2. The tensors, in order, are cut into windows of bounded size.
3. For each window every rank sends rank 0 its pieces in one flat message, and rank 0 puts them together.

Rank 0 holds the tensors of one window at a time besides its own weights.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimrl.data.protocols import Region, SourcePiece, SourceTensor, TensorSpec
from slimrl.models.family import Family
from slimrl.models.hf_config import dtype_name
from slimrl.models.safetensors_folder import element_bytes, spec_bytes
from slimrl.trainer.weights import local_weights, model_weight_map, shard_place

WINDOW_BYTES = 64 * 1024**2
"""Most bytes gathered at a time; a single larger tensor is gathered whole."""

Shard = tuple[int, int]
"""(entry of the weight map, index of the shard)"""


class MegatronWeightSource:
    """Implements WeightSource. Made by all ranks of the default process group together.

    Args:
        chunks: this rank's modules, wrapped or not; the source reads their weights as they are when asked.
        dtype: of the tensors, as torch prints it without the prefix; None for the checkpoint's.

    Raises:
        ValueError: weights of the model are held by no rank, or the modules have weights that no rule covers.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        family: Family,
        hf_config: dict[str, Any],
        dtype: str | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._rank = dist.get_rank()
        self._map = model_weight_map(chunks, family, hf_config)
        self._dtype = dtype or dtype_name(hf_config)
        self._local = {index: tensor.detach() for index, tensor in local_weights(chunks, self._map)}
        self._device = next(iter(self._local.values())).device if self._local else torch.device("cpu")
        self._places = {
            name: (index, position)
            for index, entry in enumerate(self._map.entries)
            for position, tensor in enumerate(entry.hf)
            for name in tensor.names
        }
        self._layout = self._join_layouts()
        self._windows = _cut_windows(self._layout, window_bytes)

    def specs(self) -> list[TensorSpec]:
        """All tensors in the order in which `tensors` yields them; equal on every rank."""
        return [tensor.spec for tensor in self._layout]

    def layout(self) -> list[SourceTensor]:
        """Where each tensor lies, in the order of `specs`; equal on every rank."""
        return self._layout

    def piece(self, name: str) -> Tensor:
        """This rank's piece of a tensor as it is now, in the live weight's dtype, without padding.

        A view of the live weight where the layout allows.

        Raises:
            KeyError: this rank holds no piece of it.
        """
        index, position = self._places[name]
        entry = self._map.entries[index]
        region, _ = entry.slices(entry.hf[position], *shard_place(entry))
        padded = self.groups(name).flatten(0, 1)
        return padded[tuple(slice(0, part.stop - part.start) for part in region)] if region else padded[0]

    def groups(self, name: str) -> Tensor:
        """The piece with its padding as a view of the live weight, [groups, rows of a group, ...].

        Raises:
            KeyError: this rank holds no piece of it.
        """
        index, position = self._places[name]
        return self._map.entries[index].rule.op.groups(self._local[index])[position]

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """(name, tensor) on rank 0, (name, None) elsewhere; every rank must run it to its end.

        A tensor is valid until the next one is asked for, and may share memory with the live weights.
        """
        for window in self._windows:
            received = self._gather(window)
            for tensor in window:
                if received is None:
                    yield tensor.spec.name, None
                else:
                    yield tensor.spec.name, _whole(tensor.spec, received.pop(tensor.spec.name))

    def _join_layouts(self) -> list[SourceTensor]:
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
        return [
            SourceTensor(
                spec=spec,
                pieces=tuple(
                    SourcePiece(region=region, holders=tuple(holders[index, shard]))
                    for shard in range(counts[index])
                    if not _is_empty(region := self._region(index, position, shard, counts[index]))
                ),
            )
            for spec in self._map.specs(self._dtype)
            for index, position in [self._places[spec.name]]
        ]

    def _region(self, index: int, position: int, shard: int, count: int) -> Region:
        entry = self._map.entries[index]
        return entry.slices(entry.hf[position], shard, count)[0]

    def _gather(self, window: Sequence[SourceTensor]) -> dict[str, list[tuple[Region, Tensor]]] | None:
        """The pieces of the window's tensors on rank 0, in the dtype of the export; None elsewhere."""
        by_owner: dict[int, list[tuple[TensorSpec, Region]]] = defaultdict(list)
        for tensor in window:
            for number, piece in enumerate(tensor.pieces):
                owner = 0 if 0 in piece.holders else piece.holders[number % len(piece.holders)]
                by_owner[owner].append((tensor.spec, piece.region))
        if self._rank != 0:
            if mine := by_owner.get(self._rank):
                flat = torch.cat([self._own(spec).contiguous().reshape(-1).view(torch.uint8) for spec, _ in mine])
                _exchange([dist.P2POp(dist.isend, flat, 0)])
            return None
        received: dict[str, list[tuple[Region, Tensor]]] = defaultdict(list)
        for spec, region in by_owner.pop(0, []):
            received[spec.name].append((region, self._own(spec)))
        buffers = {rank: self._buffer(pieces) for rank, pieces in by_owner.items()}
        _exchange([dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in buffers.items()])
        for rank, pieces in by_owner.items():
            start = 0
            for spec, region in pieces:
                stop = start + _region_bytes(spec, region)
                value = _typed(buffers[rank][start:stop], getattr(torch, spec.dtype))
                received[spec.name].append((region, value.reshape(_region_shape(region))))
                start = stop
        return received

    def _own(self, spec: TensorSpec) -> Tensor:
        return self.piece(spec.name).to(getattr(torch, spec.dtype))

    def _buffer(self, pieces: Sequence[tuple[TensorSpec, Region]]) -> Tensor:
        nbytes = sum(_region_bytes(spec, region) for spec, region in pieces)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _cut_windows(layout: Sequence[SourceTensor], window_bytes: int) -> list[list[SourceTensor]]:
    windows: list[list[SourceTensor]] = []
    filled = window_bytes
    for tensor in layout:
        size = spec_bytes(tensor.spec)
        if not windows or filled + size > window_bytes:
            windows.append([])
            filled = 0
        windows[-1].append(tensor)
        filled += size
    return windows


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


def _is_empty(region: Region) -> bool:
    """Whether it is padding alone."""
    return 0 in _region_shape(region)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as elements; a copy only where they do not lie on a boundary of their size."""
    return (raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()).view(dtype)


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
