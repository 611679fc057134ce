"""Reads one chunk of a torch_dist file, or some of its rows.

A chunk is what torch.save writes of a tensor. torch.load reads it whole, straight into the tensor's memory. For rows,
torch.load to the meta device says where the elements are, without reading them, and only the rows' bytes are read.
"""

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

# torch offers nothing public that reads a part of a file without holding it.
from torch.distributed.checkpoint.utils import _create_file_view

from slimrl.checkpoints.tensor_bytes import bytes_of, fill

_NO_TENSOR = (
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What torch.load raises for other bytes or damaged ones."""


def read_chunk(path: Path, place: Any) -> Tensor:
    """A stored chunk, on the CPU.

    Args:
        path: the folder.
        place: the chunk's entry in the metadata's `storage_data`.

    Raises:
        ValueError: the bytes are no tensor.
    """
    with _opened(path, place) as (_, window):
        try:
            tensor = torch.load(window, map_location="cpu", weights_only=True)
        except _NO_TENSOR as error:
            raise ValueError(f"{path / place.relative_path}: corrupt at byte {place.offset}: {error}") from error
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path / place.relative_path}: corrupt at byte {place.offset}: a {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        where = f"{path / place.relative_path}: at byte {place.offset}"
        raise ValueError(f"{where} is a tensor of device {tensor.device}, without elements")
    return tensor


def read_rows(path: Path, place: Any, shape: tuple[int, ...], rows: slice) -> Tensor | None:
    """Rows of a stored chunk of this shape; None if `read_chunk` must read it or say what is wrong with it.

    Args:
        path: the folder.
        place: the chunk's entry in the metadata's `storage_data`.

    Raises:
        ValueError: the file has become shorter.
    """
    form, storage_start = None, None
    with _opened(path, place) as (stream, window):
        with suppress(*_NO_TENSOR):
            form = torch.load(window, map_location="meta", weights_only=True)
            storage_start = _storage_start(form, window)
        if storage_start is None or not isinstance(form, Tensor):
            return None
        if form.shape != shape or not form.is_contiguous():
            return None
        start = storage_start + int(form.storage_offset()) * form.itemsize
        if start + form.nbytes > place.length:
            return None
        tensor = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=form.dtype)
        row_bytes = math.prod(shape[1:]) * form.itemsize
        file = path / place.relative_path
        fill(stream.fileno(), file, bytes_of(tensor), place.offset + start + rows.start * row_bytes)
        return tensor


def _storage_start(form: Tensor, window: Any) -> int | None:
    """Position of a tensor's storage in its chunk; None unless a record of the zip file is as long as the storage.

    The format before zip files has no records, and a tensor that was saved on the meta device has no bytes.
    """
    storage = form.untyped_storage()
    start = storage._checkpoint_offset
    if start is None:
        return None
    window.seek(0)
    # torch.load to the meta device does not compare the lengths, unlike torch.load to the CPU.
    reader: Any = torch._C.PyTorchFileReader(window)
    sizes = {reader.get_record_offset(name): reader.get_record_size(name) for name in reader.get_all_records()}
    return start if sizes[start] == storage.nbytes() else None


@contextmanager
def _opened(path: Path, place: Any) -> Iterator[tuple[BinaryIO, Any]]:
    """The file of a chunk, and a file of the chunk alone."""
    with (path / place.relative_path).open("rb") as stream:
        yield stream, _create_file_view(stream, place.offset, place.length)
