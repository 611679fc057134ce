"""The trainer's live weights as Hugging Face tensors on rank 0, whatever the parallel layout.

1. At construction the ranks tell each other which shards they hold; every shard gets one owner, rank 0 where it can,
   else its replicas take turns.
2. The map's entries, in order, are cut into windows of bounded size.
3. For each window every rank sends rank 0 its shards in one flat message.
4. Rank 0 joins the shards and undoes Megatron's layout, tensor by tensor.

Rank 0 holds the weights of one window at a time besides its own.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimrl.data.protocols import TensorSpec
from slimrl.models.family import Family
from slimrl.models.hf_config import dtype_name
from slimrl.models.safetensors_folder import element_bytes
from slimrl.models.weight_map import Entry
from slimrl.trainer.weights import local_weights, model_weight_map, shard_place

WINDOW_BYTES = 64 * 1024**2
"""Most bytes gathered at a time; a single larger tensor is gathered whole."""

Key = tuple[int, int]
"""(entry, shard)"""


class MegatronWeightSource:
    """Implements WeightSource. Made and iterated by all ranks of the default process group together.

    Args:
        chunks: this rank's modules, wrapped or not; the source reads their weights as they are when iterated.
        dtype: of the exported tensors, as torch prints it without the prefix; None for the checkpoint's.

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
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._map = model_weight_map(chunks, family, hf_config)
        self._dtype = dtype or dtype_name(hf_config)
        self._local: dict[Key, Tensor] = {}
        counts: dict[int, int] = {}
        for index, tensor in local_weights(chunks, self._map):
            shard, counts[index] = shard_place(self._map.entries[index])
            self._local[index, shard] = tensor.detach()
        self._device = next(iter(self._local.values())).device if self._local else torch.device("cpu")
        held: list[Any] = [None] * self._world_size
        dist.all_gather_object(held, (list(self._local), counts))
        self._counts = {index: count for _, theirs in held for index, count in theirs.items()}
        self._owners = self._choose_owners([keys for keys, _ in held])
        self._shapes = [entry.shard_shape(self._counts[i]) for i, entry in enumerate(self._map.entries)]
        self._windows = self._cut_windows(window_bytes)

    def specs(self) -> list[TensorSpec]:
        """All tensors in the order in which `tensors` yields them; equal on every rank."""
        return self._map.specs(self._dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """(name, tensor) on rank 0, (name, None) elsewhere; every rank must run it to its end.

        A tensor is valid until the next one is asked for, and may share memory with the live weights.
        """
        for window in self._windows:
            shards = self._gather(window)
            for index in window:
                entry = self._map.entries[index]
                if shards is None:
                    yield from ((name, None) for tensor in entry.hf for name in tensor.names)
                    continue
                whole = entry.to_hf([shards[index, shard] for shard in range(self._counts[index])])
                for tensor, value in zip(entry.hf, whole, strict=True):
                    yield from ((name, value) for name in tensor.names)

    def _choose_owners(self, held: list[list[Key]]) -> dict[Key, int]:
        holders: dict[Key, list[int]] = defaultdict(list)
        for rank, keys in enumerate(held):
            for key in keys:
                holders[key].append(rank)
        missing = [
            entry.megatron[0]
            for index, entry in enumerate(self._map.entries)
            if not all((index, shard) in holders for shard in range(self._counts.get(index, 1)))
        ]
        if missing:
            raise ValueError(f"no rank holds {len(missing)} weights of the model, the first is {missing[0]}")
        return {key: 0 if 0 in ranks else ranks[key[0] % len(ranks)] for key, ranks in holders.items()}

    def _cut_windows(self, window_bytes: int) -> list[list[int]]:
        windows: list[list[int]] = []
        filled = window_bytes
        for index in range(len(self._map.entries)):
            size = self._counts[index] * self._shard_bytes(index)
            if not windows or filled + size > window_bytes:
                windows.append([])
                filled = 0
            windows[-1].append(index)
            filled += size
        return windows

    def _entry_dtype(self, entry: Entry) -> str:
        return entry.hf[0].dtype or self._dtype

    def _shard_bytes(self, index: int) -> int:
        numel = torch.Size(self._shapes[index]).numel()
        return numel * element_bytes(self._entry_dtype(self._map.entries[index]))

    def _gather(self, window: list[int]) -> dict[Key, Tensor] | None:
        """Every shard of the window's entries on rank 0, in the dtype of the export; None elsewhere."""
        by_owner: dict[int, list[Key]] = defaultdict(list)
        for index in window:
            for shard in range(self._counts[index]):
                by_owner[self._owners[index, shard]].append((index, shard))
        if self._rank != 0:
            if mine := by_owner.get(self._rank):
                flat = torch.cat([self._own(key).contiguous().reshape(-1).view(torch.uint8) for key in mine])
                _exchange([dist.P2POp(dist.isend, flat, 0)])
            return None
        shards = {key: self._own(key) for key in by_owner.pop(0, [])}
        buffers = {rank: self._buffer(keys) for rank, keys in by_owner.items()}
        _exchange([dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in buffers.items()])
        for rank, keys in by_owner.items():
            shards.update(self._unpack(buffers[rank], keys))
        return shards

    def _own(self, key: Key) -> Tensor:
        return self._local[key].to(getattr(torch, self._entry_dtype(self._map.entries[key[0]])))

    def _buffer(self, keys: list[Key]) -> Tensor:
        nbytes = sum(self._shard_bytes(index) for index, _ in keys)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _unpack(self, buffer: Tensor, keys: list[Key]) -> Iterator[tuple[Key, Tensor]]:
        start = 0
        for index, shard in keys:
            dtype = getattr(torch, self._entry_dtype(self._map.entries[index]))
            stop = start + self._shard_bytes(index)
            yield (index, shard), _typed(buffer[start:stop], dtype).reshape(self._shapes[index])
            start = stop


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as elements; a copy only where they do not lie on a boundary of their size."""
    return (raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()).view(dtype)


def _exchange(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
