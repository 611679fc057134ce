"""Tensors that files keep as parts of others: of all experts of a layer as one. And how they become these again.

Torch-free but for tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from slimrl.data.model_weights import Region, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a model's tensor in a checkpoint: whole, or as one expert's matrix or bias in a stacked one."""

    stored: str
    expert: int | None = None
    first: int = 0
    """Index in the stored tensor of the matrix's first output"""
    transposed: bool = False
    """Whether the stored matrices are [in, out]"""

    def region(self, slices: Region) -> Region:
        """The region of the stored tensor that holds a region of this one."""
        if self.expert is None:
            return slices
        rows, *columns = slices
        outputs = slice(rows.start + self.first, rows.stop + self.first)
        part = (*columns, outputs) if self.transposed else (outputs, *columns)
        return (slice(self.expert, self.expert + 1), *part)

    def turned(self, part: Tensor) -> Tensor:
        """Part of the matrix as the stored tensor has it, or the reverse."""
        return part.T if self.transposed and part.ndim == 2 else part


class ExpertStacks:
    """
    Args:
        places: place of each tensor of the model, by its name; others are stored whole.
        shapes: of the stacked tensors, by their names in the checkpoint.
    """

    def __init__(self, places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.places = dict(places)
        self._shapes = dict(shapes)

    def place(self, name: str) -> Place:
        """Place of a tensor of the model, also of one that the checkpoint stores in another form or not at all."""
        return self.places.get(name, Place(stored=name))

    def stored_specs(self, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """What a checkpoint with these tensors of the model stores of it, in the order in which they are whole."""
        stored: dict[str, TensorSpec] = {}
        for spec in specs:
            name = self.place(spec.name).stored
            # The last tensor of a stack decides on its position.
            stored.pop(name, None)
            stored[name] = replace(spec, name=name, shape=self._shapes.get(name, spec.shape))
        return list(stored.values())

    def pieces(self, stored: Sequence[TensorSpec], specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """The model's tensors, of `specs`, that make up these stored ones, those of each one after the other."""
        by_stored: dict[str, list[TensorSpec]] = {}
        for spec in specs:
            by_stored.setdefault(self.place(spec.name).stored, []).append(spec)
        return [piece for spec in stored for piece in by_stored[spec.name]]

    def stored_tensors(
        self, specs: Iterable[TensorSpec], blocks: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors, in the order of `stored_specs`; holds the stacked ones of one layer at a time.

        Args:
            specs: the model's tensors.
            blocks: of the same, whole or in consecutive blocks of rows; names are the model's.
        """
        import torch

        missing = Counter[str]()
        for spec in specs:
            missing[self.place(spec.name).stored] += prod(spec.shape)
        stacks: dict[str, Tensor] = {}
        rows = Counter[str]()
        for name, block in blocks:
            place = self.place(name)
            if place.expert is None:
                yield place.stored, block
                continue
            if place.stored not in stacks:
                stacks[place.stored] = torch.empty(self._shapes[place.stored], dtype=block.dtype, device=block.device)
            start = rows[name]
            rows[name] += block.shape[0]
            region = place.region((slice(start, rows[name]), *(slice(0, size) for size in block.shape[1:])))
            stacks[place.stored][region] = place.turned(block)[None]
            missing[place.stored] -= block.numel()
            if not missing[place.stored]:
                yield place.stored, stacks.pop(place.stored)
