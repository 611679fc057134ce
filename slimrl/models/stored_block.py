"""One block of a torch_dist file, read where it lies.

A block is what torch.save writes of a tensor: an uncompressed zip file whose `data.pkl` says how the tensor lies in the
record `data/N`. Of a tensor that fills such a record the bytes are read straight into its memory; torch itself loads
blocks of any other form.
"""

import pickle
import sys
from collections import OrderedDict
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from slimrl.models.tensor_bytes import read_into

_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
}
"""Of the storages in which torch keeps weights."""

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
"""What a pickle of another kind, or a damaged one, raises."""


def read_block(path: Path, place: Any) -> Tensor:
    """One stored block, on the CPU.

    Args:
        path: the folder.
        place: its entry in the metadata's `storage_data`.

    Raises:
        ValueError: the bytes there are no tensor.
    """
    file = path / place.relative_path
    with file.open("rb") as stream:
        window: Any = _create_file_view(stream, place.offset, place.length)
        try:
            layout = plain_layout(window)
            if layout is None or layout.start + layout.nbytes > place.length:
                window.seek(0)
                return torch.load(window, map_location="cpu", weights_only=True)
            tensor = torch.empty(layout.shape, dtype=layout.dtype)
        except (RuntimeError, *_BAD_PICKLE) as error:
            raise ValueError(f"{file}: corrupt at byte {place.offset}: {error}") from error
        read_into(stream.fileno(), file, tensor, place.offset + layout.start)
        return tensor


@dataclass(frozen=True, kw_only=True)
class PlainLayout:
    """A contiguous tensor and where its first byte lies in the block."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def plain_layout(window: Any) -> PlainLayout | None:
    """How the tensor in a block lies; None where it is anything but a contiguous tensor that has a record to itself.

    Args:
        window: a file of the block alone, at its start.

    Raises:
        RuntimeError: it is no zip file of torch's.
    """
    reader: Any = torch._C.PyTorchFileReader(window)
    if reader.has_record("byteorder") and reader.get_record("byteorder").decode() != sys.byteorder:
        return None
    try:
        form = _FormUnpickler(BytesIO(reader.get_record("data.pkl"))).load()
        plain = isinstance(form, _Form) and form.fills_its_record()
    except _BAD_PICKLE:
        # torch says what it is, or what is wrong with it.
        return None
    if not plain:
        return None
    return PlainLayout(
        shape=form.shape, dtype=form.record.dtype, start=reader.get_record_offset(f"data/{form.record.key}")
    )


@dataclass(frozen=True)
class _Record:
    """What a pickle of torch's says of a storage."""

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
        expected: list[int] = []
        size = 1
        for length in reversed(self.shape):
            expected.insert(0, size)
            size *= length
        return (
            self.first == 0 and self.record.numel == size and self.stride == tuple(expected) and not self.requires_grad
        )


class _FormUnpickler(pickle.Unpickler):
    """Loads the pickle of a tensor as its form; nothing else can be in it."""

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
