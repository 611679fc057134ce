"""Quantisation between a trainer and its engines, when the engines' checkpoint is in block FP8.

The checkpoint's config and the weight map say which tensors are quantised. quantization/fp8.py quantises them, as it
does for `slimrl-tools quantize`, so an engine gets the bytes that the tool would write. A tensor that does not fit into
a bucket is cut between rows of tiles, so every tile is quantised as a whole. The experts of a layer that lie in one
bucket are quantised together.

Tiles are quantised on the nodes that have them whole, before they travel to other nodes. A tensor of which some node
has a part of a tile travels as it is and is quantised behind the exchange.

Engines that cannot compute with FP8 get the same values, rounded to FP8 and back.

On the leader of a node each bucket is transformed in two steps:

1. Before the exchange with other nodes: what the node gathers, if it can be transformed there and is smaller then.
2. Behind it, on rank 0: everything else.

Each tensor is hashed once before and after its transform, by the leader that transforms it; so a fault of the exchange
shows in the engines, whose fingerprints differ.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from slimrl import device
from slimrl.data.model_weights import Place, Region, TensorPart, TensorSpec
from slimrl.models.weight_map import WeightMap
from slimrl.quantization.fp8 import NOT_FINITE, BlockFp8, TileShape, dequantize, quantize, quantize_batch
from slimrl.quantization.fp8_tensors import quantized_names
from slimrl.resync.buckets import Bucket, Transform, rows_of
from slimrl.resync.plan import ResyncPlan
from slimrl.resync.report import Clock

Parts = tuple[TensorPart, ...]
"""A part of a tensor, and what it becomes; each with its place."""

_EXPERT = re.compile(r"\.experts\.\d+\.")

Record = Callable[[Place, Tensor, Sequence[tuple[Place, Tensor]]], None]
"""Function that is called with a place, its values, and what the transform made of it."""


def quantize_transform(hf_config: dict[str, Any], weight_map: WeightMap, *, fp8_engines: bool) -> Transform | None:
    """What the engines of a checkpoint with this config need done to plain weights; None where that is nothing.

    Args:
        weight_map: of the checkpoint, with all layers that its config may name.
        fp8_engines: whether they compute with FP8 themselves.

    Raises:
        ValueError: quantised in a way that is not supported, or `modules_to_not_convert` does not fit the model.
    """
    fp8 = BlockFp8.of_config(hf_config)
    if fp8 is None:
        return None
    names = quantized_names(weight_map, fp8)
    return Quantize(fp8, names) if fp8_engines else RoundToFp8(fp8, names)


class Quantize:
    """Implements Transform: matrices become float8_e4m3fn with a tensor of scales.

    Args:
        names: of the matrices that are quantised; the other tensors stay as they are.
    """

    def __init__(self, fp8: BlockFp8, names: Collection[str]) -> None:
        self._fp8, self._names = fp8, frozenset(names)
        # Of a large model they are asked for again and again.
        self._specs: dict[TensorSpec, tuple[TensorSpec, TensorSpec]] = {}

    @property
    def row_multiple(self) -> int:
        return self._fp8.block[0]

    @property
    def block(self) -> TileShape:
        return self._fp8.block

    def sent_specs(self, spec: TensorSpec) -> list[TensorSpec]:
        """Specs of a tensor as the engines get it, and of its scales if it has some."""
        return [output.spec for output in self.outputs(rows_of(spec))]

    def changes(self, spec: TensorSpec) -> bool:
        return spec.name in self._names

    def outputs(self, part: TensorPart) -> list[TensorPart]:
        """A quantised matrix, then its scales; a part begins at a multiple of `row_multiple`."""
        spec, start, stop = part.spec, part.start, part.stop
        if not self.changes(spec):
            return [part]
        assert start % self.row_multiple == 0, f"{spec.name}: cut at row {start}, within a tile"
        tiles = (start // self.row_multiple, -(-stop // self.row_multiple))
        if spec not in self._specs:
            self._specs[spec] = self._fp8.quantized_spec(spec), self._fp8.scale_spec(spec)
        values, scales = self._specs[spec]
        return [rows_of(values, start, stop), rows_of(scales, *tiles)]

    def output_regions(self, spec: TensorSpec, region: Region) -> tuple[Region, ...] | None:
        """The regions of the outputs; None for a tensor that stays as it is, and for a region that has a part of a
        tile."""
        if not self.changes(spec):
            return None
        for edge, size, tile in zip(region, spec.shape, self._fp8.block, strict=True):
            if edge.start % tile or (edge.stop % tile and edge.stop != size):
                return None
        return region, self._tiles(region)

    def apply(self, bucket: Bucket, gathered: Tensor, sent: Tensor, places: Sequence[Place] | None = None) -> None:
        """Raises ValueError: a quantised matrix holds NaN or infinity. The host waits for the device once."""
        places = _whole(bucket) if places is None else places
        self._copy_plain(bucket, gathered, sent, places)
        alike: dict[Region, list[Parts]] = defaultdict(list)
        for part, region in places:
            if self.changes(part.spec):
                alike[part.local(region)].append((part, *bucket.outputs(self, part)))
        finite, scales = [], []
        for region, changes in alike.items():
            for batch in equally_apart(changes):
                tiles = self._tiles(region)
                weight_BMN, quantized_BMN, scale_BRC = map(stacked, zip(*batch, strict=True), (gathered, sent, sent))
                out = quantized_BMN[:, *region], scale_BRC[:, *tiles]
                finite.append(quantize_batch(weight_BMN[:, *region], self._fp8.block, out))
                scales += [(part.spec.name, scale.view(sent)[tiles]) for part, _, scale in batch]
        if finite and not torch.stack(finite).all():
            name = next(name for name, scale_RC in scales if not scale_RC.isfinite().all())
            raise ValueError(f"{name}: {NOT_FINITE}")

    def _tiles(self, region: Region) -> Region:
        """The region of the scales of a region that begins and ends with tiles or with its matrix; both counted from a
        part's first row."""
        pairs = zip(region, self._fp8.block, strict=True)
        return tuple(slice(edge.start // tile, -(-edge.stop // tile)) for edge, tile in pairs)

    def _copy_plain(self, bucket: Bucket, gathered: Tensor, sent: Tensor, places: Sequence[Place]) -> None:
        """Copy the tensors that stay as they are."""
        for part, _ in places:
            if not self.changes(part.spec):
                (output,) = bucket.outputs(self, part)
                output.view(sent).copy_(part.view(gathered))


class RoundToFp8(Quantize):
    """Implements Transform: the same matrices in their own dtype, with the values that quantisation leaves of them."""

    def outputs(self, part: TensorPart) -> list[TensorPart]:
        return [part]

    def output_regions(self, spec: TensorSpec, region: Region) -> None:
        """Returns None for every region: the values are as large as before."""

    def apply(self, bucket: Bucket, gathered: Tensor, sent: Tensor, places: Sequence[Place] | None = None) -> None:
        """Raises ValueError: a matrix holds NaN or infinity."""
        places = _whole(bucket) if places is None else places
        self._copy_plain(bucket, gathered, sent, places)
        block = self._fp8.block
        for part, _ in places:
            if self.changes(part.spec):
                (output,) = bucket.outputs(self, part)
                target = output.view(sent)
                try:
                    target.copy_(dequantize(*quantize(part.view(gathered), block), target.dtype, block))
                except ValueError as error:
                    raise ValueError(f"{part.spec.name}: {error}") from error


def _whole(bucket: Bucket) -> list[Place]:
    return [(part, part.region) for part in bucket.gathered]


def equally_apart(changes: Sequence[Parts]) -> list[list[Parts]]:
    """Divide them into batches; from each of a batch to the next, all offsets grow by the same number of bytes.

    Only experts of a layer are in a batch together: other matrices hardly ever have a neighbour of their shape.
    """
    similar: dict[tuple[str, tuple[int, ...]], list[Parts]] = defaultdict(list)
    for parts in changes:
        first = parts[0]
        similar[_EXPERT.sub(".experts.*.", first.spec.name), (first.start, *first.shape)].append(parts)
    return [batch for alike in similar.values() for batch in _runs(alike)]


def stacked(parts: Sequence[TensorPart], memory: Tensor) -> Tensor:
    """[B, *shape], a view of the memory, of parts that are equally far apart; `memory` is uint8."""
    first: Tensor = parts[0].view(memory)
    step = parts[1].offset - parts[0].offset if len(parts) > 1 else parts[0].nbytes
    return first.as_strided((len(parts), *first.shape), (step // first.element_size(), *first.stride()))


def _runs(alike: Sequence[Parts]) -> list[list[Parts]]:
    runs, last_steps = [[alike[0]]], None
    for before, parts in pairwise(alike):
        steps = [after.offset - each.offset for each, after in zip(before, parts, strict=True)]
        if len(runs[-1]) == 1 or steps == last_steps:
            runs[-1].append(parts)
        else:
            runs.append([parts])
        last_steps = steps
    return runs


class NodeTransform:
    """The transform of a plan's buckets on a leader."""

    def __init__(self, plan: ResyncPlan, rank: int) -> None:
        assert plan.transform is not None
        self._transform, self._buckets = plan.transform, plan.buckets
        self._before = [plan.transforms(bucket, plan.nodes[rank]) for bucket in plan.buckets]
        self._behind = [plan.transforms_behind(bucket) if rank == 0 else [] for bucket in plan.buckets]

    def before(self, number: int, gathered: Tensor, sent: Tensor, clock: Clock, record: Record) -> ValueError | None:
        """Returns what the transform raised, since other nodes wait for this one in the exchange."""
        blocks = self._before[number]
        error = self._apply(number, gathered, sent, [(block.part, block.region) for block in blocks], clock)
        if error is None:
            with clock("hash"):
                for block in blocks:
                    results = [(place, place[0].region_view(sent, place[1])) for place in block.outputs]
                    value = block.part.region_view(gathered, block.region)
                    record((block.part, block.region), value, results)
        return error

    def behind(self, number: int, gathered: Tensor, sent: Tensor, clock: Clock, record: Record) -> ValueError | None:
        bucket, parts = self._buckets[number], self._behind[number]
        error = self._apply(number, gathered, sent, [(part, part.region) for part in parts], clock)
        if error is None:
            with clock("hash"):
                for part in parts:
                    outputs = bucket.outputs(self._transform, part)
                    results = [((output, output.region), output.view(sent)) for output in outputs]
                    record((part, part.region), part.view(gathered), results)
        return error

    def _apply(
        self, number: int, gathered: Tensor, sent: Tensor, places: Sequence[Place], clock: Clock
    ) -> ValueError | None:
        if not places:
            return None
        try:
            with clock("transform"):
                self._transform.apply(self._buckets[number], gathered, sent, places)
        except ValueError as error:
            return error
        finally:
            # Next all ranks agree or exchange, and then some write the following bucket into the staging buffer.
            with clock("transform"):
                device.finish_queued_work()
        return None
