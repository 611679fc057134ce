"""The group that carries buckets from the trainer to engines. The sender is rank 0, the receivers follow.

1. All members meet over gloo, which notices at once when one of them leaves.
2. For each bucket the sender announces the length over gloo. So whoever waits for a bucket waits there, on a socket.
3. The bytes follow over gloo too, or, between GPUs, over NCCL, once all members have told each other over gloo that
   they are ready for them. So no kernel of NCCL runs that waits for anything but the network.

The process groups are bare ones, independent of torch's default group, which spans only the trainer or only the engine.

The kernels of NCCL run on a stream of their own: no other work of the process waits for them, and they wait for none.
Torch neither watches its group nor ends the process because of it: a member that is late or gone is an error of one
broadcast, and whoever leaves aborts the group, so no kernel keeps running on the device.
"""

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.data.model_weights import GroupSpec

_BACKLOG = 2048
"""Backlog of the store's socket, as torch has it"""
RECEIVER_BUFFERS = 2
"""Number of buckets that a receiver has room for."""

_ERRORS = (RuntimeError, dist.DistError)
"""What torch raises for a member that left or is late."""

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that torch reads when it makes a group; 0: a late broadcast does not end the process."""


class GroupError(Exception):
    """A member did not join, left, or was late; the group is broken."""


class BroadcastGroup:
    """One member of the group: the sender or a receiver. One thread at a time uses it; any thread may drop it."""

    def __init__(self, spec: GroupSpec, rank: int, store: Any = None) -> None:
        """Returns when all members have joined.

        Args:
            store: rank 0's, which serves the others; None to connect to it.

        Raises:
            GroupError: members have not joined within `spec.timeout_s`.
        """
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._nccl: NcclGroup | None = None
        try:
            if store is None:
                store = dist.TCPStore(
                    spec.address, spec.port, spec.world_size, is_master=False, timeout=self._timeout,
                    wait_for_workers=False,
                )  # fmt: skip
            keys = dist.PrefixStore(spec.name, store)
            self._gloo: list[Any] = [dist.ProcessGroupGloo(keys, rank, spec.world_size, timeout=self._timeout)]
            # Its threads drop tensors after an operation, for which they need the interpreter. The destructor joins
            # them, so it has to run before the interpreter ends.
            weakref.finalize(self, self._gloo.clear)
            if spec.backend == "nccl":
                self._nccl = NcclGroup(dist.PrefixStore("nccl", keys), rank, spec.world_size, self._timeout)
        except _ERRORS as error:
            raise GroupError(f"joining group {spec.name}: {_first_line(error)}") from error

    def announce(self, nbytes: int, deadline: float | None = None) -> None:
        """Tell the receivers the length of the next broadcast, as rank 0; see `broadcast`."""
        self._over_gloo("broadcast", torch.tensor([nbytes]), deadline)

    def announced(self) -> int:
        """The length that rank 0 announces, as a receiver; see `broadcast`."""
        length = torch.zeros(1, dtype=torch.int64)
        self._over_gloo("broadcast", length, None)
        return int(length)

    def broadcast(self, tensor: Tensor, deadline: float | None = None) -> None:
        """Send as rank 0, receive as another rank; returns when the tensor may be written, or read.

        Args:
            tensor: contiguous, of the same size for every member; no work that is queued on its device writes it.
            deadline: of `time.monotonic`, at most `spec.timeout_s` from now; None for just that.

        Raises:
            GroupError: it did not end within the deadline. For members that wait for others, the deadline begins anew
                when these begin. Nothing reads or writes the tensor any more.
        """
        nccl = self._nccl
        if nccl is None:
            self._over_gloo("broadcast", tensor, deadline)
            return
        # Before any kernel waits for a member, all are there.
        self._over_gloo("allreduce", torch.zeros(1), deadline)
        try:
            nccl.broadcast(tensor, self._left(deadline))
        except _ERRORS as error:
            raise GroupError(f"broadcast: {_first_line(error)}") from error

    def drop(self) -> None:
        """Leave, without waiting for a broadcast that is running."""
        # The destructor waits for the deadline of a failed broadcast, so it runs in a thread of its own. Not a daemon:
        # the interpreter aborts if a thread returns from torch after the interpreter has ended.
        gloo, self._gloo = self._gloo, []
        _start(gloo.clear, "drop-group")
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            _start(nccl.abort, "abort-group")

    def _over_gloo(self, operation: str, tensor: Tensor, deadline: float | None) -> None:
        """Run an operation of the gloo group on one tensor to its end; raises GroupError."""
        group = next(iter(self._gloo), None)
        if group is None:
            raise GroupError("broadcast: this member has left the group")
        options = dist.BroadcastOptions() if operation == "broadcast" else dist.AllreduceOptions()
        options.timeout = self._left(deadline)
        work = None
        try:
            # It ends at its own deadline; a shorter wait would leave it running.
            work = getattr(group, operation)([tensor], options)
            work.wait(self._timeout)
        except _ERRORS as error:
            if work is not None:
                # Its own deadline may have begun later than this wait.
                with suppress(*_ERRORS):
                    work.wait(self._timeout)
            raise GroupError(f"broadcast: {_first_line(error)}") from error
        finally:
            # An error keeps this frame alive, and its reference would keep the connections open after `drop`.
            group = work = None

    def _left(self, deadline: float | None) -> timedelta:
        return self._timeout if deadline is None else timedelta(seconds=max(deadline - time.monotonic(), 0.001))


class NcclGroup:
    """One member of the group, on the current device."""

    def __init__(self, keys: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _environment(ERROR_HANDLING, "0"):
            self._group: Any = dist.ProcessGroupNCCL(keys, rank, world_size, options)
        self._stream = torch.cuda.Stream()

    def broadcast(self, tensor: Tensor, timeout: timedelta) -> None:
        """Broadcast a tensor from rank 0; returns when the tensor may be written, or read.

        The first one connects the members, for which there is no deadline: a member that is lost meanwhile keeps this
        call waiting, which whoever waits for its thread has to expect.

        Args:
            tensor: no other work on the device may still write it.

        Raises:
            RuntimeError: it did not end in time, and torch has aborted it, or the group was aborted.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with torch.cuda.stream(self._stream):
            # With a limit it blocks until the kernel has ended.
            self._group.broadcast([tensor], options).wait(timeout)
            self._stream.synchronize()

    def abort(self) -> None:
        """End a broadcast that is running, in this process alone, and free what the group holds."""
        self._group.abort()


def serve_store(address: str, world_size: int, timeout_s: float) -> Any:
    """The store through which the members find each other, on a free port of `address`; rank 0 keeps it."""
    # By itself torch listens on all interfaces.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=_BACKLOG) as listener:
        return dist.TCPStore(
            address, listener.getsockname()[1], world_size, is_master=True, timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip


def _start(call: Callable[[], None], name: str) -> None:
    """Run a call in a thread; or here, while the interpreter waits for its threads before its end, since it begins no
    others then."""
    try:
        threading.Thread(target=call, name=name).start()
    except RuntimeError:
        call()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
