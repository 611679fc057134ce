"""Checkpoints that hold a tensor of all experts of a layer as one (gpt-oss), plain or in MXFP4.

The weight map names the tensors of each expert: a matrix [out, in], or a bias. Files hold [experts, in, out], in MXFP4
[experts, out, in], which is read as plain. What is written is plain.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slimrl.checkpoints.checkpoint_reader import CheckpointReader, read_whole
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.data.model_weights import Region, TensorSpec
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
        self._places, self._dtype = weight_map.stacked, dtype
        stacks = {stored for stored, _ in self._places.values()}
        packed = {name for name in stacks if name + BLOCKS_SUFFIX in folder.specs}
        """Names of the stacks that are in MXFP4."""
        self.quantized = frozenset(name for name, (stored, _) in self._places.items() if stored in packed)
        """Names of the tensors that are in MXFP4 on disk."""
        unread = stacks | {name + suffix for name in packed for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX)}
        self.specs = {name: spec for name, spec in folder.specs.items() if name not in unread}
        shapes = {name: self._packed_shape(name) for name in packed}
        sizes = Counter(stored for stored, _ in self._places.values())
        for name, (stored, _) in self._places.items():
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
        stored, expert = self._places[name]
        first = slice(expert, expert + 1)
        if name in self.quantized:
            return self._read_packed(stored, (first, *slices))
        part = self.stored.read(stored, (first, *reversed(slices)))[0]
        return part.T.contiguous() if part.ndim == 2 else part

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


def stacked_specs(weight_map: WeightMap, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """What files hold that store these tensors, in the order in which they are complete."""
    stored: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name not in weight_map.stacked:
            stored[spec.name] = spec
            continue
        name, expert = weight_map.stacked[spec.name]
        # Its last expert completes a stack.
        stored.pop(name, None)
        stored[name] = replace(spec, name=name, shape=(expert + 1, *reversed(spec.shape)))
    return list(stored.values())


def stacked_tensors(
    weight_map: WeightMap, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `stacked_specs`, from these of the weight map; holds the stacks of one layer at a time."""
    places: Mapping[str, tuple[str, int]] = weight_map.stacked
    missing = Counter(places[spec.name][0] for spec in specs if spec.name in places)
    sizes, stacks = dict(missing), dict[str, Tensor]()
    for name, tensor in tensors:
        if name not in places:
            yield name, tensor
            continue
        stored, expert = places[name]
        if stored not in stacks:
            shape = (sizes[stored], *reversed(tensor.shape))
            stacks[stored] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        stacks[stored][expert] = tensor.T if tensor.ndim == 2 else tensor
        missing[stored] -= 1
        if not missing[stored]:
            yield stored, stacks.pop(stored)


def restacked(
    weight_map: WeightMap, specs: Sequence[TensorSpec], produce: Callable[[Sequence[TensorSpec]], Tensors]
) -> tuple[list[TensorSpec], Callable[[Sequence[TensorSpec]], Tensors]]:
    """What files hold that store tensors of a weight map, and a function that makes some of it.

    Args:
        produce: makes some of `specs`, whole, in the order of its argument.
    """
    members: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        stored, _ = weight_map.stacked.get(spec.name, (spec.name, 0))
        members.setdefault(stored, []).append(spec)

    def produce_stored(group: Sequence[TensorSpec]) -> Tensors:
        own = [member for spec in group for member in members[spec.name]]
        return stacked_tensors(weight_map, own, produce(own))

    return stacked_specs(weight_map, specs), produce_stored


def read_each(reader: CheckpointReader, group: Iterable[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by the names of these specs."""
    return ((spec.name, read_whole(reader, spec.name)) for spec in group)
