"""Checkpoint folders of the Hugging Face kind: safetensors files and their index, read by slices and written in order.

Shapes and dtypes are read from the files' headers (8 bytes of length, then JSON), without touching the data.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slimrl.data.protocols import TensorSpec

INDEX_NAME = "model.safetensors.index.json"

MAX_SHARD_BYTES = 5 * 1000**3
"""Tensor bytes per written file; a larger tensor gets a file of its own."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def element_bytes(dtype: str) -> int:
    """Bytes per element of a dtype as torch prints it without the prefix."""
    return getattr(torch, dtype).itemsize


def spec_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * element_bytes(spec.dtype)


class SafetensorsFolder:
    """The tensors of a folder by name; files are opened when first read and closed by `close`.

    Raises:
        ValueError: the folder has no safetensors, or its index names a file or tensor that is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, TensorSpec] = {}
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in _files(path):
            for name, entry in _header(file).items():
                if name in self._files:
                    raise ValueError(f"{path}: {name} is in {self._files[name].name} and in {file.name}")
                self._files[name] = file
                dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
                self.specs[name] = TensorSpec(name=name, shape=tuple(entry["shape"]), dtype=dtype)
        _check_index(path, self._files)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, on the CPU; only its bytes are read."""
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt").__enter__()
        handle = self._open[file]
        if all((part.start, part.stop) == (0, size) for part, size in zip(slices, self.specs[name].shape, strict=True)):
            return handle.get_tensor(name)
        return handle.get_slice(name)[slices]

    def close(self) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_safetensors(
    folder: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors, in the order and with the shapes of `specs`, to files of at most `max_bytes`, and their index.

    Holds the tensors of one file at a time.
    """
    groups = _group(specs, max_bytes)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    stream = iter(tensors)
    for group, file_name in zip(groups, names, strict=True):
        held: dict[str, Tensor] = {}
        for spec in group:
            name, tensor = next(stream)
            assert name == spec.name, f"{name} came where {spec.name} was due"
            assert tuple(tensor.shape) == spec.shape, f"{name}: {tuple(tensor.shape)}, declared {spec.shape}"
            held[name] = tensor.to("cpu", getattr(torch, spec.dtype), copy=True, memory_format=torch.contiguous_format)
        save_file(held, folder / file_name, metadata={"format": "pt"})
    assert next(stream, None) is None, "more tensors than were declared"
    index = {
        "metadata": {"total_size": sum(map(spec_bytes, specs))},
        "weight_map": {spec.name: file for group, file in zip(groups, names, strict=True) for spec in group},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    for file_name in names:
        # safetensors makes its files readable to their owner alone; they get the mode that other files here have.
        shutil.copymode(folder / INDEX_NAME, folder / file_name)


def _group(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = []
    filled = max_bytes
    for spec in specs:
        size = spec_bytes(spec)
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    return groups


def _files(path: Path) -> list[Path]:
    index = path / INDEX_NAME
    if index.exists():
        files = [path / name for name in sorted(set(_read_index(index).values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ValueError(f"{index}: names files that are not there: {', '.join(missing)}")
        return files
    single = path / "model.safetensors"
    if not single.exists():
        raise ValueError(f"{path}: neither {INDEX_NAME} nor model.safetensors is there")
    return [single]


def _read_index(index: Path) -> dict[str, str]:
    try:
        return json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not an index of safetensors: {error!r}") from error


def _check_index(path: Path, found: dict[str, Path]) -> None:
    index = path / INDEX_NAME
    if not index.exists():
        return
    wrong = [name for name, file in _read_index(index).items() if name not in found or found[name].name != file]
    if wrong:
        raise ValueError(f"{index}: {len(wrong)} tensors are not in the file it names, the first is {wrong[0]}")


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file}: not a safetensors file, or cut short")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{file}: not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header
