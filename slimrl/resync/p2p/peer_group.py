"""The group through which trainer ranks send a version to the ranks of one engine, and these pass it on.

1. Members meet over gloo, which notices at once when one of them leaves.
2. Numbers, such as the length of a message, travel over gloo. So whoever waits for another member waits on a socket.
3. Messages follow over gloo too, or, between GPUs, over NCCL, once their receivers have said over gloo that they are
   ready. So no kernel of NCCL runs that waits for anything but the network.

The process groups are bare ones, independent of torch's default group, which spans only the trainer or only the engine.

The kernels of NCCL run on a stream of their own: no other work of the process waits for them, and they wait for none.
Torch neither watches its group nor ends the process because of it: a member that is late or gone is an error of one
message, and whoever leaves aborts the group, so no kernel keeps running on the device.
"""

import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl import device
from slimrl.data.model_weights import GroupSpec

_BACKLOG = 2048
"""Backlog of the store's socket, as torch has it"""
_NUMBERS, _BYTES = 1, 2
"""Tags of gloo's messages"""
MAX_CTAS = 4
"""Blocks of threads of NCCL's kernels: a trainer rank may be in a group for each of many engines, and kernels that wait
for each other must all fit on the device."""

_ERRORS = (RuntimeError, dist.DistError)
"""What torch raises for a member that left or is late."""

