"""What data-parallel ranks tell each other about the trajectories that they hold."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slimrl import device
from slimrl.data.packing import MicroBatch
from slimrl.data.pieces import Piece


def by_trajectory(pieces: Iterable[Piece], batches: Sequence[MicroBatch], group: Any) -> dict[int, list[Piece]]:
    """All pieces of each trajectory of this rank; those of trajectories that lie elsewhere too are exchanged.

    Args:
        group: the data-parallel process group.
    """
    found: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.trajectory >= 0:
            found[piece.trajectory].append(piece)
    sampled = {int(t): int(n) for b in batches for t, n in zip(b.trajectories, b.num_sampled, strict=True)}
    incomplete = [own for t, own in found.items() if sum(map(_length, own)) < sampled[t]]
    here = {(piece.trajectory, piece.sequence) for own in found.values() for piece in own}
    for piece in (piece for of_rank in over_data([p for own in incomplete for p in own], group) for piece in of_rank):
        if piece.trajectory in found and (piece.trajectory, piece.sequence) not in here:
            found[piece.trajectory].append(piece)
    return found


def over_data(value: Any, group: Any) -> list[Any]:
    """The values of all data-parallel ranks."""
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, value, group=group)
    return of_ranks


def sum_over_data(values: Sequence[float], group: Any) -> list[float]:
    """Sums over the data-parallel ranks."""
    totals = torch.tensor(values, dtype=torch.float64, device=device.compute_device())
    dist.all_reduce(totals, group=group)
    return [float(total) for total in totals.tolist()]


def _length(piece: Piece) -> int:
    return len(next(iter(piece.values.values())))
