"""Which sequences of a packed batch have numbers that are not finite, and which ones have a gradient that is not.

A sequence's numbers are looked at in the order in which they come about, so the first that is not finite is the cause.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slimrl.data.packing import (
    ADVANTAGES,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    VALUES,
    MicroBatch,
)
from slimrl.data.pieces import sampled_places

GIVEN = "the advantages"
LOGPROBS = "the log-probs"
CRITIC_VALUES = "the critic's values"
OF_TOKENS = "the advantages of tokens"
LOSS = "the losses"
GRADIENT = "the gradients"
_ADDED = {
    OLD_LOGPROBS: "the log-probs before the updates",
    REFERENCE_LOGPROBS: "the reference's log-probs",
    VALUES: CRITIC_VALUES,
    RETURNS: "the returns",
    ADVANTAGES: OF_TOKENS,
}
"""Added arrays of a micro-batch, in the order in which they come about, and what they are called"""

MOST_PASSES = 64
"""Largest number of passes in which gradients are sought."""


class Fault(NamedTuple):
    """A sequence with a number that is not finite."""

    sequence: int
    """Its place among all segments of the batch that was packed"""
    what: str
    """The first of its numbers that is not finite"""


def faults_of(batch: MicroBatch, found: Mapping[str, np.ndarray] | None = None) -> list[Fault]:
    """Sequences with numbers that are not finite at their sampled tokens.

    Log-probs of engines and teachers are finite: their clients and trajectory files refuse others.

    Args:
        found: [T] by what they are called, results of a pass over the micro-batch.
    """
    arrays = {GIVEN: given_advantages(batch)}
    # Advantages of tokens come from a pass, or from the recipe's credit by turn.
    arrays |= {what: batch.added[name] for name, what in _ADDED.items() if name in batch.added}
    arrays |= found or {}
    faults = []
    for sequence, places in zip(batch.sequences.tolist(), sampled_places(batch), strict=True):
        what = next((name for name, values_T in arrays.items() if not np.isfinite(values_T[places]).all()), None)
        if what is not None:
            faults.append(Fault(sequence, what))
    return faults


def given_advantages(batch: MicroBatch) -> np.ndarray:
    """float32 [T], the advantage of each token's trajectory."""
    if not len(batch.advantages):
        return np.zeros(len(batch.tokens), np.float32)
    return batch.advantages[batch.trajectory_ids]


def causes(given: Sequence[Fault], found: Sequence[Fault], *, whitened: bool) -> dict[int, str]:
    """What is not finite, by sequence, without those of which another sequence is the cause.

    Args:
        given: in a batch as it was packed.
        found: in the same batch after its passes.
        whitened: advantages of tokens were divided by what all sequences have in common, so that one that is not finite
            makes all others so, and their losses.
    """
    own = dict(fault for fault in found if fault.what not in (OF_TOKENS, LOSS)) | dict(given)
    return own if own and whitened else dict(found) | own


def narrowed[T](
    parts: Sequence[T], is_finite: Callable[[Sequence[T]], bool], most: int = MOST_PASSES
) -> list[Sequence[T]]:
    """Parts of an update, of which all together have a gradient that is not finite, halved as long as halves have one.

    Args:
        is_finite: whether the gradient of these parts together is.
        most: calls of `is_finite` at the most.

    Returns:
        Single parts at fault; several together where only their sum is not finite, or where calls were used up.
    """
    found: list[Sequence[T]] = []
    left = deque([parts])
    while left:
        whole = left.popleft()
        if len(whole) == 1 or most < 2:
            found.append(whole)
            continue
        most -= 2
        middle = len(whole) // 2
        halves = [half for half in (whole[:middle], whole[middle:]) if not is_finite(half)]
        if not halves:
            found.append(whole)
        left += halves
    return found
