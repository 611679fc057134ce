"""What layers for multi-token prediction read and predict, from a packed micro-batch.

Position t of a sequence reads token t and predicts token t + 1. Layer k, counted from 1, also reads token t + k and
predicts token t + k + 1. Nothing reaches into the next sequence of the micro-batch or into padding.

D layers, T tokens of the whole micro-batch: the shift comes before context parallelism splits it.
"""

import numpy as np

from slimrl.data.packing import MicroBatch


def mtp_targets(batch: MicroBatch, layers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [D, T], targets [D, T], mask [D, T]) of the layers 1 to D.

    Returns:
        int32, the token k places on, which layer k reads; int32, the one after it; bool, whether the policy sampled
        that. 0 and False beyond the end of the sequence.
    """
    numbers = range(1, layers + 1)
    # The target of a position is the token one place on.
    tokens_DT = np.stack([_ahead(batch.targets, batch.position_ids, k - 1) for k in numbers])
    targets_DT = np.stack([_ahead(batch.targets, batch.position_ids, k) for k in numbers])
    mask_DT = np.stack([_ahead(batch.mask, batch.position_ids, k) for k in numbers])
    return tokens_DT, targets_DT, mask_DT


def count_targets(batch: MicroBatch, layers: int) -> np.ndarray:
    """int64 [D], sampled targets of each layer: the first k of a sequence are not among those of layer k."""
    return np.array([np.sum(batch.mask & (batch.position_ids >= k)) for k in range(1, layers + 1)], np.int64)


def _ahead(values_T: np.ndarray, position_ids_T: np.ndarray, places: int) -> np.ndarray:
    """The value `places` positions on in the same sequence, 0 or False if there is none."""
    moved_T = np.zeros_like(values_T)
    last = len(values_T) - places
    if last > 0:
        moved_T[:last] = np.where(position_ids_T[places:] >= places, values_T[places:], 0)
    return moved_T
