"""Reads and writes a safetensors file; holds one tensor at a time.

The format: 8 bytes with the length of the header; a JSON header with each tensor's dtype, shape and offsets; the bytes
of the tensors without gaps.

The safetensors library does less: it writes only tensors that are all in memory, does not say where a tensor lies in
its file, and maps what it reads, so a file that becomes shorter, or a disk that fails, ends the process by a signal.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimrl.base.atomic import WRITE_BYTES, atomic_file
from slimrl.checkpoints.tensor_bytes import bytes_of, fill
from slimrl.data.model_weights import TensorSpec

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library; a larger length means another kind of file."""

BAND_BYTES = 4 * 1024**2
"""Number of bytes read at a time for a slice of columns."""

_ALIGNMENT = 8
"""Alignment of the start of the data in bytes."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorLocation:
    """The place of a tensor within a file."""

    spec: TensorSpec
    start: int
    """Offset of the tensor's first byte from the start of the file."""
    nbytes: int


def element_bytes(dtype: str) -> int:
    """Bytes per element of a dtype as torch prints it without the prefix."""
    return getattr(torch, dtype).itemsize


def spec_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * element_bytes(spec.dtype)


MAX_REASON = 200
"""Characters of a refusal that repeat what is in a file"""


def read_header(file: Path) -> dict[str, TensorLocation]:
    """The tensors of a file in the order of its header, whose offsets are checked against the file's size.

    Raises:
        ValueError: not a safetensors file, cut short, or a header that contradicts itself or the file's size.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > MAX_HEADER_BYTES:
                raise ValueError(f"{file}: not a safetensors file")
            if 8 + length > size:
                raise ValueError(f"{file}: not a safetensors file, or cut short within its header; download it again")
            raw = stream.read(length)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        locations = {name: _location(name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        reason = repr(error)
        raise ValueError(f"{file}: not a safetensors file: {reason[:MAX_REASON]}") from error
    _check_coverage(file, locations, 8 + length, size)
    return locations


def _location(name: str, entry: dict[str, Any], data_start: int) -> TensorLocation:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is {entry['dtype']}, which is not supported")
    shape = tuple(entry["shape"])
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{name} has the shape {list(shape)}")
    spec = TensorSpec(name=name, shape=shape, dtype=_DTYPES[entry["dtype"]])
    begin, end = entry["data_offsets"]
    if end - begin != spec_bytes(spec):
        raise ValueError(f"{name} takes {spec_bytes(spec)} bytes, its offsets {begin} to {end} are {end - begin}")
    return TensorLocation(spec=spec, start=data_start + begin, nbytes=end - begin)


def _check_coverage(file: Path, locations: dict[str, TensorLocation], data_start: int, size: int) -> None:
    """Raises ValueError unless every byte after the header belongs to one tensor."""
    end, last = data_start, "the header"
    for location in sorted(locations.values(), key=lambda location: (location.start, location.nbytes)):
        if location.start != end:
            kind = "overlaps" if location.start < end else "leaves a gap after"
            raise ValueError(f"{file}: broken header: {location.spec.name} {kind} {last}; download the file again")
        end, last = location.start + location.nbytes, location.spec.name
    if end > size:
        raise ValueError(f"{file}: cut short: {end - size} of {end} bytes are missing; download the file again")
    if end < size:
        raise ValueError(f"{file}: {size - end} bytes more than its header says; download the file again")


def read_tensor(descriptor: int, file: Path, location: TensorLocation, slices: tuple[slice, ...]) -> Tensor:
    """A slice of a tensor as a new tensor on the CPU; a slice of the first dimension reads no other bytes.

    Args:
        descriptor: of the open file.
        slices: one per dimension, with start and stop, without step.

    Raises:
        ValueError: the file has become shorter than its header says.
    """
    shape, dtype = location.spec.shape, getattr(torch, location.spec.dtype)
    if all((part.start, part.stop) == (0, size) for part, size in zip(slices[1:], shape[1:], strict=True)):
        rows = slices[0] if slices else slice(0, 1)
        row_bytes = location.nbytes // max(1, shape[0]) if shape else location.nbytes
        result = torch.empty((rows.stop - rows.start, *shape[1:]) if shape else (), dtype=dtype)
        fill(descriptor, file, bytes_of(result), location.start + rows.start * row_bytes)
        return result
    if not location.nbytes:
        return torch.empty(shape, dtype=dtype)[slices]
    return _read_bands(descriptor, file, location, slices)


def _read_bands(descriptor: int, file: Path, location: TensorLocation, slices: tuple[slice, ...]) -> Tensor:
    """Read a slice from bands of whole rows, of which the columns of the slice are kept."""
    shape, dtype, (rows, *columns) = location.spec.shape, getattr(torch, location.spec.dtype), slices
    row_bytes = location.nbytes // shape[0]
    height = max(1, BAND_BYTES // row_bytes)
    result = torch.empty([part.stop - part.start for part in slices], dtype=dtype)
    buffer = torch.empty((min(height, rows.stop - rows.start), *shape[1:]), dtype=dtype)
    for start in range(rows.start, rows.stop, height):
        stop = min(start + height, rows.stop)
        band = buffer[: stop - start]
        fill(descriptor, file, bytes_of(band), location.start + start * row_bytes)
        result[start - rows.start : stop - rows.start] = band[:, *columns]
    return result


Written = Callable[[int, TensorLocation], None]
"""Function that is called after each tensor with the file's descriptor, open for reading and writing, and the tensor's
location."""


def write_safetensors_file(
    file: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    written: Written | None = None,
) -> None:
    """Write one file under a temporary name, renamed when it is whole.

    Args:
        specs: the tensors, in the order of the header. Tensors with larger elements lie first in the file, as the
            safetensors library writes them, so that each starts at a multiple of its element's size.
        tensors: in the same order, on any device, whole or in consecutive blocks of rows; cast to their spec's dtype.
            Taken one by one, none after the last tensor of `specs`.

    Raises:
        OSError: the disk is full, or writing failed; nothing is left behind.
    """
    header, offsets = file_layout(specs)
    remaining = iter(tensors)
    with atomic_file(file, buffering=0) as stream:
        descriptor = stream.fileno()
        write_at(descriptor, memoryview(header), 0)
        for spec in specs:
            location = TensorLocation(spec=spec, start=offsets[spec.name], nbytes=spec_bytes(spec))
            _write_tensor(descriptor, location, remaining)
            if written is not None:
                written(descriptor, location)


def _write_tensor(descriptor: int, location: TensorLocation, blocks: Iterator[tuple[str, Tensor]]) -> None:
    """Write a tensor; takes as many blocks as make it up."""
    spec, done = location.spec, 0
    while True:
        name, block = next(blocks)
        assert name == spec.name, f"got {name} instead of {spec.name}"
        assert tuple(block.shape[1:]) == spec.shape[1:], f"{name}: {tuple(block.shape)}, declared {spec.shape}"
        plain = block.detach().to("cpu", getattr(torch, spec.dtype)).contiguous()
        write_at(descriptor, bytes_of(plain), location.start + done)
        done += plain.nbytes
        # Freed before the next is made.
        del block, plain
        if done >= location.nbytes:
            break
    assert done == location.nbytes, f"{name}: {done} bytes, declared {spec.shape}"


def file_layout(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header with its length in front, and the offset of each tensor in the file."""
    starts: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -element_bytes(spec.dtype)):
        assert spec.name not in starts, f"{spec.name} twice in one file"
        starts[spec.name], end = end, end + spec_bytes(spec)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for spec in specs:
        offsets = [starts[spec.name], starts[spec.name] + spec_bytes(spec)]
        header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    data_start = 8 + len(raw)
    return len(raw).to_bytes(8, "little") + raw, {name: data_start + start for name, start in starts.items()}


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + WRITE_BYTES], offset + done)
