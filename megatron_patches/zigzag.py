"""How context parallelism cuts packed sequences: rank r of n holds pieces r and 2n - 1 - r of 2n equal pieces.

Under a causal mask the early piece is cheap and the late one expensive, so that all ranks have equal work.
Megatron's rotary embedding and Transformer Engine's attention expect this cut of every sequence.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def zigzag_indices(bounds: Sequence[int], ranks: int, rank: int) -> Tensor:
    """Positions in the whole micro-batch of the tokens that one rank holds, in the order in which it holds them.

    Args:
        bounds: S + 1 boundaries of the sequences; every length is a multiple of 2 * ranks (any length if ranks is 1).

    Returns:
        int64 [bounds[-1] / ranks].

    Raises:
        ValueError: a length is not such a multiple.
    """
    if ranks == 1:
        return torch.arange(bounds[-1])
    pieces = []
    for start, end in itertools.pairwise(bounds):
        length, rest = divmod(end - start, 2 * ranks)
        if rest:
            raise ValueError(f"a sequence of {end - start} tokens cannot be cut for {ranks} context-parallel ranks")
        for piece in (rank, 2 * ranks - 1 - rank):
            pieces.append(torch.arange(start + piece * length, start + (piece + 1) * length))
    return torch.cat(pieces)
