"""Reads the pickles of a checkpoint without running what they name: other classes than those of checkpoints are
refused."""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    *(("torch.distributed.checkpoint.planner", name) for name in (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath"),
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "slice"), ("collections", "OrderedDict"),
}  # fmt: skip
"""(module, name) of what torch and megatron-core write into the metadata of a checkpoint; and the dtypes of torch"""
_SUBCLASSES = {
    ("megatron.core.dist_checkpointing.strategies.torch", name): base
    for name, base in (("MCoreMetadata", Metadata), ("MCoreSavePlan", SavePlan))
}
"""What megatron-core 0.15 and older wrote instead of torch's classes: the same with one more field of plain values"""
_MAY_RUN = "which no checkpoint needs and which may run code"
_GLOBAL = re.compile(r"(?:GLOBAL|Unsupported class) (\S+)")
"""Pattern of the class that torch's own unpickler refuses, in its message"""
METADATA_NAME = ".metadata"
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if base := _SUBCLASSES.get((module, name)):
            return base
        if (module, name) not in _ALLOWED and not (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        ):
            raise pickle.UnpicklingError(f"it names {module}.{name}, {_MAY_RUN}")
        return super().find_class(module, name)


def load_metadata(stream: IO[bytes]) -> Metadata:
    """The metadata of a checkpoint. Raises UnpicklingError for a class that is none of a checkpoint's; names it."""
    metadata = _MetadataUnpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, not the metadata of a checkpoint")
    return metadata


def load_object(stream: Any) -> Any:
    """An object that torch saved: plain values, tensors, and the classes that megatron-core declares to be safe.

    Raises:
        pickle.UnpicklingError: it has others; names the first.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # Megatron-LM's arguments have classes that megatron-core tells torch to trust; its import takes seconds.
        import megatron.core  # noqa: F401

        stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(_refusal(error)) from error


@contextmanager
def without_code(directory: Path) -> Iterator[Metadata]:
    """Have torch refuse other classes also where megatron-core and torch itself load the objects of a checkpoint.

    Gives the checkpoint's metadata, which is large for a large model, so that it need not be read again.

    Raises:
        ValueError: the checkpoint has others; names the first. So does its metadata, which torch loads without a limit.
    """
    metadata = read_metadata(directory)
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield metadata
    except (CheckpointException, pickle.UnpicklingError) as error:
        if _GLOBAL.search(str(error)) is None:
            raise
        raise ValueError(f"{directory}: {_refusal(error)}") from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def read_metadata(path: Path) -> Metadata:
    """The metadata of a torch_dist folder.

    Raises:
        ValueError: no torch_dist folder, or its metadata cannot be read, or names classes that may run code.
    """
    if not (path / METADATA_NAME).is_file():
        raise ValueError(f"{path}: not a torch_dist checkpoint, it has no {METADATA_NAME}")
    try:
        with (path / METADATA_NAME).open("rb") as stream:
            return load_metadata(stream)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{path / METADATA_NAME}: cannot be read: {error}") from error


def _refusal(error: BaseException) -> str:
    """What torch says of a class, without its advice to run it."""
    found = _GLOBAL.search(str(error))
    return f"it names {found.group(1)}, {_MAY_RUN}" if found else str(error).splitlines()[0]
