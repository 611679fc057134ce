"""Reads the Hugging Face tensors that are in a torch_dist checkpoint, whatever layout saved it.

1. `.metadata` says which blocks of which stored tensors lie where in which file.
2. The schema of one rank says which stored tensors, or parts of them, make up each Megatron tensor.
3. To read a Hugging Face tensor, the Megatron tensor that holds it is put together from the blocks, and its layout
   undone. The last one is kept, since it holds several neighbours (gate and up; query, key and value).
"""

import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from slimrl.data.protocols import TensorSpec
from slimrl.models.shard_pieces import Piece, ShardSchema, stored_apart
from slimrl.models.stored_block import read_block
from slimrl.models.weight_map import Entry, Slices

METADATA_NAME = ".metadata"
MAX_LISTED = 10
"""Missing weights that an error names; the rest are counted."""


class StoredWeights:
    """The model's weights in a torch_dist folder; what else is in it, such as optimizer state, is left alone.

    Implements CheckpointReader. Holds one Megatron tensor and one stored block at a time.

    Args:
        schema: of one rank that holds the whole model, with keys as the checkpoint has them.

    Raises:
        ValueError: not such a folder, a file is missing or cut short, or the weights are not those of the schema.
    """

    def __init__(self, path: Path, metadata: Metadata, schema: ShardSchema) -> None:
        self.path = path
        check_files(path, metadata)
        self._stored = _StoredTensors(path, metadata)
        self._check(schema.pieces, schema.weight_map.entries)
        self._pieces: dict[int, list[Piece]] = {}
        for piece in schema.pieces:
            self._pieces.setdefault(piece.entry, []).append(piece)
        self._entries = schema.weight_map.entries
        self._held: tuple[int, dict[str, Tensor]] | None = None
        self.specs: dict[str, TensorSpec] = {}
        self._entry_of: dict[str, int] = {}
        for index, pieces in self._pieces.items():
            dtype = str(self._stored.dtype(pieces[0].key)).removeprefix("torch.")
            for tensor in self._entries[index].hf:
                self._entry_of[tensor.name] = index
                self.specs[tensor.name] = TensorSpec(name=tensor.name, shape=tensor.shape, dtype=dtype)

    def read(self, name: str, slices: Slices) -> Tensor:
        """A slice of a tensor, on the CPU, in the dtype in which it is stored; it may share memory with other reads."""
        index = self._entry_of[name]
        if self._held is None or self._held[0] != index:
            self._held = None
            self._held = index, self._read_entry(self._entries[index], self._pieces[index])
        return self._held[1][name][slices]

    def close(self) -> None:
        self._held = None

    def __enter__(self) -> "StoredWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_entry(self, entry: Entry, pieces: list[Piece]) -> dict[str, Tensor]:
        if stored_apart(entry, pieces):
            tensors = [self._stored.read(piece) for piece in pieces]
        elif len(pieces) == 1:
            tensors = list(entry.to_hf([self._stored.read(pieces[0])]))
        else:
            shape = [max(piece.slices[dim].stop for piece in pieces) for dim in range(len(pieces[0].slices))]
            whole = torch.empty(shape, dtype=self._stored.dtype(pieces[0].key))
            for piece in pieces:
                whole[piece.slices] = self._stored.read(piece)
            tensors = list(entry.to_hf([whole]))
        return dict(zip((tensor.name for tensor in entry.hf), tensors, strict=True))

    def _check(self, pieces: Sequence[Piece], entries: Sequence[Entry]) -> None:
        """Every weight is stored, in its shape; the vocabulary may be padded."""
        problems = []
        for piece in pieces:
            stored = self._stored.tensors.get(piece.key)
            if stored is None:
                problems.append(f"{piece.key}: missing")
                continue
            shard = entries[piece.entry].rule.shard
            padded = shard is not None and shard.padded_size is not None
            rows = piece.global_shape[0] <= stored.size[0] if padded else piece.global_shape[0] == stored.size[0]
            if not rows or tuple(stored.size[1:]) != piece.global_shape[1:]:
                problems.append(f"{piece.key}: shape {list(stored.size)}, the model has {list(piece.global_shape)}")
        if problems:
            more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
            listed = "\n  ".join(problems[:MAX_LISTED] + more)
            raise ValueError(f"{self.path}: these are not the weights of the model in its config.json:\n  {listed}")


class _StoredTensors:
    """Blocks of stored tensors, read where they lie."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self._path, self._storage = path, metadata.storage_data

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype

    def read(self, piece: Piece) -> Tensor:
        """A piece in the shape that it has in its shard; where it is one stored block, that block itself."""
        chunks, shape = self.tensors[piece.key].chunks, piece.stored_shape
        for chunk in chunks:
            if (tuple(chunk.offsets), tuple(chunk.sizes)) == (piece.offset, shape):
                return self._chunk(piece.key, chunk).reshape(piece.shape)
        target = torch.empty(shape, dtype=self.dtype(piece.key))
        filled = 0
        for chunk in chunks:
            overlap = _overlap(piece.offset, shape, chunk)
            if overlap is None:
                continue
            in_target, in_chunk = overlap
            part = target[in_target]
            part.copy_(self._chunk(piece.key, chunk)[in_chunk])
            filled += part.numel()
        if filled != target.numel():
            raise ValueError(f"{self._path}: {filled} of {target.numel()} elements of {piece.key} are stored")
        return target.view(piece.shape)

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        tensor = read_block(self._path, self._storage[MetadataIndex(key, chunk.offsets)])
        if tensor.shape != chunk.sizes:
            raise ValueError(f"{self._path}: {key} is {list(tensor.shape)}, its metadata says {list(chunk.sizes)}")
        return tensor


def read_metadata(path: Path) -> Metadata:
    """What a torch_dist folder says that it holds.

    Raises:
        ValueError: no such folder, or its metadata cannot be read.
    """
    if not (path / METADATA_NAME).is_file():
        raise ValueError(f"{path}: not a torch_dist checkpoint, it has no {METADATA_NAME}")
    try:
        return FileSystemReader(path).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise ValueError(f"{path / METADATA_NAME}: cannot be read: {error!r}") from error


def check_files(path: Path, metadata: Metadata) -> None:
    """Raises ValueError where a file that the metadata names is missing or too short."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: missing, and {METADATA_NAME} says that weights are in it")
        if file.stat().st_size < end:
            raise ValueError(f"{file}: cut short, {file.stat().st_size} bytes where {end} are due")


def _overlap(
    offset: tuple[int, ...], shape: tuple[int, ...], chunk: ChunkStorageMetadata
) -> tuple[Slices, Slices] | None:
    """The common block of a region and a chunk, in coordinates of each; None where there is none."""
    in_region, in_chunk = [], []
    for start, size, chunk_start, chunk_size in zip(offset, shape, chunk.offsets, chunk.sizes, strict=True):
        low, high = max(start, chunk_start), min(start + size, chunk_start + chunk_size)
        if low >= high:
            return None
        in_region.append(slice(low - start, high - start))
        in_chunk.append(slice(low - chunk_start, high - chunk_start))
    return tuple(in_region), tuple(in_chunk)