_LEFT = "this member has left the group"

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that torch reads when it makes a group; 0: a late message does not end the process."""
_ENVIRONMENT = threading.Lock()
"""Held by the thread that has it set"""


class GroupError(Exception):
    """A member did not join, left, or was late; the group is broken."""


class Move(NamedTuple):
    """A message that this member sends or receives."""

    peer: int
    data: Tensor
    """uint8, contiguous; no queued work of the device may touch it until the message has ended"""
    sends: bool


class PeerGroup:
    """One member of the group. One thread at a time uses it; any thread may drop it.

    Returns when all members have joined.

    Args:
        spec: see GroupSpec; each member has a connection of its own to the store, for one that waits for a key lets
            nobody else use it.

    Raises:
        GroupError: members have not joined within `spec.timeout_s`.
    """

    def __init__(self, spec: GroupSpec, member: int) -> None:
        self._timeout = timedelta(seconds=spec.timeout_s)
        self._nccl: _NcclPeers | None = None
        try:
            keys = dist.PrefixStore(spec.name, connect_store(spec))
            self._gloo: list[Any] = [dist.ProcessGroupGloo(keys, member, spec.world_size, timeout=self._timeout)]
            self._under_way: weakref.WeakSet[Pending] = weakref.WeakSet()
            self._lock = threading.Lock()
            # Its threads drop tensors after an operation, for which they need the interpreter. The destructor joins
            # them, so it has to run before the interpreter ends.
            weakref.finalize(self, self._gloo.clear)
            if spec.backend == "nccl":
                self._nccl = _NcclPeers(dist.PrefixStore("nccl", keys), member, spec.world_size, self._timeout)
        except _ERRORS as error:
            raise GroupError(f"joining group {spec.name}: {_first_line(error)}") from error

    def tell(self, peers: Sequence[int], numbers: Sequence[Sequence[int]], deadline: float) -> "Pending":
        """Send some numbers to each of the peers. The result has to be waited for, after their receivers have read."""
        moves = [
            Move(peer, torch.tensor(each, dtype=torch.int64).view(torch.uint8), sends=True)
            for peer, each in zip(peers, numbers, strict=True)
        ]
        return self._over_gloo(moves, _NUMBERS, deadline)

    def told(self, peers: Sequence[int], count: int, deadline: float) -> list[list[int]]:
        """The `count` numbers that each of the peers tells this member."""
        received = [torch.zeros(count, dtype=torch.int64) for _ in peers]
        moves = [Move(peer, each.view(torch.uint8), sends=False) for peer, each in zip(peers, received, strict=True)]
        self._over_gloo(moves, _NUMBERS, deadline).wait()
        return [each.tolist() for each in received]

    def start(self, moves: Sequence[Move], deadline: float) -> "Pending":
        """Begin messages, whose other ends are there.

        Args:
            deadline: of `time.monotonic`.

        Raises:
            GroupError: a member has left.
        """
        if self._nccl is None or not moves:
            return self._over_gloo(moves, _BYTES, deadline)
        try:
            return self._nccl.start(moves, deadline)
        except _ERRORS as error:
            raise GroupError(_first_line(error)) from error

    def drop(self, memory: Sequence[Tensor] = ()) -> None:
        """Leave, without waiting for messages that are under way.

        Args:
            memory: what they may still read or write until their end; it is kept until then.
        """
        # The destructor waits for the deadline of a failed message, so it runs in a thread of its own. Not a daemon:
        # the interpreter aborts if a thread returns from torch after the interpreter has ended.
        gloo, self._gloo = self._gloo, []
        # Messages keep the connections open too, and an error that is kept keeps the frames that hold them.
        with self._lock:
            under_way = list(self._under_way)
        for pending in under_way:
            gloo += pending.forget()
        _start(gloo.clear, "drop-group")
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            _start(partial(nccl.abort, list(memory)), "abort-group")

    def _over_gloo(self, moves: Sequence[Move], tag: int, deadline: float) -> "Pending":
        group = next(iter(self._gloo), None)
        if group is None:
            raise GroupError(_LEFT)
        pending = Pending([], deadline)
        with self._lock:
            self._under_way.add(pending)
        try:
            for move in moves:
                pending.add(move, (group.send if move.sends else group.recv)([move.data], move.peer, tag))
        except _ERRORS as error:
            raise GroupError(_first_line(error)) from error
        finally:
            # An error keeps this frame alive, and its reference would keep the connections open after `drop`.
            group = None
        return pending


class Pending:
    """Messages under way; keeps their memory alive."""

    def __init__(self, works: Sequence[tuple[Move, Any]], deadline: float) -> None:
        self._works, self._deadline, self._forgotten = deque(works), deadline, False

    def add(self, move: Move, work: Any) -> None:
        self._works.append((move, work))

    def forget(self) -> list[Any]:
        """Give up the messages, since the member leaves; returns what keeps its connections open."""
        self._forgotten = True
        works = list(self._works)
        self._works.clear()
        return works

    def wait(self) -> None:
        """Returns when all have ended and their memory may be read, or written.

        Raises:
            GroupError: one did not end by the deadline, its other end is gone, or this member has left.
        """
        while True:
            try:
                move, work = self._works.popleft()
            except IndexError:
                break
            try:
                work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
            except _ERRORS as error:
                direction = "to" if move.sends else "from"
                raise GroupError(f"message {direction} member {move.peer}: {_first_line(error)}") from error
            finally:
                # As in `_over_gloo`.
                work = None
        if self._forgotten:
            raise GroupError(_LEFT)


class _NcclPeers:
    """One member of the group, on the current device."""

    def __init__(self, keys: Any, member: int, world_size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.max_ctas = MAX_CTAS
        # Not longer than torch reads it: other threads make groups at the same time, and wait for this one's members.
        with _ENVIRONMENT, _environment(ERROR_HANDLING, "0"):
            self._group: Any = dist.ProcessGroupNCCL(keys, member, world_size, options)
        try:
            self._connect(timeout)
        except _ERRORS:
            self.abort([])
            raise
        self._stream = torch.cuda.Stream()

    def _connect(self, timeout: timedelta) -> None:
        """NCCL connects all members in a group's first call, and messages are between some of them."""
        first = torch.zeros(1, device=device.compute_device())
        self._group.allreduce([first], dist.AllreduceOptions()).wait(timeout)

    def start(self, moves: Sequence[Move], deadline: float) -> Pending:
        """One launch for all messages; see PeerGroup.start."""
        with torch.cuda.stream(self._stream):
            self._group._start_coalescing()
            try:
                for move in moves:
                    function = self._group.send if move.sends else self._group.recv
                    function([move.data], move.peer, 0)
            except _ERRORS:
                # While it is open, NCCL holds back whatever else this thread begins, also in other groups.
                with suppress(*_ERRORS):
                    self._group._end_coalescing()
                raise
            work = self._group._end_coalescing()
        return Pending([(moves[0], _OnStream(work, self._stream))], deadline)

    def abort(self, memory: Sequence[Tensor]) -> None:
        """End messages that are under way, in this process alone, and free what the group holds.

        Args:
            memory: of the messages, which the caller's frame keeps until this returns.
        """
        self._group.abort()


class _OnStream:
    """A launch whose wait returns when the device has done it."""

    def __init__(self, work: Any, stream: Any) -> None:
        self._work, self._stream, self._started = work, stream, time.monotonic()

    def wait(self, timeout: timedelta) -> None:
        # Torch counts the limit from the launch.
        timeout += timedelta(seconds=time.monotonic() - self._started)
        with torch.cuda.stream(self._stream):
            # With a limit it blocks until the kernel has ended.
            self._work.wait(timeout)
            self._stream.synchronize()


def serve_store(address: str, timeout_s: float) -> Any:
    """The store through which the members of groups find each other, on a free port of `address`."""
    # By itself torch listens on all interfaces.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=_BACKLOG) as listener:
        return dist.TCPStore(
            address, listener.getsockname()[1], None, is_master=True, timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip


def connect_store(spec: GroupSpec) -> Any:
    """A connection to the store through which the members find each other."""
    timeout = timedelta(seconds=spec.timeout_s)
    return dist.TCPStore(spec.address, spec.port, None, is_master=False, timeout=timeout, wait_for_workers=False)


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
