"""Reads one chunk of a torch_dist file.

A chunk is what torch.save writes of a tensor: an uncompressed zip file whose `data.pkl` describes the tensor's layout
in the record `data/N`. If the tensor fills the record, the bytes are read straight into its memory; torch.load reads
any other chunk.
"""

import math
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from slimrl.checkpoints.tensor_bytes import bytes_of, fill

_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
}
"""Dtypes of weights by the names of torch's storage classes."""

_BAD_PICKLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)
"""What unpickling raises for another kind of pickle or a damaged one."""


def read_chunk(path: Path, place: Any) -> Tensor:
    """A stored chunk, on the CPU.

    Args:
        path: the folder.
        place: the chunk's entry in the metadata's `storage_data`.

    Raises:
        ValueError: the bytes are no tensor.
    """
    file = path / place.relative_path
    with file.open("rb") as stream:
        window: Any = _create_file_view(stream, place.offset, place.length)
        with _named(file, place):
            found = _plain_within(window, place.length)
            if found is None:
                window.seek(0)
                return torch.load(window, map_location="cpu", weights_only=True)
        form, start = found
        tensor = torch.empty(form.shape, dtype=form.record.dtype)
        fill(stream.fileno(), file, bytes_of(tensor), place.offset + start)
        return tensor


def read_rows(path: Path, place: Any, shape: tuple[int, ...], rows: slice) -> Tensor | None:
    """Rows of a stored chunk of this shape; None if its bytes cannot be read alone, or it has another shape.

    Args:
        path: the folder.
        place: the chunk's entry in the metadata's `storage_data`.

    Raises:
        ValueError: the bytes are no tensor.
    """
    file = path / place.relative_path
    with file.open("rb") as stream:
        with _named(file, place):
            found = _plain_within(_create_file_view(stream, place.offset, place.length), place.length)
        if found is None or found[0].shape != shape:
            return None
        form, start = found
        tensor = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=form.record.dtype)
        row_bytes = math.prod(shape[1:]) * form.record.dtype.itemsize
        fill(stream.fileno(), file, bytes_of(tensor), place.offset + start + rows.start * row_bytes)
        return tensor


@contextmanager
def _named(file: Path, place: Any) -> Iterator[None]:
    """Errors of reading a chunk become a ValueError with its place."""
    try:
        yield
    except (RuntimeError, *_BAD_PICKLE) as error:
        raise ValueError(f"{file}: corrupt at byte {place.offset}: {error}") from error


def _plain_within(window: Any, length: int) -> "tuple[_Form, int] | None":
    """`plain_layout` of a chunk whose bytes are all within its `length`."""
    form, start = plain_layout(window) or (None, 0)
    if form is None or start + form.record.numel * form.record.dtype.itemsize > length:
        return None
    return form, start


def plain_layout(window: Any) -> "tuple[_Form, int] | None":
    """The tensor in a chunk and the position of its first byte; None for any but a contiguous one with its own record.

    Args:
        window: a file of the chunk alone, at its start.

    Raises:
        RuntimeError: no zip file as torch writes them.
    """
    reader: Any = torch._C.PyTorchFileReader(window)
    if reader.has_record("byteorder") and reader.get_record("byteorder").decode() != sys.byteorder:
        return None
    try:
        form = _FormUnpickler(BytesIO(reader.get_record("data.pkl"))).load()
        plain = isinstance(form, _Form) and form.fills_its_record()
    except _BAD_PICKLE:
        # torch.load reads it, or says what is wrong.
        return None
    if not plain:
        return None
    return form, reader.get_record_offset(f"data/{form.record.key}")


@dataclass(frozen=True)
class _Record:
    """A storage, as torch pickles it."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True)
class _Form:
    """The arguments with which torch rebuilds a tensor."""

    record: _Record
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    hooks: object

    def fills_its_record(self) -> bool:
        contiguous = torch.empty(self.shape, device="meta")
        return (
            self.first == 0
            and self.record.numel == contiguous.numel()
            and self.stride == contiguous.stride()
            and not self.requires_grad
        )


class _FormUnpickler(pickle.Unpickler):
    """Loads the pickle of a tensor as a _Form and refuses anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Form
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, saved: Any) -> _Record:
        kind, dtype, key, _, numel = saved
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{kind} of {dtype}")
        return _Record(dtype, key, numel)
