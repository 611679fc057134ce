"""Quantisation between a trainer and its engines, when the engines' checkpoint is in block FP8.

The checkpoint's config and the weight map say which tensors are quantised. quantization/fp8.py quantises them, as it
does for `slimrl-tools quantize`, so an engine gets the bytes that the tool would write. A tensor that does not fit into
a bucket is cut between rows of tiles, so every tile is quantised as a whole. The experts of a layer that lie in one
bucket are quantised together.

Tiles are quantised on the nodes that have them whole, before they travel to other nodes. A tensor of which some node
has a part of a tile travels as it is and is quantised behind the exchange.

Engines that cannot compute with FP8 get the same values, rounded to FP8 and back.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from slimrl.data.weights import Place, Region, TensorPart, TensorSpec
from slimrl.models.weight_map import WeightMap
from slimrl.quantization.fp8 import NOT_FINITE, BlockFp8, dequantize, quantize, quantize_batch
from slimrl.quantization.fp8_tensors import quantized_names
from slimrl.resync.batches import Parts, equally_apart, stacked
from slimrl.resync.buckets import Bucket, Transform, rows_of


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

    @property
    def row_multiple(self) -> int:
        return self._fp8.block[0]

    def changes(self, spec: TensorSpec) -> bool:
        return spec.name in self._names

    def outputs(self, part: TensorPart) -> list[TensorPart]:
        """A quantised matrix, then its scales; a part begins at a multiple of `row_multiple`."""
        spec, start, stop = part.spec, part.start, part.stop
        if not self.changes(spec):
            return [part]
        assert start % self.row_multiple == 0, f"{spec.name}: cut at row {start}, within a tile"
        tiles = (start // self.row_multiple, -(-stop // self.row_multiple))
        return [rows_of(self._fp8.quantized_spec(spec), start, stop), rows_of(self._fp8.scale_spec(spec), *tiles)]

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
