"""What reads a checkpoint: the tensors of a model by their Hugging Face names, whatever the format on disk."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from slimrl.data.protocols import TensorSpec


class CheckpointReader(Protocol):
    """The tensors of a checkpoint by name, read by slices. A context manager, which closes it at the end.

    Names and dtypes are those of the weights that a model computes with: a format that stores them quantised or in
    another layout is undone by its reader.
    """

    @property
    def path(self) -> Path:
        """Folder of the checkpoint."""
        ...

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every tensor by its Hugging Face name, with its whole shape; known without reading data."""
        ...

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, on the CPU, in the dtype of its spec.

        Args:
            slices: one per dimension, with start and stop within the shape, without step.

        Raises:
            ValueError: the file does not hold what its header says.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> "CheckpointReader": ...

    def __exit__(self, *_: object) -> None: ...


def read_whole(reader: CheckpointReader, name: str) -> Tensor:
    """A tensor, all of it, on the CPU and in the dtype of its spec."""
    return reader.read(name, tuple(slice(0, size) for size in reader.specs[name].shape))
