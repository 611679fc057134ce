"""Reads and writes folders of safetensors files with an index. Names, shapes and dtypes come from the headers."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from slimrl.base.strict_json import json_object
from slimrl.checkpoints.checkpoint_reader import CheckpointReader
from slimrl.checkpoints.file_groups import group_by_bytes
from slimrl.checkpoints.safetensors_file import (
    TensorLocation,
    read_header,
    read_tensor,
    spec_bytes,
    write_safetensors_file,
)
from slimrl.data.model_weights import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_SHARD_BYTES = 5 * 1000**3
"""Tensor bytes per written file; a larger tensor gets a file of its own."""


class SafetensorsFolder(CheckpointReader):
    """Reads tensors as they are stored; files are opened when first read and closed by `close`. Not thread-safe.

    Raises:
        ValueError: the folder has no safetensors, its index names a missing file or tensor, or a file is not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, TensorSpec] = {}
        self._locations: dict[str, tuple[Path, TensorLocation]] = {}
        self._open: dict[Path, int] = {}
        index = _read_index(path)
        for file in _files(path, index):
            for name, location in read_header(file).items():
                if name in self._locations:
                    raise ValueError(f"{path}: {name} is in {self._locations[name][0].name} and in {file.name}")
                self._locations[name] = file, location
                self.specs[name] = location.spec
        found = {name: file.name for name, (file, _) in self._locations.items()}
        wrong = [name for name, file in (index or {}).items() if found.get(name) != file]
        if wrong:
            raise ValueError(
                f"{path / INDEX_NAME}: {len(wrong)} tensors are not in the file that it names, such as {wrong[0]}"
            )

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, on the CPU, in its own memory.

        Raises:
            ValueError: the file has become shorter since the folder was opened.
        """
        file, location = self._locations[name]
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
        return read_tensor(self._open[file], file, location, slices)

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Remove tensors from `specs`; they can still be read. `reasons`: name -> why."""
        self.left_out = {**self.left_out, **reasons}
        self.specs = {name: spec for name, spec in self.specs.items() if name not in reasons}

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def write_safetensors(
    folder: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors, in the order and with the shapes of `specs`, to files of at most `max_bytes`, and their index.

    Holds one tensor at a time.

    Raises:
        OSError: the disk is full, or writing failed.
    """
    files = plan_safetensors_files(specs, max_bytes)
    stream = iter(tensors)
    for name, group in files.items():
        write_safetensors_file(folder / name, group, stream)
    assert next(stream, None) is None, "more tensors than were declared"
    write_index(folder, files)


def plan_safetensors_files(specs: Sequence[TensorSpec], max_bytes: int) -> dict[str, list[TensorSpec]]:
    """File name -> its tensors, in the order of `specs`, at most `max_bytes` per file unless one tensor has more."""
    groups = group_by_bytes(specs, spec_bytes, max_bytes)
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def write_index(folder: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Write the index of files with these tensors; `total_size` is the tensors' bytes."""
    index = {
        "metadata": {"total_size": sum(spec_bytes(spec) for group in files.values() for spec in group)},
        "weight_map": {spec.name: name for name, group in files.items() for spec in group},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _files(path: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        files = [path / name for name in sorted(set(index.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{path / INDEX_NAME}: names files that are missing: {', '.join(missing)}; download them")
        if (path / SINGLE_NAME).exists() and path / SINGLE_NAME not in files:
            raise ValueError(f"{path}: {SINGLE_NAME} is there, but the index does not name it; remove one of the two")
        return files
    single = path / SINGLE_NAME
    if single.exists():
        return [single]
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        raise ValueError(f"{path}: {INDEX_NAME} is missing, which lists the tensors of {shards[0]} and others")
    raise ValueError(f"{path}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")


def _read_index(path: Path) -> dict[str, str] | None:
    """Tensor name -> file name; None without an index."""
    index = path / INDEX_NAME
    if not index.exists():
        return None
    try:
        weight_map = json_object(index)["weight_map"]
        strange = [name for name in weight_map.values() if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not an index of safetensors: {error!r}") from error
    if strange:
        raise ValueError(f"{index}: {strange[0]!r} is not the name of a file beside it")
    return weight_map
