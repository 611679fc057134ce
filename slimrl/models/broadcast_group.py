"""The process groups through which a trainer's buckets reach engines: a source is rank 0, the receivers follow.

Both ends make them by this code, as bare process groups beside torch's default one, which spans the trainer or the
engine alone. Each source has groups of its own, and each receiver is in all of them.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.data.protocols import GroupSpec

STREAMS = {"gloo": 2, "nccl": 1}
"""Process groups of a source side by side, by backend. One of gloo has one connection to each member and one thread
that serves all of them, which does not fill a network, or two cores."""

UNDER_WAY = 8
"""Broadcasts of a member that are asked for and have not ended. Each of gloo's begins with a message there and back,
beside which the ones before it go on."""


class GroupError(Exception):
    """A member did not join, left, or outran the deadline; the group is of no use any more."""


class BroadcastGroup:
    """One member: a source, which sends, or a receiver. Used by one thread at a time; any other may drop it."""

    def __init__(self, spec: GroupSpec, rank: int, store: Any = None, *, source: int = 0) -> None:
        """Returns when all members have joined (gloo), or at the first broadcast at the latest (NCCL).

        Args:
            rank: 0 for a source.
            store: source 0's, which serves the others; None to connect to it.
            source: which one this is, if it is one.

        Raises:
            GroupError: some have not joined one of the process groups within `spec.timeout_s`.
        """
        self._timeout = timedelta(seconds=spec.timeout_s)
        try:
            if store is None:
                store = dist.TCPStore(
                    spec.address, spec.port, spec.world_size, is_master=False, timeout=self._timeout,
                    wait_for_workers=False,
                )  # fmt: skip
            self._streams: list[list[Any]] = [
                [
                    _make(dist.PrefixStore(f"{spec.name}/{each}/{stream}", store), rank, spec, self._timeout)
                    for stream in range(STREAMS[spec.backend])
                ]
                for each in ([source] if rank == 0 else range(spec.num_sources))
            ]
        except (RuntimeError, dist.DistError) as error:
            raise GroupError(f"joining group {spec.name}: {_first_line(error)}") from error

    def broadcast(self, *tensors: Tensor, deadline: float | None = None) -> None:
        """Send as a source, receive from source 0 as another; returns when the tensors may be written, or read, again.

        Every member gives as many tensors of the same sizes, contiguous, which travel in turn over the streams.

        Args:
            deadline: of `time.monotonic`; `spec.timeout_s` from now if not given.

        Raises:
            GroupError: not all went through within the deadline, which for those that must wait for others begins anew
                when they begin. Nothing reads or writes the tensors any more.
        """
        self._run([tensors], deadline)

    def receive(self, shares: Sequence[Sequence[Tensor]]) -> None:
        """Receive what every source sends, the share of each, at the same time; otherwise as `broadcast`."""
        self._run(shares, None)

    def _run(self, shares: Sequence[Sequence[Tensor]], deadline: float | None) -> None:
        streams = list(self._streams)
        if not streams:
            raise GroupError("broadcast: the group was left")
        todo = _by_turns(shares, streams)
        streams.clear()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if deadline is None:
            deadline = time.monotonic() + self._timeout.total_seconds()
        # A broadcast ends at its own deadline; to give up waiting sooner would leave it under way.
        limit = max(self._timeout, timedelta(seconds=deadline - time.monotonic()))
        under_way: deque[Any] = deque()
        try:
            for group, tensor in todo:
                if len(under_way) == UNDER_WAY:
                    _finish_first(under_way, limit)
                options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
                under_way.append(group.broadcast([tensor], options))
            while under_way:
                _finish_first(under_way, limit)
        except (RuntimeError, dist.DistError) as error:
            _wait_for_ends(under_way, limit)
            raise GroupError(f"broadcast: {_first_line(error)}") from error
        finally:
            # An error keeps this frame alive, and what is in it would keep the connections open after `drop`.
            group = None
            todo.clear()
            under_way.clear()
        if any(tensor.is_cuda for share in shares for tensor in share):
            torch.cuda.synchronize()

    def drop(self) -> None:
        """Leave, without waiting for what may be under way."""
        # The destructor waits until a broadcast that broke off is out of time; a thread of its own can afford that. It
        # is no daemon: the interpreter aborts where a thread comes back from torch after the interpreter has ended.
        last_references, self._streams = self._streams, []
        threading.Thread(target=last_references.clear, name="drop-group").start()


def serve_store(address: str, world_size: int, timeout_s: float) -> Any:
    """The store through which the members find each other, on a free port of `address`; rank 0 keeps it."""
    return dist.TCPStore(
        address, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip


def _finish_first(under_way: deque[Any], limit: timedelta) -> None:
    under_way[0].wait(limit)
    under_way.popleft()


def _wait_for_ends(under_way: Iterable[Any], limit: timedelta) -> None:
    for work in under_way:
        # That it fails, as the first did, says nothing new.
        with suppress(RuntimeError, dist.DistError):
            work.wait(limit)


def _by_turns(shares: Sequence[Sequence[Tensor]], streams: Sequence[Sequence[Any]]) -> list[tuple[Any, Tensor]]:
    """(group, tensor) of all shares, one of each after the other, so that the sources send side by side."""
    placed = [
        [(groups[number % len(groups)], tensor) for number, tensor in enumerate(share)]
        for share, groups in zip(shares, streams, strict=False)
    ]
    return [each for turn in zip_longest(*placed) for each in turn if each is not None]


def _make(keys: Any, rank: int, spec: GroupSpec, timeout: timedelta) -> Any:
    if spec.backend == "gloo":
        return dist.ProcessGroupGloo(keys, rank, spec.world_size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(keys, rank, spec.world_size, options)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
