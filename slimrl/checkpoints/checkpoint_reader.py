"""The interface of checkpoint readers: a model's tensors by Hugging Face name, whatever the format on disk."""

from pathlib import Path
from typing import Protocol, Self

from torch import Tensor

from slimrl.data.weights import TensorSpec


class CheckpointReader(Protocol):
    """Reads slices of a checkpoint's tensors. A context manager, which closes it at the end.

    Names and dtypes are those of the weights that a model computes with: the reader of a format with quantised weights
    or another layout undoes both.
    """

    path: Path
    """Folder of the checkpoint."""
    specs: dict[str, TensorSpec]
    """Every tensor by its Hugging Face name, with its whole shape; known without reading data."""

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
