"""Layers for multi-token prediction in an export: copied from the original checkpoint, unless they are trained.

So an export has all tensors of the original, which engines need for speculative decoding. If the layers have copies of
the embedding and the output layer, these become the trained model's, also where the layers are trained. Layers that are
not trained predict the trained model less well than the original.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_whole
from slimrl.data.model_weights import TensorSpec
from slimrl.models.family import family_of


class UntrainedMtpTensors:
    """Adds the untrained tensors to an export.

    Args:
        reader: the original checkpoint.
        trained: the tensors that the trainer exports.
        dtype: of the export, for tensors without a dtype of their own.
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
        """The trained tensors, each followed by its copies, then the untrained ones."""
        trained = [
            replace(spec, name=name) for spec in self._trained for name in (spec.name, *self._copies.get(spec.name, ()))
        ]
        return [*trained, *self._carried]

    def tensors(self, trained: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the order of `specs`; untrained ones have the checkpoint's dtype."""
        for name, tensor in trained:
            assert tensor is not None, f"{name}: only rank 0 has the tensors"
            yield name, tensor
            yield from ((copy, tensor) for copy in self._copies.get(name, ()))
        for spec in self._carried:
            yield spec.name, read_whole(self._reader, spec.name)
