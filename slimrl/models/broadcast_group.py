"""The process group through which a trainer's buckets reach engines: the sender is rank 0, the receivers follow.

Both ends make it by this code, as a bare process group beside torch's default one, which spans the trainer or the
engine alone.
"""

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.data.protocols import GroupSpec


class GroupError(Exception):
    """A member did not join, left, or outran the deadline; the group is of no use any more."""


class BroadcastGroup:
    """One member. Used by one thread at a time."""

    def __init__(self, spec: GroupSpec, rank: int, store: Any = None) -> None:
        """Returns when all members have joined (gloo), or at the first broadcast at the latest (NCCL).

        Args:
            store: rank 0's, which serves the others; None to connect to it.

        Raises:
            GroupError: some have not joined within `spec.timeout_s`.
        """
        self._timeout = timedelta(seconds=spec.timeout_s)
        try:
            if store is None:
                store = dist.TCPStore(
                    spec.address, spec.port, spec.world_size, is_master=False, timeout=self._timeout,
                    wait_for_workers=False,
                )  # fmt: skip
            keys = dist.PrefixStore(spec.name, store)
            self._group: Any = _make(keys, rank, spec, self._timeout)
        except (RuntimeError, dist.DistError) as error:
            raise GroupError(f"joining group {spec.name}: {_first_line(error)}") from error

    def broadcast(self, tensor: Tensor) -> None:
        """Send as rank 0, receive as another; returns when `tensor` may be written, or read, again.

        Raises:
            GroupError
        """
        if self._group is None:
            raise GroupError("broadcast: the group was left")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._group.broadcast([tensor], options).wait(self._timeout)
        except (RuntimeError, dist.DistError) as error:
            raise GroupError(f"broadcast: {_first_line(error)}") from error
        if tensor.is_cuda:
            torch.cuda.synchronize()

    def drop(self) -> None:
        """Leave, without waiting for what may be under way."""
        # The destructor waits until a broadcast that broke off is out of time; a thread of its own can afford that.
        last_reference = [self._group]
        self._group = None
        threading.Thread(target=last_reference.clear, name="drop-group", daemon=True).start()


def serve_store(address: str, world_size: int, timeout_s: float) -> Any:
    """The store through which the members find each other, on a free port of `address`; rank 0 keeps it."""
    return dist.TCPStore(
        address, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        multi_tenant=True,
    )  # fmt: skip


def _make(keys: Any, rank: int, spec: GroupSpec, timeout: timedelta) -> Any:
    if spec.backend == "gloo":
        return dist.ProcessGroupGloo(keys, rank, spec.world_size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(keys, rank, spec.world_size, options)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
