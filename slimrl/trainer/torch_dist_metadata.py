"""The metadata of a torch_dist checkpoint whose files are written: which piece lies where. It makes the folder whole.

The result is what megatron-core itself would have saved of the model.
"""

import io
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from slimrl.models.shard_pieces import SHARDING, ShardSchema
from slimrl.models.torch_dist_files import Block
from slimrl.models.torch_dist_reader import METADATA_NAME

FORMAT_VERSION = "1.0.0"
"""Of torch's distributed checkpoints."""
COMMON_NAME = "common.pt"
"""What is not sharded: here only what the checkpoint says of itself."""


def content_metadata(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, as how the keys of its layers and experts were made.

    Raises:
        ValueError: not a checkpoint of megatron-core, or its file for this is missing or damaged.
    """
    if not (folder / COMMON_NAME).is_file():  # megatron-core's own error for it fails
        raise ValueError(f"{folder}: not a checkpoint of megatron-core: it has no {COMMON_NAME}")
    try:
        return dist_checkpointing.load_content_metadata(str(folder)) or {}
    except (CheckpointingException, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder}: not a checkpoint of megatron-core: {error}") from error


def write_metadata(
    folder: Path, schema: ShardSchema, dtypes: Sequence[torch.dtype], files: Mapping[str, Sequence[Block]]
) -> None:
    """Complete a folder whose files are all written, so that megatron-core loads it.

    Args:
        files: what is in each file, by name.
    """
    pieces = {(piece.key, piece.offset): piece for piece in schema.pieces}
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, blocks in files.items():
        for block in blocks:
            piece = pieces.pop((block.key, block.offset))
            if block.key not in stored:
                properties = TensorProperties(dtype=dtypes[piece.entry])
                stored[block.key] = TensorStorageMetadata(properties, torch.Size(piece.global_shape), [])
            chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.stored_shape))
            stored[block.key].chunks.append(chunk)
            places[MetadataIndex(block.key, piece.offset)] = _StorageInfo(name, block.start, block.length)
    assert not pieces, f"{len(pieces)} pieces were not written"
    objects = f"__0_{len(files)}.distcp"
    for key, place in _write_objects(folder / objects, schema.objects):
        stored[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = place
    torch.save({"content_metadata": SHARDING}, folder / COMMON_NAME)
    metadata = Metadata(
        state_dict_metadata=stored, storage_data=places, storage_meta=StorageMeta(), version=FORMAT_VERSION
    )
    with (folder / METADATA_NAME).open("wb") as stream:
        pickle.dump(metadata, stream)
        stream.flush()
        os.fsync(stream.fileno())
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def _write_objects(file: Path, keys: Iterable[str]) -> Iterator[tuple[str, _StorageInfo]]:
    """Each as megatron-core stores an object that one rank has: a list of it, pickled by torch."""
    content = io.BytesIO()
    torch.save([None], content)
    raw = content.getvalue()
    with file.open("wb") as stream:
        for key in keys:
            start = stream.tell()
            stream.write(raw)
            yield key, _StorageInfo(file.name, start, len(raw))
