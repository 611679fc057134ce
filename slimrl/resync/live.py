"""Tensors of a bucket that are sent from where they lie in the trainer, and not out of the bucket's memory.

The ranks that send are sources: the sender is number 0, and other ranks of its node follow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LiveTensors:
    """Those of one bucket, on one rank."""

    own: Mapping[int, Tensor]
    """Bytes of those that lie on this rank, by offset in the bucket"""
    sources: Mapping[int, int]
    """The source of each, wherever it lies, by offset in the bucket"""
