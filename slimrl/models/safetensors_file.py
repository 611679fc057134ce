"""One safetensors file: its header read and checked, its tensors read by slices, a new one written tensor by tensor.

The format: 8 bytes of length, a header in JSON that gives each tensor's dtype, shape and place, then the bytes of the
tensors without gaps. Neither reading nor writing holds more than the tensor at hand.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.tensor_bytes import bytes_of, read_into
from slimrl.models.whole_file import WRITE_BYTES, whole_file

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library takes; a length beyond it is that of another kind of file."""

BAND_BYTES = 4 * 1024**2
"""Read at a time of a tensor of whose rows only a part is wanted."""

_ALIGNMENT = 8
"""The data starts at a multiple of it."""

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
class Place:
    """A tensor within a file."""

    spec: TensorSpec
    start: int
    """Its first byte, counted from the start of the file."""
    nbytes: int


def element_bytes(dtype: str) -> int:
    """Bytes per element of a dtype as torch prints it without the prefix."""
    return getattr(torch, dtype).itemsize


def spec_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * element_bytes(spec.dtype)


def read_header(file: Path) -> dict[str, Place]:
    """The tensors of a file in the order of its header; reads no tensor, and checks that the file has all their bytes.

    Raises:
        ValueError: not a safetensors file, cut short, or a header that contradicts itself or the file's size.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            raise ValueError(f"{file}: not a safetensors file")
        if 8 + length > size:
            raise ValueError(f"{file}: not a safetensors file, or cut short within its header; fetch it again")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        places = {name: _place(name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a safetensors file: {error!r}") from error
    _check_places(file, places, 8 + length, size)
    return places


def _place(name: str, entry: dict[str, Any], data_start: int) -> Place:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is {entry['dtype']}, which is not supported")
    shape = tuple(entry["shape"])
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{name} has the shape {list(shape)}")
    spec = TensorSpec(name=name, shape=shape, dtype=_DTYPES[entry["dtype"]])
    begin, end = entry["data_offsets"]
    if end - begin != spec_bytes(spec):
        raise ValueError(f"{name} takes {spec_bytes(spec)} bytes, its offsets {begin} to {end} are {end - begin}")
    return Place(spec=spec, start=data_start + begin, nbytes=end - begin)


def _check_places(file: Path, places: dict[str, Place], data_start: int, size: int) -> None:
    """Every byte behind the header belongs to one tensor."""
    end, last = data_start, "the header"
    for place in sorted(places.values(), key=lambda place: (place.start, place.nbytes)):
        if place.start != end:
            kind = "overlaps" if place.start < end else "leaves a gap behind"
            raise ValueError(f"{file}: broken header: {place.spec.name} {kind} {last}; fetch the file again")
        end, last = place.start + place.nbytes, place.spec.name
    if end > size:
        raise ValueError(f"{file}: cut short: {end - size} of {end} bytes are missing; fetch the file again")
    if end < size:
        raise ValueError(f"{file}: {size - end} bytes more than its header gives; fetch the file again")


def read_tensor(descriptor: int, file: Path, place: Place, slices: tuple[slice, ...]) -> Tensor:
    """A slice of a tensor as a new tensor on the CPU; of a slice along the first dimension only its bytes are read.

    Args:
        descriptor: of the open file.
        slices: one per dimension, with start and stop, without step.

    Raises:
        ValueError: the file has become shorter than its header says.
    """
    shape, dtype = place.spec.shape, getattr(torch, place.spec.dtype)
    if all((part.start, part.stop) == (0, size) for part, size in zip(slices[1:], shape[1:], strict=True)):
        rows = slices[0] if slices else slice(0, 1)
        row_bytes = place.nbytes // max(1, shape[0]) if shape else place.nbytes
        result = torch.empty((rows.stop - rows.start, *shape[1:]) if shape else (), dtype=dtype)
        read_into(descriptor, file, result, place.start + rows.start * row_bytes)
        return result
    if not place.nbytes:
        return torch.empty(shape, dtype=dtype)[slices]
    return _read_bands(descriptor, file, place, slices)


def _read_bands(descriptor: int, file: Path, place: Place, slices: tuple[slice, ...]) -> Tensor:
    """Whole rows, a band of them at a time, and of each band the part that is asked for."""
    shape, dtype, (rows, *columns) = place.spec.shape, getattr(torch, place.spec.dtype), slices
    row_bytes = place.nbytes // shape[0]
    height = max(1, BAND_BYTES // row_bytes)
    result = torch.empty([part.stop - part.start for part in slices], dtype=dtype)
    buffer = torch.empty((min(height, rows.stop - rows.start), *shape[1:]), dtype=dtype)
    for start in range(rows.start, rows.stop, height):
        stop = min(start + height, rows.stop)
        band = buffer[: stop - start]
        read_into(descriptor, file, band, place.start + start * row_bytes)
        result[start - rows.start : stop - rows.start] = band[:, *columns]
    return result


Written = Callable[[int, Place], None]
"""Told where a tensor lies that is in the file, with the file's descriptor, open for reading and writing."""


def write_safetensors_file(
    file: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    written: Written | None = None,
) -> None:
    """Write one file under a temporary name beside its place and rename it when it is whole.

    Args:
        specs: what the file holds, in the order of its header. The data of a tensor lies behind that of those with
            larger elements, as the safetensors library lays them out, so that each starts at a multiple of its
            element's size.
        tensors: the same in the same order, on any device; cast to their spec's dtype. Taken one by one, and no more of
            them than `specs` has.

    Raises:
        OSError: the disk is full, or writing failed; nothing is left behind then.
    """
    with whole_file(file, buffering=0) as stream:
        _write(stream.fileno(), specs, iter(tensors), written)


def _write(
    descriptor: int, specs: Sequence[TensorSpec], tensors: Iterator[tuple[str, Tensor]], written: Written | None
) -> None:
    header, offsets = file_layout(specs)
    write_at(descriptor, memoryview(header), 0)
    for spec in specs:
        name, tensor = next(tensors)
        assert name == spec.name, f"{name} came where {spec.name} was due"
        assert tuple(tensor.shape) == spec.shape, f"{name}: {tuple(tensor.shape)}, declared {spec.shape}"
        plain = tensor.detach().to("cpu", getattr(torch, spec.dtype)).contiguous()
        write_at(descriptor, bytes_of(plain), offsets[spec.name])
        # Gone before the next is made.
        del tensor, plain
        if written is not None:
            written(descriptor, Place(spec=spec, start=offsets[spec.name], nbytes=spec_bytes(spec)))


def file_layout(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header with its length in front, and where in the file each tensor starts."""
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
