"""Messages of the `p2p` and `ipc` transports, from trainer ranks to the ranks of an engine.

With `p2p`, an engine's rank that gets a message from the trainer passes it on: first to one rank of each other node
that keeps it, then each of these to the others of its node.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slimrl.data.boxes import Box, elements


class Entry(NamedTuple):
    """A region of a tensor within a message."""

    name: str
    dtype: str
    """Dtype as in torch, without the prefix"""
    box: Box


def views(entries: Sequence[Entry], data: Any) -> Iterator[tuple[Entry, Any]]:
    """Each entry of a message with its part of the bytes, as a tensor of its shape and dtype.

    Args:
        data: uint8, the message's bytes; others may follow.
    """
    import torch

    end = 0
    for entry in entries:
        dtype = getattr(torch, entry.dtype)
        start, end = end, end + elements(entry.box) * dtype.itemsize
        yield entry, data[start:end].view(dtype).view([stop - first for first, stop in entry.box])


@dataclass(frozen=True, kw_only=True)
class Message:
    source: int
    """Rank of the trainer"""
    target: int
    """Rank of the engine that gets it from the trainer"""
    ranks: tuple[int, ...]
    """Ranks of the engine that keep it, the target among them"""
    entries: tuple[Entry, ...]
    """In the order of the bytes. Larger elements come first, so each entry is aligned and there are no gaps."""
    nbytes: int

    def hops(self, per_node: int) -> list[tuple[int, int, int]]:
        """(step, from, to) by which the engine's ranks pass it on, in order.

        Args:
            per_node: ranks of the engine on each of its nodes.
        """
        first: dict[int, int] = {self.target // per_node: self.target}
        for rank in self.ranks:
            first.setdefault(rank // per_node, rank)
        between = [(1, self.target, rank) for rank in first.values() if rank != self.target]
        within = [(2, first[rank // per_node], rank) for rank in self.ranks if rank not in first.values()]
        return between + within


Round = tuple[Message, ...]


ALIGNMENT = 512
"""Bytes: messages begin at multiples of this in a buffer, since NCCL is slow with memory that is not aligned."""


def aligned(nbytes: int) -> int:
    """The bytes that a message takes in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Placed(NamedTuple):
    """A message in a buffer."""

    message: Message
    offset: int
