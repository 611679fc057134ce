"""The interface of checkpoint readers: a model's tensors by Hugging Face name, whatever the format on disk."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, Self

from torch import Tensor

from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.data.model_weights import TensorSpec

BLOCK_BYTES = 16 * 1024**2
"""Size of a block of rows: of a large tensor one is read while the one before is written, and their memory is used
again."""


class CheckpointReader(Protocol):
    """Reads slices of a checkpoint's tensors. A context manager, which closes it at the end.

    Names and dtypes are those of the weights that a model computes with: the reader of a format with quantised weights
    or another layout undoes both.
    """

    path: Path
    """Folder of the checkpoint."""
    specs: dict[str, TensorSpec]
    """Specs of all tensors by their Hugging Face names, with their whole shapes; known without reading data."""
    left_out: Mapping[str, str] = MappingProxyType({})
    """Names of stored tensors that are not among `specs`, because no model reads them -> why."""

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, on the CPU, in the dtype of its spec.

        Args:
            slices: one per dimension, with start and stop within the shape, without step.

        Raises:
            ValueError: the file does not hold what its header says.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_whole(reader: CheckpointReader, name: str) -> Tensor:
    """A whole tensor, on the CPU, in the dtype of its spec."""
    return reader.read(name, tuple(slice(0, size) for size in reader.specs[name].shape))


def read_blocks(reader: CheckpointReader, name: str, slices: tuple[slice, ...]) -> Iterator[Tensor]:
    """A slice of a tensor in consecutive blocks of rows, at least one."""
    if not slices:
        yield reader.read(name, slices)
        return
    for rows in block_rows(reader, name, slices):
        yield reader.read(name, (rows, *slices[1:]))


def block_rows(reader: CheckpointReader, name: str, slices: tuple[slice, ...]) -> Iterator[slice]:
    """The rows of each block of a slice with at least one dimension."""
    rows, *rest = slices
    row_bytes = math.prod(part.stop - part.start for part in rest) * element_bytes(reader.specs[name].dtype)
    height = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(rows.start, max(rows.stop, rows.start + 1), height):
        yield slice(start, min(start + height, rows.stop))
