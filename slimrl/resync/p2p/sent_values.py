"""The bytes of any region of a tensor as the engines get it, from this rank's live weights.

Where engines need block FP8, the scales of all tiles are settled once per version, before anything is sent:

1. Each rank takes the largest absolute value of each tile of its pieces.
2. For tensors whose pieces share tiles, all ranks agree on the larger of their values.

Then every region is rounded by itself, wherever it begins, to the bits that the whole matrix would get.
"""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from slimrl import device
from slimrl.data.boxes import Box, box_of, contains, elements, slices_of
from slimrl.data.model_weights import Place, SourcePiece, TensorSpec, WeightSource, piece_of
from slimrl.data.peer_messages import Entry
from slimrl.quantization.fp8 import NOT_FINITE, dequantize, quantize_with, scales_of, tile_absmax
from slimrl.resync.buckets import rows_of
from slimrl.resync.expected_fingerprints import ExpectedFingerprints
from slimrl.resync.p2p.demand import SentTensor, tiles_of
from slimrl.resync.pipeline import copy_rows
from slimrl.resync.ranks import Ranks
from slimrl.resync.transform import Quantize


class SentValues:
    """This rank's part of the tensors that the engines get. All ranks construct it together.

    Args:
        tensors: all of them, as the engines get them.
    """

    def __init__(
        self, source: WeightSource, tensors: Sequence[SentTensor], transform: Quantize | None, ranks: Ranks
    ) -> None:
        self._source, self._transform, self._ranks = source, transform, ranks
        self._layout = layout = source.layout()
        self._by_name = {tensor.spec.name: tensor for tensor in tensors}
        self._pieces = {
            spec.name: [piece for piece in pieces if ranks.rank in piece.holders] for spec, pieces in layout.items()
        }
        quantized = [spec for spec in layout if transform is not None and transform.changes(spec)]
        self._quantized = [spec for spec in quantized if self._pieces[spec.name]]
        self._shared = [spec for spec in quantized if self._shares_tiles(layout[spec])]
        self._scales: dict[tuple[str, Box], Tensor] = {}
        """The scales of each piece's tiles, in one block of memory: they outlive what quantisation takes and frees"""
        self._last: tuple[str, Tensor] | None = None
        """What the source gave last: regions of one tensor are written together, and adapters are merged for each
        call."""

    def settle(self) -> None:
        """Settle the scales of a version, from the weights as they are now. All ranks call it together, before each
        version.

        Raises:
            ValueError: a quantised matrix holds NaN or infinity.
            RankError: another rank died or is late.
        """
        self._last = None
        if self._transform is None:
            return
        largest = self._make_scales()
        for spec in self._quantized:
            for piece in self._pieces[spec.name]:
                box = box_of(piece.region)
                absmax = tile_absmax(self._value(spec, piece), self._transform.block, self._offset(box))
                self._scales[spec.name, box].copy_(absmax)
        if self._shared:
            self._agree()
        if not bool(largest.isfinite().all()):
            name = next(name for (name, _), each in self._scales.items() if not bool(each.isfinite().all()))
            raise ValueError(f"{name}: {NOT_FINITE}")
        largest.copy_(scales_of(largest))

    def write_all(self, entries: Iterable[tuple[Entry, Tensor]]) -> None:
        """`write` for each of some regions, tensor by tensor."""
        for (name, _, box), target in sorted(entries, key=lambda entry: entry[0].name):
            self.write(name, box, target)

    def write(self, name: str, box: Box, target: Tensor) -> None:
        """Write a region of a tensor, as the engines get it, into memory of its shape and dtype.

        Raises:
            KeyError: this rank does not hold the region.
        """
        origin = self._by_name[name].origin
        if self._transform is None or not self._transform.changes(origin):
            self._write_plain(origin, box, target)
        elif name != origin.name:
            self._write_scales(origin, box, target)
        else:
            self._write_quantized(origin, box, target)

    def record(self, expected: ExpectedFingerprints) -> None:
        """Hash what quantisation makes of the pieces; the holders of a tensor's pieces take turns. Called at the end of
        a version."""
        if self._transform is not None:
            for spec in expected.changed:
                for number, piece in enumerate(self._layout[spec]):
                    if piece.holders[number % len(piece.holders)] == self._ranks.rank:
                        self._record_piece(self._transform, expected, spec, piece)
        # A view would keep memory that the trainer releases.
        self._last = None

    def _record_piece(
        self, transform: Quantize, expected: ExpectedFingerprints, spec: TensorSpec, piece: SourcePiece
    ) -> None:
        value, box = self._value(spec, piece), box_of(piece.region)
        results: list[tuple[Place, Tensor]] = []
        for number, out in enumerate(transform.sent_specs(spec)):
            part = tiles_of(box, transform.block) if number else box
            if elements(part):
                shape = [stop - start for start, stop in part]
                made = torch.empty(shape, dtype=getattr(torch, out.dtype), device=value.device)
                self.write(out.name, part, made)
                results.append(((rows_of(out), tuple(slice(*edge) for edge in part)), made))
        expected.record((rows_of(spec), piece.region), value, results)

    def _make_scales(self) -> Tensor:
        """Memory for the scales, float32 of all tiles of this rank's pieces, with the views of it."""
        pieces = [(s.name, box_of(piece.region)) for s in self._quantized for piece in self._pieces[s.name]]
        shapes = [[edge.stop - edge.start for edge in self._tiles(box)] for _, box in pieces]
        sizes = [prod(shape) for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=device.compute_device())
        parts = flat.split(sizes)
        self._scales = {key: part.view(shape) for key, part, shape in zip(pieces, parts, shapes, strict=True)}
        return flat

    def _write_plain(self, spec: TensorSpec, box: Box, target: Tensor) -> None:
        piece = self._piece_with(spec.name, box)
        groups = self._groups(spec.name)
        start = piece.first_row + (box[0][0] - piece.region[0].start if box else 0)
        columns = slices_of(box[1:], box_of(piece.region[1:]))
        copy_rows(target if target.ndim else target[None], groups[:, :, *columns], start)

    def _write_scales(self, spec: TensorSpec, box: Box, target: Tensor) -> None:
        """`box` counts tiles."""
        for piece in self._pieces[spec.name]:
            held = box_of(piece.region)
            tiles = box_of(self._tiles(held))
            if contains(tiles, box):
                target.copy_(self._scales[spec.name, held][slices_of(box, tiles)])
                return
        raise KeyError(f"no piece of this rank has tiles {box} of {spec.name}")

    def _write_quantized(self, spec: TensorSpec, box: Box, target: Tensor) -> None:
        assert self._transform is not None
        block = self._transform.block
        piece = self._piece_with(spec.name, box)
        held = box_of(piece.region)
        value = self._value(spec, piece)[slices_of(box, held)]
        first = tuple(start // size for (start, _), size in zip(held, block, strict=True))
        tiles = tuple(
            slice(start // size - number, -(-stop // size) - number)
            for (start, stop), size, number in zip(box, block, first, strict=True)
        )
        scale = self._scales[spec.name, held][tiles]
        offset = self._offset(box)
        if target.dtype is torch.float8_e4m3fn:
            quantize_with(value, scale, block, offset, target)
            return
        rounded = torch.empty(value.shape, dtype=torch.float8_e4m3fn, device=value.device)
        quantize_with(value, scale, block, offset, rounded)
        target.copy_(dequantize(rounded, scale, target.dtype, block, offset))

    def _value(self, spec: TensorSpec, piece: SourcePiece) -> Tensor:
        """A piece in the dtype that is quantised."""
        return piece_of(self._groups(spec.name), piece).to(getattr(torch, spec.dtype))

    def _groups(self, name: str) -> Tensor:
        last = self._last
        if last is None or last[0] != name:
            # Senders to several engines are threads; each of them uses its own.
            self._last = last = (name, self._source.groups(name))
        return last[1]

    def _offset(self, box: Box) -> tuple[int, int]:
        assert self._transform is not None
        (row, _), (column, _) = box
        return row % self._transform.block[0], column % self._transform.block[1]

    def _piece_with(self, name: str, box: Box) -> SourcePiece:
        for piece in self._pieces[name]:
            if contains(box_of(piece.region), box):
                return piece
        raise KeyError(f"no piece of this rank has {box} of {name}")

    def _shares_tiles(self, pieces: Sequence[SourcePiece]) -> bool:
        """Whether a piece begins within a tile."""
        assert self._transform is not None
        return any(
            edge.start % size
            for piece in pieces
            for edge, size in zip(piece.region, self._transform.block, strict=True)
        )

    def _agree(self) -> None:
        """Give every tile that pieces of several ranks share the largest of their values."""
        assert self._transform is not None
        block = self._transform.block
        tables = []
        for spec in self._shared:
            table = torch.zeros([-(-size // tile) for size, tile in zip(spec.shape, block, strict=True)])
            for piece in self._pieces[spec.name]:
                box = box_of(piece.region)
                view = table[self._tiles(box)]
                # Two pieces of this rank may share tiles too; the larger value, or NaN, stays.
                torch.maximum(view, self._scales[spec.name, box].cpu(), out=view)
            tables.append(table)
        flat = torch.cat([table.flatten() for table in tables])
        # A maximum over ranks may drop NaN.
        flat.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        self._ranks.largest(flat)
        for spec, agreed in zip(self._shared, flat.split([table.numel() for table in tables]), strict=True):
            table = agreed.view([-(-size // tile) for size, tile in zip(spec.shape, block, strict=True)])
            for piece in self._pieces[spec.name]:
                box = box_of(piece.region)
                self._scales[spec.name, box].copy_(table[self._tiles(box)])

    def _tiles(self, box: Box) -> tuple[slice, ...]:
        """The tiles of which a box has some."""
        assert self._transform is not None
        return tuple(
            slice(start // size, -(-stop // size))
            for (start, stop), size in zip(box, self._transform.block, strict=True)
        )
