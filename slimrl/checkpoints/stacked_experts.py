"""Checkpoints that hold a tensor of all experts of a layer as one (gpt-oss), plain or in MXFP4.

The weight map names the tensors of each expert: a matrix [out, in], or a bias. Files hold [experts, in, out], in MXFP4
[experts, out, in], which is read as plain. What is written is plain.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_whole
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.data.model_weights import Region, TensorSpec
from slimrl.models.expert_stacks import ExpertStacks, Place
from slimrl.models.hf_config import BLOCKS_SUFFIX, MXFP4_BLOCK, SCALES_SUFFIX
from slimrl.models.weight_map import WeightMap
from slimrl.quantization.mxfp4 import dequantize

Tensors = Iterable[tuple[str, Tensor]]


class StackedFolder(CheckpointReader):
    """Reads a folder by the names of its weight map.

    Args:
        dtype: of what is in MXFP4, as torch prints it without the prefix.

    Raises:
        ValueError: stacks of another number of experts, or blocks of MXFP4 without their scales.
    """

    def __init__(self, folder: SafetensorsFolder, weight_map: WeightMap, dtype: str) -> None:
        self.path, self.stored, self.left_out = folder.path, folder, folder.left_out
        self._places, self._dtype = stacks_of(weight_map).places, dtype
        stacks = {place.stored for place in self._places.values()}
        packed = {name for name in stacks if name + BLOCKS_SUFFIX in folder.specs}
        """Names of the stacks that are in MXFP4."""
        self.quantized = frozenset(name for name, place in self._places.items() if place.stored in packed)
        """Names of the tensors that are in MXFP4 on disk."""
        unread = stacks | {name + suffix for name in packed for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX)}
        self.specs = {name: spec for name, spec in folder.specs.items() if name not in unread}
        shapes = {name: self._packed_shape(name) for name in packed}
        sizes = Counter(place.stored for place in self._places.values())
        for name, place in self._places.items():
            stored = place.stored
            spec = folder.specs.get(stored)
            if stored in shapes:
                spec = TensorSpec(name=stored, shape=shapes[stored], dtype=dtype)
            if spec is None:
                continue
            if spec.shape[0] != sizes[stored]:
                raise ValueError(
                    f"{self.path}: {stored} holds {spec.shape[0]} experts, the model of config.json has {sizes[stored]}"
                )
            shape = spec.shape[1:] if stored in packed else spec.shape[:0:-1]
            self.specs[name] = replace(spec, name=name, shape=shape)

    def read(self, name: str, slices: Region) -> Tensor:
        """A slice of a tensor, on the CPU, in its own memory.

        Raises:
            ValueError: the file has become shorter since the folder was opened.
        """
        if name not in self._places:
            return self.stored.read(name, slices)
        place = self._places[name]
        if name in self.quantized:
            # Those are [experts, out, in].
            return self._read_packed(place.stored, replace(place, transposed=False).region(slices))
        return place.turned(self.stored.read(place.stored, place.region(slices))[0]).contiguous()

    def close(self) -> None:
        self.stored.close()

    def _packed_shape(self, stored: str) -> tuple[int, ...]:
        """[experts, out, in] of what is in MXFP4."""
        blocks, scales = (self.stored.specs.get(stored + suffix) for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX))
        assert blocks is not None
        *leading, half = blocks.shape
        if half != MXFP4_BLOCK // 2 or scales is None or scales.shape != tuple(leading):
            found = "none" if scales is None else list(scales.shape)
            raise ValueError(
                f"{self.path}: {stored}: blocks {list(blocks.shape)} of MXFP4 need {MXFP4_BLOCK // 2} bytes each and a "
                f"scale for each block, scales are {found}"
            )
        return (*leading[:-1], leading[-1] * MXFP4_BLOCK)

    def _read_packed(self, stored: str, region: Region) -> Tensor:
        experts, rows, columns = region
        blocks = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
        offset = columns.start - blocks.start * MXFP4_BLOCK
        part = (experts, rows, blocks)
        values = dequantize(
            self.stored.read(stored + BLOCKS_SUFFIX, (*part, slice(0, MXFP4_BLOCK // 2))),
            self.stored.read(stored + SCALES_SUFFIX, part),
            getattr(torch, self._dtype),
        )
        return values[0, :, offset : offset + columns.stop - columns.start].contiguous()


def stacks_of(weight_map: WeightMap) -> ExpertStacks:
    """How files hold the tensors of a weight map."""
    tensors, sizes = weight_map.hf_tensors, Counter(stored for stored, _ in weight_map.stacked.values())
    places = {
        name: Place(stored=stored, expert=expert, transposed=True)
        for name, (stored, expert) in weight_map.stacked.items()
    }
    shapes = {place.stored: (sizes[place.stored], *reversed(tensors[name].shape)) for name, place in places.items()}
    return ExpertStacks(places, shapes)


def restacked(
    weight_map: WeightMap, specs: Sequence[TensorSpec], produce: Callable[[Sequence[TensorSpec]], Tensors]
) -> tuple[list[TensorSpec], Callable[[Sequence[TensorSpec]], Tensors]]:
    """What files hold that store tensors of a weight map, and a function that makes some of it.

    Args:
        produce: makes some of `specs`, whole, in the order of its argument.
    """
    stacks = stacks_of(weight_map)

    def produce_stored(group: Sequence[TensorSpec]) -> Tensors:
        own = stacks.pieces(group, specs)
        return stacks.stored_tensors(own, produce(own))

    return stacks.stored_specs(specs), produce_stored


def read_each(reader: CheckpointReader, group: Iterable[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by the names of these specs."""
    return ((spec.name, read_whole(reader, spec.name)) for spec in group)
