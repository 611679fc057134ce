"""Layers for multi-token prediction in an export: not trained, they are carried over from the checkpoint before.

An export then has the tensors that the checkpoint had, which engines need for speculative decoding. The layers' copies
of the embedding and the output layer, where the checkpoint has them, become those of the trained model: they are the
same weights. The layers themselves are as they were, so they predict the trained model less well than the old one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from slimrl.data.protocols import TensorSpec
from slimrl.models.checkpoint_reader import CheckpointReader, read_whole
from slimrl.models.family import family_of


class CarriedTensors:
    """What an export has besides the trained tensors.

    Args:
        reader: the checkpoint that was trained from.
        trained: what the trainer exports; nothing of it is carried over.
        dtype: of the export, for tensors that have none of their own.
    """

    def __init__(
        self, reader: CheckpointReader, hf_config: dict[str, Any], trained: Sequence[TensorSpec], dtype: str
    ) -> None:
        self._reader, self._trained = reader, trained
        known = {spec.name for spec in trained}
        weight_map = family_of(hf_config).weight_map(hf_config, mtp=True)
        self._copies: dict[str, list[str]] = {}
        self._carried: list[TensorSpec] = []
        for entry in weight_map.entries:
            for tensor in entry.hf:
                copies = [name for name in tensor.copies if name in reader.specs and name not in known]
                self._copies[tensor.name] = copies
                if entry.rule.mtp and tensor.name in reader.specs and tensor.name not in known:
                    spec = TensorSpec(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype or dtype)
                    self._carried.append(spec)

    def specs(self) -> list[TensorSpec]:
        """The trained tensors, copies behind their original, then those that are carried over."""
        trained = [
            TensorSpec(name=name, shape=spec.shape, dtype=spec.dtype, atomic=spec.atomic)
            for spec in self._trained
            for name in (spec.name, *self._copies.get(spec.name, ()))
        ]
        return [*trained, *self._carried]

    def tensors(self, trained: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
        """In the order of `specs`; those carried over in the checkpoint's dtype."""
        for name, tensor in trained:
            assert tensor is not None, f"{name}: only rank 0 has the tensors"
            yield name, tensor
            yield from ((copy, tensor) for copy in self._copies.get(name, ()))
        for spec in self._carried:
            yield spec.name, read_whole(self._reader, spec.name)
