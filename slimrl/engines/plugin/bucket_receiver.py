"""The engine's end of the `collective` transport: a thread that receives buckets while the engine loads earlier ones.

1. The trainer opens a version with a message to all ranks of the engine. The first rank of the engine on each node is a
   receiver: its thread joins the broadcast group, unless it is a member already, and waits for buckets.
2. Each bucket is announced with its length and then broadcast, into one of two buffers in turn. The length 0 ends
   the version. The buffers have the size of the largest bucket, live as long as the group, and can be mapped by the
   node's other processes.
3. After the broadcast the trainer tells all ranks to load the bucket: each copies what it holds out of the receiver's
   buffer. The trainer sends the bucket after the next one only when they have, so no buffer is overwritten too early.

Only this thread waits for the network, with the group's deadline. The engine's own thread waits for it, for a bucket
or for the end of the version before, at most half of that deadline each time. So the engine answers in time even if the
group is broken.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from slimrl import device
from slimrl.data.model_weights import GroupSpec
from slimrl.resync.ipc.broadcast_group import RECEIVER_BUFFERS, BroadcastGroup, GroupError
from slimrl.resync.ipc.shared_buffer import SharedBuffer, open_shared, shared_buffer

WAIT_FRACTION = 0.5
"""Part of the group's deadline that the engine's own thread waits at a time."""


class BucketReceiver:
    """One member of a broadcast group, from joining to leaving it."""

    def __init__(self, spec: GroupSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._group: BroadcastGroup | None = None
        self._buffers: dict[int, tuple[SharedBuffer, str]] = {}
        self._changed = threading.Condition()
        self._received = 0
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def open_version(self) -> None:
        """Start to receive a version.

        Raises:
            GroupError: the version before has not ended, or has failed.
        """
        if self._thread is not None:
            self._thread.join(WAIT_FRACTION * self._spec.timeout_s)
            if self._thread.is_alive() or self._error is not None:
                raise GroupError(self._error or "the version before has not ended")
        self._received = 0
        # No daemon, as in BroadcastGroup.drop; its broadcasts have a deadline.
        self._thread = threading.Thread(target=self._run, args=(device.compute_device(),), name="receive-buckets")
        self._thread.start()

    def bucket(self, number: int) -> tuple[Tensor, str]:
        """(memory with bucket `number` of the version, counted from 0; its segment for `open_shared`), once received.

        Raises:
            GroupError: it was not received in time, or never will be.
        """
        timeout_s = WAIT_FRACTION * self._spec.timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._received > number or self._error is not None, timeout_s)
            if self._received <= number:
                raise GroupError(self._error or f"bucket {number} has not come within {timeout_s:g} s")
        buffer, segment = self._buffers[number % RECEIVER_BUFFERS]
        return buffer.tensor, segment

    def drop_name(self, number: int) -> None:
        """Unlink the buffer of a bucket, now that all processes have mapped it; the last of them frees it."""
        if number % RECEIVER_BUFFERS in self._buffers:
            self._buffers[number % RECEIVER_BUFFERS][0].close()

    def close(self) -> None:
        """Leave the group; the thread ends when its broadcast does."""
        for number in range(RECEIVER_BUFFERS):
            self.drop_name(number)
        if self._group is not None:
            self._group.drop()

    def _run(self, compute_device: torch.device) -> None:
        if compute_device.type == "cuda":
            torch.cuda.set_device(compute_device)
        try:
            if self._group is None:
                self._group = BroadcastGroup(self._spec, self._rank)
            self._receive(self._group)
        except (GroupError, OSError, RuntimeError) as error:
            # OSError, RuntimeError: no memory for a buffer. After the drop the waiting sender notices at once.
            if self._group is not None:
                self._group.drop()
            with self._changed:
                self._error = str(error)
                self._changed.notify_all()

    def _receive(self, group: BroadcastGroup) -> None:
        while nbytes := group.announced():
            group.broadcast(self._buffer(self._received % RECEIVER_BUFFERS)[:nbytes])
            with self._changed:
                self._received += 1
                self._changed.notify_all()

    def _buffer(self, index: int) -> Tensor:
        """uint8 [bucket_bytes of the group]"""
        if index not in self._buffers:
            buffer = shared_buffer(self._spec.bucket_bytes, "received", device.compute_device())
            self._buffers[index] = buffer, buffer.segment()
        return self._buffers[index][0].tensor


class EngineReceivers:
    """One rank of an engine in the `collective` transport, for the engine's model and its draft model."""

    def __init__(self, ranks: "EngineRanks") -> None:
        self._ranks = ranks
        self._receiver: BucketReceiver | None = None
        self.group_name: str | None = None
        """Name of the group of which this engine is a member; None if it is in none"""
        self._mapped: dict[str, Tensor] = {}

    def open_version(self, spec: GroupSpec, first_rank: int) -> None:
        """Receive a version through this group, which a rank of each node joins.

        Args:
            first_rank: rank in the group of this engine's first receiver.

        Raises:
            GroupError: see BucketReceiver.open_version.
        """
        if self.group_name != spec.name:
            self.close()
            self.group_name = spec.name
            node, index = divmod(self._ranks.rank, self._ranks.per_node)
            if index == 0:
                self._receiver = BucketReceiver(spec, first_rank + node)
        if self._receiver is not None:
            self._receiver.open_version()

    def bucket(self, group_name: str, number: int) -> Tensor:
        """The memory that holds bucket `number`; all ranks of the engine call it together.

        Raises:
            GroupError: a receiver of this engine does not have it, or this engine is not in the group.
            OSError: it cannot be mapped.
        """
        own, segment, problem = None, "", None
        try:
            if self.group_name != group_name:
                raise GroupError(f"not in group {group_name}")
            if self._receiver is not None:
                own, segment = self._receiver.bucket(number)
        except GroupError as error:
            problem = str(error)
        answers = self._ranks.exchange((segment, problem))
        if problems := [text for _, text in answers if text is not None]:
            raise GroupError(problems[0])
        if own is not None:
            return own
        segment, _ = answers[self._ranks.rank // self._ranks.per_node * self._ranks.per_node]
        if segment not in self._mapped:
            self._mapped[segment] = open_shared(segment)
        return self._mapped[segment]

    def all_loaded(self, number: int) -> None:
        """Call it when every rank of the engine has loaded this bucket, or failed to."""
        if self._receiver is not None:
            self._receiver.drop_name(number)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self.group_name = None, None
        self._mapped.clear()


class EngineRanks:
    """The tensor-parallel ranks of an SGLang engine, from within one of them."""

    def __init__(self) -> None:
        from sglang.srt.runtime_context import get_parallel, get_server_args

        group = get_parallel().tp_group
        self.kept: dict[str, Any] = vars(group)
        """Attributes that this process keeps from one request to the next, whichever of its models they are for."""
        self.rank: int = group.rank_in_group
        self.per_node: int = group.world_size // get_server_args().nnodes
        self._world_size: int = group.world_size
        self._cpu_group: Any = group.cpu_group

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; all ranks call it."""
        if self._world_size == 1:
            return [value]
        values: list[Any] = [None] * self._world_size
        torch.distributed.all_gather_object(values, value, group=self._cpu_group)
        return values
