"""Tensors of a bucket that are sent from where they lie in the trainer, and not out of the bucket's memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LiveTensors:
    own: Mapping[int, Tensor]
    """Bytes of those that this rank sends, by offset in the bucket"""
    sources: Mapping[int, int]
    """Which source sends each of them all, by offset in the bucket"""
