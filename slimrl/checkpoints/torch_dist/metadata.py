"""Writes the metadata of a torch_dist checkpoint after its files, and reads what a checkpoint says about its content.

The metadata has the file and offset of each chunk. What is written equals a checkpoint that megatron-core saves; it is
done without Megatron, whose import takes seconds.
"""

import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
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

from slimrl.base.strict_json import json_object
from slimrl.checkpoints.digests import Span
from slimrl.checkpoints.torch_dist.chunks import SHARDING, Chunk, ShardSchema
from slimrl.checkpoints.torch_dist.safe_pickle import METADATA_NAME, load_object

FORMAT_VERSION = "1.0.0"
"""Version of torch's distributed checkpoint format."""
COMMON_KEY = "common_state/shard_0_1"
"""Key of the state that is not sharded: here only the content metadata."""
COMMON_NAME = "common.pt"
"""The file that has this state instead in checkpoints of older versions of megatron-core."""
CONFIG_NAME = "metadata.json"
CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
"""Contents of the file CONFIG_NAME."""

_DAMAGED = (pickle.UnpicklingError, AttributeError, EOFError, ImportError, KeyError, TypeError, ValueError)
"""What reading JSON or a pickle raises for another kind of file or a damaged one."""


def content_metadata(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """A checkpoint's content metadata, for example how the keys of its layers and experts are made.

    Raises:
        ValueError: not a checkpoint of megatron-core, or the metadata is missing, damaged or may run code.
    """
    try:
        backend = json_object(folder / CONFIG_NAME)["sharded_backend"]
        if backend != CONFIG["sharded_backend"]:
            raise ValueError(f"{CONFIG_NAME}: sharded_backend is {backend!r}")
        return _common_state(folder, metadata).get("content_metadata") or {}
    except (OSError, RuntimeError, *_DAMAGED) as error:
        raise ValueError(f"{folder}: not a checkpoint of megatron-core: {error}") from error


def _common_state(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """The state that is not sharded, as megatron-core loads it."""
    if (folder / COMMON_NAME).exists():
        with (folder / COMMON_NAME).open("rb") as stream:
            return load_object(stream)
    place = metadata.storage_data[MetadataIndex(COMMON_KEY)]
    with (folder / place.relative_path).open("rb") as stream:
        stream.seek(place.offset)
        (common,) = load_object(BytesIO(stream.read(place.length)))
    return common


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
    (folder / CONFIG_NAME).write_text(json.dumps(CONFIG))


def _write_objects(file: Path, contents: Mapping[str, Any]) -> Iterator[tuple[str, _StorageInfo]]:
    """Write each object as megatron-core stores one of a single rank: in a list, pickled by torch."""
    with file.open("wb") as stream:
        for key, value in contents.items():
            start = stream.tell()
            torch.save([value], stream)
            yield key, _StorageInfo(file.name, start, stream.tell() - start)
