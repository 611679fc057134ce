"""Quantisation between a trainer and its engines, when the engines' checkpoint is in block FP8.

What is quantised is told by the checkpoint's config and the weight map, and how by models/fp8.py, the one quantiser:
an engine gets the bytes that `slimrl-tools quantize` would write of the same weights. A tensor that is cut into parts
is cut between rows of tiles, so that every tile is quantised as a whole.

Engines that cannot compute with FP8 get what they would compute with: the same values, rounded to FP8 and back.
"""

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from slimrl.data.protocols import TensorPart, TensorSpec
from slimrl.models.fp8 import BlockFp8, dequantize, quantize
from slimrl.models.fp8_tensors import quantized_names
from slimrl.models.weight_map import WeightMap
from slimrl.resync.buckets import Rows, Transform


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

    def outputs(self, spec: TensorSpec, start: int, stop: int) -> list[Rows]:
        """A quantised matrix, then its scales; `start` is a multiple of `row_multiple`."""
        if not self.changes(spec):
            return [(spec, start, stop)]
        assert start % self.row_multiple == 0, f"{spec.name}: cut at row {start}, within a tile"
        tiles = (start // self.row_multiple, -(-stop // self.row_multiple))
        return [(self._fp8.quantized_spec(spec), start, stop), (self._fp8.scale_spec(spec), *tiles)]

    def apply(self, part: TensorPart, value: Tensor, outputs: Sequence[Tensor]) -> None:
        """Raises ValueError: a quantised matrix holds NaN or infinity."""
        if not self.changes(part.spec):
            outputs[0].copy_(value)
            return
        quantized_MN, scale_RC = outputs
        self._quantize(part, value, (quantized_MN, scale_RC))

    def _quantize(self, part: TensorPart, value: Tensor, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        try:
            return quantize(value, self._fp8.block, out)
        except ValueError as error:
            raise ValueError(f"{part.spec.name}: {error}") from error


class RoundToFp8(Quantize):
    """Implements Transform: the same matrices in their own dtype, with the values that quantisation leaves of them."""

    def outputs(self, spec: TensorSpec, start: int, stop: int) -> list[Rows]:
        return [(spec, start, stop)]

    def apply(self, part: TensorPart, value: Tensor, outputs: Sequence[Tensor]) -> None:
        """Raises ValueError: a quantised matrix holds NaN or infinity."""
        if not self.changes(part.spec):
            outputs[0].copy_(value)
            return
        quantized_MN, scale_RC = self._quantize(part, value, None)
        outputs[0].copy_(dequantize(quantized_MN, scale_RC, outputs[0].dtype, self._fp8.block))
