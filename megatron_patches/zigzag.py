"""Context-parallel sharding of packed sequences: rank r of n holds chunks r and 2n - 1 - r of 2n equal chunks.

Under a causal mask the early chunk is cheap and the late one expensive, so that all ranks have equal work.
Megatron's rotary embedding and Transformer Engine's attention expect every sequence in this layout.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def zigzag_indices(bounds: Sequence[int], ranks: int, rank: int) -> Tensor:
    """Positions in the whole micro-batch of one rank's tokens, in the rank's order.

    Args:
        bounds: S + 1 boundaries of the sequences; every length is a multiple of 2 * ranks (any length if ranks is 1).

    Returns:
        int64 [bounds[-1] / ranks].

    Raises:
        ValueError: a length is not such a multiple.
    """
    if ranks == 1:
        return torch.arange(bounds[-1])
    chunks = []
    for start, end in itertools.pairwise(bounds):
        length, rest = divmod(end - start, 2 * ranks)
        if rest:
            raise ValueError(
                f"a sequence of {end - start} tokens cannot be divided over {ranks} context-parallel ranks"
            )
        for chunk in (rank, 2 * ranks - 1 - rank):
            chunks.append(torch.arange(start + chunk * length, start + (chunk + 1) * length))
    return torch.cat(chunks)
