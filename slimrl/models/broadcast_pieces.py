"""The pieces in which a bucket is broadcast, and the table by which the sender tells receivers of them.

Where a broadcast goes from place to place without copies (`device.broadcasts_in_place`), a large tensor is a piece of
its own: the sender may take it out of the live weight, and a receiver may take it to the parameter where it belongs.
What lies between such tensors in the bucket is a piece without a name. Elsewhere the bucket is one piece.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from slimrl.data.protocols import BucketSpec


@dataclass(frozen=True)
class Piece:
    nbytes: int
    offset: int
    """In the bucket"""
    name: str = ""
    """Of the tensor that the piece is; empty where it is something else."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    source: int = 0
    """Which sends it"""


def cut_pieces(bucket: BucketSpec, in_place_bytes: int | None, sources: Mapping[int, int]) -> list[Piece]:
    """In the order of the bucket, without gaps.

    Args:
        in_place_bytes: whole tensors of as many are pieces of their own; None for none.
        sources: which source sends a tensor, by its offset; 0 where it is not there.
    """
    if in_place_bytes is None:
        return [Piece(bucket.nbytes, 0)]
    pieces: list[Piece] = []
    for part in bucket.parts:
        if part.is_whole and part.nbytes >= in_place_bytes:
            source = sources.get(part.offset, 0)
            pieces.append(Piece(part.nbytes, part.offset, part.spec.name, part.spec.shape, part.spec.dtype, source))
        elif pieces and not pieces[-1].name:
            pieces[-1] = Piece(pieces[-1].nbytes + part.nbytes, pieces[-1].offset)
        else:
            pieces.append(Piece(part.nbytes, part.offset))
    return pieces


def encode_pieces(pieces: Iterable[Piece]) -> bytearray:
    """The table."""
    return bytearray(json.dumps([astuple(piece) for piece in pieces]), "ascii")


def decode_pieces(table: Sequence[int]) -> list[Piece]:
    """
    Args:
        table: bytes that `encode_pieces` gave.
    """
    return [
        Piece(nbytes, offset, name, tuple(shape), dtype, source)
        for nbytes, offset, name, shape, dtype, source in json.loads(bytes(table))
    ]
