"""Checkpoint folders of the Hugging Face kind: safetensors files and their index, read by slices and written in order.

Names, shapes and dtypes are read from the files' headers, without touching the data.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.safetensors_file import Place, read_header, read_tensor, write_safetensors_file
from slimrl.models.safetensors_file import element_bytes as element_bytes
from slimrl.models.safetensors_file import spec_bytes as spec_bytes

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_SHARD_BYTES = 5 * 1000**3
"""Tensor bytes per written file; a larger tensor gets a file of its own."""


class SafetensorsFolder:
    """The tensors of a folder by name; files are opened when first read and closed by `close`.

    Implements CheckpointReader. Not to be shared between threads.

    Raises:
        ValueError: the folder has no safetensors, its index names a file or tensor that is not there, or a file is not
            whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, TensorSpec] = {}
        self._places: dict[str, tuple[Path, Place]] = {}
        self._open: dict[Path, int] = {}
        for file in _files(path):
            for name, place in read_header(file).items():
                if name in self._places:
                    raise ValueError(f"{path}: {name} is in {self._places[name][0].name} and in {file.name}")
                self._places[name] = file, place
                self.specs[name] = place.spec
        _check_index(path, {name: file.name for name, (file, _) in self._places.items()})

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor."""
        return self._places[name][0].name

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, on the CPU, in memory of its own.

        Raises:
            ValueError: the file has become shorter since the folder was opened.
        """
        file, place = self._places[name]
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
        return read_tensor(self._open[file], file, place, slices)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_safetensors(
    folder: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors, in the order and with the shapes of `specs`, to files of at most `max_bytes`, and their index.

    Holds one tensor at a time.

    Raises:
        OSError: the disk is full, or writing failed.
    """
    files = plan_files(specs, max_bytes)
    stream = iter(tensors)
    for name, group in files.items():
        write_safetensors_file(folder / name, group, stream)
    assert next(stream, None) is None, "more tensors than were declared"
    write_index(folder, files)


def plan_files(specs: Sequence[TensorSpec], max_bytes: int = MAX_SHARD_BYTES) -> dict[str, list[TensorSpec]]:
    """File name -> the tensors in it, in the order of `specs`, in files of at most `max_bytes` where tensors fit."""
    groups: list[list[TensorSpec]] = []
    filled = max_bytes
    for spec in specs:
        size = spec_bytes(spec)
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def write_index(folder: Path, files: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Write the index of files that hold these tensors; `total_size` is the tensors' bytes."""
    index = {
        "metadata": {"total_size": sum(spec_bytes(spec) for group in files.values() for spec in group)},
        "weight_map": {spec.name: name for name, group in files.items() for spec in group},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _files(path: Path) -> list[Path]:
    index = path / INDEX_NAME
    if index.exists():
        files = [path / name for name in sorted(set(_read_index(index).values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ValueError(f"{index}: names files that are not there: {', '.join(missing)}; fetch them")
        if (path / SINGLE_NAME).exists() and path / SINGLE_NAME not in files:
            raise ValueError(f"{path}: {SINGLE_NAME} lies beside an index that does not name it; remove one of the two")
        return files
    single = path / SINGLE_NAME
    if single.exists():
        return [single]
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        raise ValueError(f"{path}: {INDEX_NAME} is missing, which tells the tensors of {shards[0]} and others")
    raise ValueError(f"{path}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        strange = [name for name in weight_map.values() if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: not an index of safetensors: {error!r}") from error
    if strange:
        raise ValueError(f"{index}: {strange[0]!r} is not the name of a file beside it")
    return weight_map


def _check_index(path: Path, found: dict[str, str]) -> None:
    """`found`: tensor name -> name of the file that has it."""
    index = path / INDEX_NAME
    if not index.exists():
        return
    wrong = [name for name, file in _read_index(index).items() if found.get(name) != file]
    if wrong:
        raise ValueError(f"{index}: {len(wrong)} tensors are not in the file it names, the first is {wrong[0]}")
