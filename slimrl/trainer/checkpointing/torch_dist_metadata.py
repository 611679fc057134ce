"""Writes the metadata of a torch_dist checkpoint after its files: the file and offset of each chunk.

The result equals a checkpoint that megatron-core saves.
"""

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException
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

from slimrl.checkpoints.digests import Span
from slimrl.checkpoints.torch_dist.chunks import SHARDING, Chunk, ShardSchema
from slimrl.checkpoints.torch_dist.reader import METADATA_NAME

FORMAT_VERSION = "1.0.0"
"""Version of torch's distributed checkpoint format."""
COMMON_KEY = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""Key of the state that is not sharded: here only the content metadata."""


def content_metadata(folder: Path) -> dict[str, Any]:
    """A checkpoint's content metadata, for example how the keys of its layers and experts are made.

    Raises:
        ValueError: not a checkpoint of megatron-core, or the metadata is missing or damaged.
    """
    try:
        with warnings.catch_warnings():
            # One process reads here, on purpose.
            warnings.filterwarnings("ignore", "torch.distributed is .*uninitialized", UserWarning)
            return dist_checkpointing.load_content_metadata(str(folder)) or {}
    except (
        CheckpointException,
        CheckpointingException,
        OSError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(f"{folder}: not a checkpoint of megatron-core: {error}") from error


def write_metadata(
    folder: Path, schema: ShardSchema, dtypes: Sequence[torch.dtype], files: Mapping[str, Sequence[tuple[Chunk, Span]]]
) -> None:
    """Complete a folder whose other files are all written, so that megatron-core can load it.

    Args:
        files: the chunks of each file and their spans in it, by name.
    """
    missing = {(chunk.key, chunk.offset) for chunk in schema.chunks}
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, written in files.items():
        for chunk, span in written:
            missing.remove((chunk.key, chunk.offset))
            if chunk.key not in stored:
                properties = TensorProperties(dtype=dtypes[chunk.entry])
                stored[chunk.key] = TensorStorageMetadata(properties, torch.Size(chunk.global_shape), [])
            block = ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.stored_shape))
            stored[chunk.key].chunks.append(block)
            places[MetadataIndex(chunk.key, chunk.offset)] = _StorageInfo(name, span.start, span.length)
    assert not missing, f"{len(missing)} chunks were not written"
    objects = f"__0_{len(files)}.distcp"
    contents = {**dict.fromkeys(schema.objects), COMMON_KEY: {"content_metadata": SHARDING}}
    for key, place in _write_objects(folder / objects, contents):
        stored[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = place
    metadata = Metadata(
        state_dict_metadata=stored, storage_data=places, storage_meta=StorageMeta(), version=FORMAT_VERSION
    )
    with (folder / METADATA_NAME).open("wb") as stream:
        pickle.dump(metadata, stream)
        stream.flush()
        os.fsync(stream.fileno())
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def _write_objects(file: Path, contents: Mapping[str, Any]) -> Iterator[tuple[str, _StorageInfo]]:
    """Write each object as megatron-core stores one of a single rank: in a list, pickled by torch."""
    with file.open("wb") as stream:
        for key, value in contents.items():
            start = stream.tell()
            torch.save([value], stream)
            yield key, _StorageInfo(file.name, start, stream.tell() - start)
