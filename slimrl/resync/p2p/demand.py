"""What the ranks of an engine keep of the tensors that the trainer holds, and who holds it: a pure function.

1. The tensors are taken as the engines get them. A tile of a quantised matrix that two pieces share counts for the
   piece with its first element.
2. Ranks of an engine that keep the same region of a tensor share one demand.
3. A demand lies within one piece, so that each of the piece's holders can serve it whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.data.boxes import Box, box_of, elements, intersection
from slimrl.data.model_weights import SourceLayout, TensorSpec
from slimrl.resync.transform import Quantize

Holders = tuple[int, ...]

Kept = Mapping[str, Sequence[Box]]
"""The regions of each tensor that one rank of an engine keeps, by the tensor's name"""


class SentTensor(NamedTuple):
    """A tensor as the engines get it."""

    spec: TensorSpec
    origin: TensorSpec
    """The trainer's tensor, from which it is made"""
    pieces: tuple[tuple[Box, tuple[int, ...]], ...]
    """The regions that trainer ranks hold, without overlap, each with its holders in ascending order"""


class Demand(NamedTuple):
    """A region of a tensor that some ranks of an engine keep and some ranks of the trainer hold."""

    tensor: int
    """Index among the sent tensors"""
    box: Box
    nbytes: int
    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks of the engine, ascending"""


def sent_tensors(layout: SourceLayout, transform: Quantize | None) -> list[SentTensor]:
    """The tensors in export order; the scales of a quantised matrix follow it."""
    result = []
    for origin, pieces in layout.items():
        held = tuple((box_of(piece.region), piece.holders) for piece in pieces)
        if transform is None or not transform.changes(origin):
            result.append(SentTensor(origin, origin, held))
            continue
        values, *scales = transform.sent_specs(origin)
        result.append(SentTensor(values, origin, held))
        for spec in scales:
            tiles = tuple((tiles_of(box, transform.block), holders) for box, holders in held)
            result.append(SentTensor(spec, origin, tuple(each for each in tiles if elements(each[0]))))
    return result


def tiles_of(box: Box, block: tuple[int, int]) -> Box:
    """The tiles whose first element lies in a box."""
    return tuple((-(-start // size), -(-stop // size)) for (start, stop), size in zip(box, block, strict=True))


def demands(tensors: Sequence[SentTensor], kept: Sequence[Kept], *, mtp: bool) -> list[Demand]:
    """What one model of an engine needs, in the order of the tensors.

    Args:
        kept: of each rank of the engine, for this model.
        mtp: whether it is the draft model, which gets the layers for multi-token prediction and nothing else.
    """
    return [
        demand
        for number, tensor in enumerate(tensors)
        if tensor.spec.mtp is mtp
        for demand in _of_tensor(number, tensor, kept)
    ]


def _of_tensor(number: int, tensor: SentTensor, kept: Sequence[Kept]) -> Iterator[Demand]:
    ranks_of: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(kept):
        # A rank that keeps a region twice gets it once.
        for box in dict.fromkeys(boxes.get(tensor.spec.name, ())):
            ranks_of.setdefault(box, []).append(rank)
    size = element_bytes(tensor.spec.dtype)
    known: dict[tuple[Box, Holders], set[int]] = {}
    for box, ranks in ranks_of.items():
        for piece, holders in tensor.pieces:
            if (common := intersection(box, piece)) is not None:
                known.setdefault((common, holders), set()).update(ranks)
    for (common, holders), several in known.items():
        yield Demand(number, common, elements(common) * size, holders, tuple(sorted(several)))
