"""The text model of a wrapped checkpoint, under the names of its family, one tensor for each matrix of an expert.

`whole_specs` and `whole_tensors` make a checkpoint in the form of a folder out of tensors of its text model. For
folders of other models they change nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_blocks
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.data.model_weights import TensorSpec
from slimrl.models.expert_stacks import Place
from slimrl.models.wrapped_layout import WrappedLayout


class WrappedFolder(CheckpointReader):
    """Reads as SafetensorsFolder does. Raises ValueError: see WrappedLayout."""

    def __init__(self, folder: SafetensorsFolder, hf_config: Mapping[str, Any]) -> None:
        self.path, self.stored = folder.path, folder
        try:
            self.layout = WrappedLayout(hf_config, folder.specs)
        except ValueError as error:
            raise ValueError(f"{folder.path}: {error}") from error
        self.specs = dict(self.layout.specs)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A slice of a tensor, on the CPU, in its own memory.

        Raises:
            ValueError: the file has become shorter since the folder was opened.
        """
        place = self.layout.places[name]
        part = self.stored.read(place.stored, place.region(slices))
        return part if place.expert is None else place.turned(part[0]).contiguous()

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Remove tensors from `specs`; they can still be read. `reasons`: name -> why."""
        self.left_out = {**self.left_out, **reasons}
        self.specs = {name: spec for name, spec in self.specs.items() if name not in reasons}

    def close(self) -> None:
        self.stored.close()


def add_carried(reader: CheckpointReader, folder: CheckpointReader) -> None:
    """Have a reader of a wrapped folder, the folder itself or one on top of it, give the tensors of other modalities
    too, by their names there."""
    if isinstance(folder, WrappedFolder):
        folder.layout.places |= {name: Place(stored=name) for name in folder.layout.carried}
        reader.specs |= folder.layout.carried


def with_experts_apart(folder: CheckpointReader) -> CheckpointReader:
    """The folder as the form of a checkpoint that has one tensor for each matrix of an expert; not to read from."""
    if not isinstance(folder, WrappedFolder):
        return folder
    form = copy(folder)
    form.layout = folder.layout.with_experts_apart()
    return form


def whole_specs(folder: CheckpointReader | None, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """What a checkpoint in the form of `folder` holds, in order, whose model has these tensors."""
    if not isinstance(folder, WrappedFolder):
        return list(specs)
    return [*folder.layout.stored_specs(specs), *folder.layout.carried.values()]


def whole_tensors(
    folder: CheckpointReader | None,
    group: Sequence[TensorSpec],
    specs: Sequence[TensorSpec],
    produce: Callable[[Sequence[TensorSpec]], Iterable[tuple[str, Tensor]]],
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file or of a whole checkpoint, whole or in consecutive blocks of rows.

    Args:
        group: consecutive specs of `whole_specs`.
        specs: the arguments of `whole_specs`.
        produce: makes tensors of the model, in the order of its argument or of `specs`.
    """
    if not isinstance(folder, WrappedFolder):
        yield from produce(group)
        return
    layout = folder.layout
    pieces = layout.pieces([spec for spec in group if spec.name not in layout.carried], specs)
    yield from layout.stored_tensors(pieces, produce(pieces))
    for spec in group:
        if spec.name in layout.carried:
            for block in read_blocks(folder.stored, spec.name, tuple(slice(0, size) for size in spec.shape)):
                yield spec.name, block
