"""Small collectives of the trainer's ranks during a resync, over gloo, with a deadline.

The others fail at once when a rank dies, and at the deadline when it hangs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class RankError(Exception):
    """Another rank of the trainer died or is late."""


class Ranks:
    """All ranks of the default process group, or this process alone without one. All ranks construct it together.

    Args:
        node: name of the node of this rank.
        timeout_s: deadline of each exchange.
    """

    def __init__(self, node: str, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._node_group: Any = None
        self.rank, self.size, self.nodes = 0, 1, (node,)
        if dist.is_initialized():
            self._group = self._make(range(dist.get_world_size()))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.nodes = tuple(self.gather_objects(node))
            for each in dict.fromkeys(self.nodes):
                members = [rank for rank, other in enumerate(self.nodes) if other == each]
                group = self._make(members)
                if each == node:
                    self._node_group = group

    def agree(self, verdict: int) -> int:
        """The highest verdict of all ranks; also a barrier."""
        if self._group is None:
            return verdict
        value = torch.tensor([verdict])
        with other_ranks():
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return int(value.item())

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on all ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with other_ranks():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def add(self, values: torch.Tensor) -> None:
        """All-reduce a CPU tensor in place, by sum."""
        if self._group is not None:
            with other_ranks():
                dist.all_reduce(values, group=self._group)

    def node_barrier(self) -> None:
        """Barrier of this node's ranks."""
        if self._node_group is not None:
            with other_ranks():
                dist.barrier(group=self._node_group)

    def close(self) -> None:
        for group in (self._node_group, self._group):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._group = self._node_group = None

    def _make(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), timeout=self._timeout, backend="gloo")


@contextmanager
def other_ranks() -> Iterator[None]:
    """Turns the RuntimeError that a collective raises for a dead or late peer into RankError."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"a rank of the trainer died or is late: {error}") from error
