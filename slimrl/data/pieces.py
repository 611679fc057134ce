"""Values of sampled tokens by whole trajectory, from micro-batches and back.

A piece is one packed sequence's part: S values of its sampled tokens. A trajectory of several segments has several
pieces, which may lie in several micro-batches, on several data-parallel ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slimrl.data.packing import MicroBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    trajectory: int
    sequence: int
    """Index of the sequence among all segments of the packed batch: pieces of a trajectory are in its order"""
    values: dict[str, np.ndarray]
    """Values of the sequence's sampled tokens by name, float32 [S] each"""


def pieces_of(batch: MicroBatch, arrays: Mapping[str, np.ndarray]) -> list[Piece]:
    """The values of a micro-batch's sampled tokens, as one piece for each sequence, in order.

    Args:
        arrays: [T] by name, of this micro-batch.
    """
    return [
        Piece(
            trajectory=int(batch.trajectories[batch.trajectory_ids[place[0]]]) if len(place) else -1,
            sequence=int(sequence),
            values={name: values[place] for name, values in arrays.items()},
        )
        for sequence, place in zip(batch.sequences, sampled_places(batch), strict=True)
    ]


def sampled_places(batch: MicroBatch) -> list[np.ndarray]:
    """Positions of the sampled tokens of each sequence, int64 [S] each."""
    bounds = batch.cu_seqlens.tolist()[: len(batch.sequences) + 1]
    return [start + np.flatnonzero(batch.mask[start:end]) for start, end in pairwise(bounds)]


def scattered(batch: MicroBatch, values: Mapping[int, np.ndarray]) -> np.ndarray:
    """Values of sampled tokens at their places in a micro-batch, float32 [T], 0 elsewhere.

    Args:
        values: [S] by sequence, of all sequences of the micro-batch with sampled tokens.
    """
    found_T = np.zeros(len(batch.tokens), np.float32)
    for sequence, places in zip(batch.sequences.tolist(), sampled_places(batch), strict=True):
        if len(places):
            found_T[places] = values[sequence]
    return found_T


def join(pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
    """The values of one whole trajectory, float64 [S], in the order of its tokens."""
    ordered = sorted(pieces, key=lambda piece: piece.sequence)
    return {name: np.concatenate([p.values[name] for p in ordered]).astype(np.float64) for name in ordered[0].values}


def cut(values_S: np.ndarray, pieces: Sequence[Piece]) -> dict[int, np.ndarray]:
    """The inverse of `join`: each sequence's part of a whole trajectory's values."""
    ordered = sorted(pieces, key=lambda piece: piece.sequence)
    lengths = [len(next(iter(piece.values.values()))) for piece in ordered]
    parts = np.split(values_S, np.cumsum(lengths)[:-1])
    return {piece.sequence: part for piece, part in zip(ordered, parts, strict=True)}
