"""manifest.json: the contents of a version's folder, and the version that it builds on.

docs/resync.md#format-of-versions-on-a-disk has the format.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimrl.base.strict_json import json_object
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.config.schema.resync import DeltaEncoding
from slimrl.data.model_weights import TensorSpec

MANIFEST_NAME = "manifest.json"

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class VersionRef:
    """The identity of one writing of a version: a version that is written again has the same number and another id."""

    version: int
    id: str

    def __str__(self) -> str:
        return f"version {self.version} ({self.id})"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What changed in a block of a tensor: a zstd frame in a file (codec.py)."""

    file: str
    offset: int
    """Byte offset of the frame in its file"""
    nbytes: int
    start: int
    stop: int
    """End of the block: the frame is of the tensor's bytes from `start` to this, which is excluded"""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    spec: TensorSpec
    xxh3: str
    """16 hexadecimal digits: XXH3-64 of the tensor's bytes in this version."""
    frames: tuple[Frame, ...] = ()
    """Frames of the tensor in a delta, in ascending order; none for a tensor that did not change"""

    @property
    def nbytes(self) -> int:
        return spec_bytes(self.spec)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    ref: VersionRef
    base: VersionRef | None
    """The version that a delta applies to; None for a whole version, whose folder is a Hugging Face checkpoint."""
    encoding: DeltaEncoding | None
    """Encoding of a delta's frames; None for a whole version."""
    files: Mapping[str, int]
    """Size of each file of the version but the manifest, in bytes."""
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises OSError: the disk is full, or writing failed."""
    files = list(manifest.files)
    numbers = {name: number for number, name in enumerate(files)}
    value = {
        "format": _FORMAT,
        "version": manifest.ref.version,
        "id": manifest.ref.id,
        "base": manifest.base and {"version": manifest.base.version, "id": manifest.base.id},
        "encoding": manifest.encoding and manifest.encoding.value,
        "files": dict(manifest.files),
        "tensors": {
            name: {
                "shape": list(tensor.spec.shape),
                "dtype": tensor.spec.dtype,
                "xxh3": tensor.xxh3,
                "blocks": [[numbers[b.file], b.offset, b.nbytes, b.start, b.stop] for b in tensor.frames],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    with (folder / MANIFEST_NAME).open("w") as stream:
        json.dump(value, stream, separators=(",", ":"))
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError: there is none, or it is not a version's manifest."""
    file = folder / MANIFEST_NAME
    try:
        value = json_object(file)
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']} is not supported")
        files = list(value["files"])
        if strange := [name for name in files if Path(name).name != name]:
            raise ValueError(f"{strange[0]!r} is not the name of a file in the same folder")
        base = value["base"]
        return Manifest(
            ref=VersionRef(version=value["version"], id=value["id"]),
            base=VersionRef(version=base["version"], id=base["id"]) if base else None,
            encoding=DeltaEncoding(value["encoding"]) if value["encoding"] else None,
            files=value["files"],
            tensors={name: _tensor(name, entry, files) for name, entry in value["tensors"].items()},
        )
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: no {MANIFEST_NAME} there") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{file}: not a version's manifest: {error!r}") from error


def _tensor(name: str, entry: dict[str, Any], files: list[str]) -> StoredTensor:
    frames = tuple(
        Frame(file=files[number], offset=offset, nbytes=nbytes, start=start, stop=stop)
        for number, offset, nbytes, start, stop in entry["blocks"]
    )
    spec = TensorSpec(name=name, shape=tuple(entry["shape"]), dtype=entry["dtype"])
    return StoredTensor(spec=spec, xxh3=entry["xxh3"], frames=frames)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises ValueError naming the first file that is missing or has another size than it was written with."""
    for name, nbytes in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError as error:
            raise ValueError(f"{manifest.ref}: {folder / name} is missing") from error
        if found != nbytes:
            kind = "cut short" if found < nbytes else "too long"
            raise ValueError(f"{manifest.ref}: {folder / name} is {kind}: {found} bytes of {nbytes}")
