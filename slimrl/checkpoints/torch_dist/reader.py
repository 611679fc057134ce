"""Reads Hugging Face tensors from a torch_dist checkpoint, whatever layout saved it.

1. `.metadata` says in which file each chunk of each stored tensor is.
2. The schema of one rank says which stored tensors, or chunks of them, make up each Megatron tensor.
3. To read a Hugging Face tensor, the reader assembles the Megatron tensor that holds it and undoes its layout. It
   keeps the last one, whose other Hugging Face tensors usually come next (query, key and value). Rows of a tensor that
   is stored as it is, in one chunk, are read alone.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.torch_dist.chunks import Chunk, ShardSchema, gate_and_up_apart
from slimrl.checkpoints.torch_dist.safe_pickle import METADATA_NAME
from slimrl.checkpoints.torch_dist.torch_chunk import read_chunk, read_rows
from slimrl.data.model_weights import Region, TensorSpec
from slimrl.models.layout_ops import Identity
from slimrl.models.weight_map import Entry

MAX_LISTED = 10
"""Missing weights that an error names; the rest are counted."""


class StoredWeights(CheckpointReader):
    """The model's weights in a torch_dist folder, which may hold more, such as optimizer state.

    Holds one Megatron tensor and one stored chunk at a time.

    Args:
        schema: of one rank that holds the whole model, with keys as the checkpoint has them.

    Raises:
        ValueError: no torch_dist folder, a file is missing or cut short, or the weights are not those of the schema.
    """

    def __init__(self, path: Path, metadata: Metadata, schema: ShardSchema) -> None:
        self.path = path
        check_files(path, metadata)
        self._storage = metadata.storage_data
        self._stored: dict[str, TensorStorageMetadata] = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._check(schema.chunks, schema.weight_map.entries)
        self._chunks_of: dict[int, list[Chunk]] = {}
        for chunk in schema.chunks:
            self._chunks_of.setdefault(chunk.entry, []).append(chunk)
        self._entries = schema.weight_map.entries
        self._held: tuple[int, dict[str, Tensor]] | None = None
        self.specs: dict[str, TensorSpec] = {}
        self._entry_of: dict[str, int] = {}
        for index, chunks in self._chunks_of.items():
            dtype = str(self._dtype(chunks[0])).removeprefix("torch.")
            for tensor in self._entries[index].hf:
                self._entry_of[tensor.name] = index
                self.specs[tensor.name] = TensorSpec(name=tensor.name, shape=tensor.shape, dtype=dtype)

    def read(self, name: str, slices: Region) -> Tensor:
        """A slice of a tensor, on the CPU, in its stored dtype; it may share memory with other reads."""
        index = self._entry_of[name]
        alone = self._read_alone(self._entries[index], self._chunks_of[index], name, slices)
        if alone is not None:
            return alone
        if self._held is None or self._held[0] != index:
            self._held = None
            self._held = index, self._read_entry(self._entries[index], self._chunks_of[index])
        return self._held[1][name][slices]

    def close(self) -> None:
        self._held = None

    def _read_alone(self, entry: Entry, chunks: list[Chunk], name: str, slices: Region) -> Tensor | None:
        """Whole rows of a tensor that a stored chunk holds as it is; None for any other tensor or slice."""
        if gate_and_up_apart(entry, chunks):
            chunk = chunks[[tensor.name for tensor in entry.hf].index(name)]
        elif len(chunks) == 1 and isinstance(entry.rule.op, Identity):
            chunk = chunks[0]
        else:
            return None
        place = self._storage.get(MetadataIndex(chunk.key, chunk.offset))
        columns = zip(slices[1:], chunk.shape[1:], strict=True)
        whole_rows = all((part.start, part.stop) == (0, size) for part, size in columns)
        if place is None or not slices or not whole_rows:
            return None
        return read_rows(self.path, place, chunk.shape, slices[0])

    def _read_entry(self, entry: Entry, chunks: list[Chunk]) -> dict[str, Tensor]:
        if gate_and_up_apart(entry, chunks):
            tensors = [self._read_chunk(chunk) for chunk in chunks]
        elif len(chunks) == 1:
            tensors = list(entry.to_hf([self._read_chunk(chunks[0])]))
        else:
            shape = [max(chunk.slices[dim].stop for chunk in chunks) for dim in range(len(chunks[0].slices))]
            whole = torch.empty(shape, dtype=self._dtype(chunks[0]))
            for chunk in chunks:
                whole[chunk.slices] = self._read_chunk(chunk)
            tensors = list(entry.to_hf([whole]))
        return dict(zip((tensor.name for tensor in entry.hf), tensors, strict=True))

    def _check(self, chunks: Sequence[Chunk], entries: Sequence[Entry]) -> None:
        """Raises ValueError unless every weight is stored in its shape; the vocabulary may be padded."""
        problems = []
        for chunk in chunks:
            stored = self._stored.get(chunk.key)
            if stored is None:
                problems.append(f"{chunk.key}: missing")
                continue
            shard = entries[chunk.entry].rule.shard
            padded = shard is not None and shard.padded_size is not None
            rows = chunk.global_shape[0] <= stored.size[0] if padded else chunk.global_shape[0] == stored.size[0]
            if not rows or tuple(stored.size[1:]) != chunk.global_shape[1:]:
                problems.append(f"{chunk.key}: shape {list(stored.size)}, the model has {list(chunk.global_shape)}")
        if problems:
            more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
            listed = "\n  ".join(problems[:MAX_LISTED] + more)
            raise ValueError(f"{self.path}: these are not the weights of the model in its config.json:\n  {listed}")

    def _dtype(self, chunk: Chunk) -> torch.dtype:
        return self._stored[chunk.key].properties.dtype

    def _read_chunk(self, chunk: Chunk) -> Tensor:
        """A chunk in the shape that it has in its shard, assembled if the file has other chunks."""
        stored_chunks, shape = self._stored[chunk.key].chunks, chunk.stored_shape
        for stored in stored_chunks:
            if (tuple(stored.offsets), tuple(stored.sizes)) == (chunk.offset, shape):
                return self._load(chunk.key, stored).reshape(chunk.shape)
        target = torch.empty(shape, dtype=self._dtype(chunk))
        filled = 0
        wanted = ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(shape))
        for item in create_read_items_for_chunk_list(chunk.key, self._stored[chunk.key], [wanted]):
            assert item.storage_index.index is not None
            stored = stored_chunks[item.storage_index.index]
            part = target[_slices(item.dest_offsets, item.lengths)]
            part.copy_(self._load(chunk.key, stored)[_slices(item.storage_offsets, item.lengths)])
            filled += part.numel()
        if filled != target.numel():
            raise ValueError(f"{self.path}: {filled} of {target.numel()} elements of {chunk.key} are stored")
        return target.view(chunk.shape)

    def _load(self, key: str, stored: ChunkStorageMetadata) -> Tensor:
        tensor = read_chunk(self.path, self._storage[MetadataIndex(key, stored.offsets)])
        if tensor.shape != stored.sizes:
            raise ValueError(f"{self.path}: {key} is {list(tensor.shape)}, its metadata says {list(stored.sizes)}")
        return tensor


def check_files(path: Path, metadata: Metadata) -> None:
    """Raises ValueError if a file that the metadata names is missing or cut short."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: missing, though {METADATA_NAME} names it")
        if file.stat().st_size < end:
            raise ValueError(f"{file}: cut short, {file.stat().st_size} of {end} bytes are there")


def _slices(starts: torch.Size, lengths: torch.Size) -> Region:
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
