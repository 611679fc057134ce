"""Small collectives of the trainer's ranks during a resync, over gloo, with a deadline.

The others fail at once when a rank dies, and at the deadline when it hangs. Errors of one rank become known to all of
them, which continue, start the version again or fail together.
"""

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slimrl.data.engine import EngineError
from slimrl.resync.engine_calls import EngineCalls
from slimrl.resync.report import ResyncError

log = logging.getLogger(__name__)

CONTINUE, RETRY, FAIL = range(3)
"""The highest outcome of any rank is that of all."""


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

    def largest(self, values: torch.Tensor) -> None:
        """All-reduce a CPU tensor in place, by maximum."""
        if self._group is not None:
            with other_ranks():
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return self.from_rank(0, value)

    def from_rank(self, rank: int, value: Any) -> Any:
        """The value of a rank, on all ranks."""
        if self._group is None:
            return value
        values = [value]
        with other_ranks():
            dist.broadcast_object_list(values, src=rank, group=self._group, device=torch.device("cpu"))
        return values[0]

    def exchange_objects(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """The values that other ranks have for this one, by the rank that has them.

        Args:
            values: those of this rank for others, by the rank that gets them.
        """
        if self._group is None:
            return dict(values)
        data = [pickle.dumps(values[rank]) if rank in values else b"" for rank in range(self.size)]
        sizes, counts = torch.tensor([len(each) for each in data]), torch.empty(self.size, dtype=torch.int64)
        with other_ranks():
            dist.all_to_all_single(counts, sizes, group=self._group)
            # A buffer that is not empty, since torch takes no other.
            sent = torch.frombuffer(bytearray(b"".join((*data, b"."))), dtype=torch.uint8)[:-1]
            received = torch.empty(int(counts.sum()), dtype=torch.uint8)
            dist.all_to_all_single(received, sent, counts.tolist(), sizes.tolist(), group=self._group)
        parts = received.split(counts.tolist())
        return {rank: pickle.loads(part.numpy().tobytes()) for rank, part in enumerate(parts) if len(part)}

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


class StartAgain(Exception):
    """Engines were taken out, or get another chance; the version starts again from its first bucket."""


def sync_errors_across_ranks(
    ranks: Ranks, calls: EngineCalls, version: int, place: str, error: Exception | None
) -> None:
    """Barrier of all ranks; raises on all where any of them has an error.

    Args:
        calls: this rank's; after an EngineError it takes out engines that cannot continue.
        place: where the error happened, for the message.
        error: of this rank. An OSError or ValueError is the trainer's own fault, or that of its weights.

    Raises:
        StartAgain, ResyncError: on all ranks alike.
        RankError: another rank died or is late.
    """
    outcome = CONTINUE
    if isinstance(error, EngineError):
        outcome = RETRY if calls.judge(error) else FAIL
    elif isinstance(error, OSError | ValueError):
        outcome = FAIL
    elif error is not None:
        raise error
    outcome = ranks.agree(outcome)
    if outcome == CONTINUE:
        return
    results = ranks.gather_objects((len(calls.engines), None if error is None else str(error)))
    reasons = "; ".join(reason for _, reason in results if reason is not None)
    if outcome == RETRY and sum(engines for engines, _ in results):
        if ranks.rank == 0:
            log.warning("resync of version %d starts again after it failed %s: %s", version, place, reasons)
        raise StartAgain
    raise ResyncError(f"resync of version {version} failed {place}: {reasons}") from error
