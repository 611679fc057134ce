"""The engine's end of the `collective` transport: a thread that receives buckets while the engine loads earlier ones.

1. The trainer opens a version with a message to all ranks of the engine. The first rank of the engine on each node is a
   receiver: its thread joins the broadcast group, unless it is in it already, and waits for buckets.
2. Each bucket is a broadcast of two lengths, its own and that of a table, then of the table, then of each piece in it,
   which the table's sources send side by side. Pieces go into one of two buffers in turn, at their place in the bucket;
   but where the engine has one rank per node, an expert that it holds whole goes straight into its parameter. The
   length 0 ends the version. The buffers have the size of the largest bucket, are kept as long as the group, and are
   memory that the node's other processes can map.
3. When a bucket is out, the trainer tells all ranks to load it: out of the receiver's buffer, each what it holds. It
   sends the bucket after the next one only when they have, so no buffer is overwritten before.

Only the thread waits for the network, with the group's deadline. The engine's own thread waits for this one: for a
bucket, for the end of the version before, and before it leaves a group until nothing is written to its parameters any
more; each time for half of that deadline at most, so it answers in time, whatever becomes of the group.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slimrl import device
from slimrl.data.protocols import GroupSpec
from slimrl.models.broadcast_group import BroadcastGroup, GroupError
from slimrl.models.broadcast_pieces import Piece, decode_pieces
from slimrl.models.shared_buffer import CudaBuffer, FileBuffer, SharedBuffer
from slimrl.models.shared_segment import open_shared

NUM_BUFFERS = 2

WAIT_SHARE = 0.5
"""Of the group's deadline: how long a load waits for a bucket that the trainer has sent."""


class BucketReceiver:
    """One member of a group, from joining to leaving it."""

    def __init__(self, spec: GroupSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._group: BroadcastGroup | None = None
        self._buffers: dict[int, tuple[SharedBuffer, str]] = {}
        self._places: Mapping[str, Tensor] = {}
        self._placed: list[frozenset[str]] = [frozenset()] * NUM_BUFFERS
        self._placing = self._closed = False
        self._changed = threading.Condition()
        self._received = 0
        self._error: str | None = None
        self._thread: threading.Thread | None = None

    def open_version(self, places: Mapping[str, Tensor]) -> None:
        """Start to receive.

        Args:
            places: where tensors of these names are wanted, if they come whole and fit.

        Raises:
            GroupError: the version before has not ended, or has ended badly.
        """
        if self._thread is not None:
            self._thread.join(WAIT_SHARE * self._spec.timeout_s)
            if self._thread.is_alive() or self._error is not None:
                raise GroupError(self._error or "the version before has not ended")
        self._received, self._places = 0, places
        # No daemon, as in BroadcastGroup.drop; its broadcasts have a deadline.
        self._thread = threading.Thread(target=self._run, args=(device.compute_device(),), name="receive-buckets")
        self._thread.start()

    def bucket(self, number: int) -> tuple[Tensor, str]:
        """(memory that holds bucket `number` of the version, from 0; its name for other processes), once it has come.

        Raises:
            GroupError: it has not come in time, or never will.
        """
        timeout_s = WAIT_SHARE * self._spec.timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._received > number or self._error is not None, timeout_s)
            if self._received <= number:
                raise GroupError(self._error or f"bucket {number} has not come within {timeout_s:g} s")
        buffer, segment = self._buffers[number % NUM_BUFFERS]
        return buffer.tensor, segment

    def placed(self, number: int) -> frozenset[str]:
        """Tensors of bucket `number`, which has come, that lie in their places and not in its memory."""
        return self._placed[number % NUM_BUFFERS]

    def drop_name(self, number: int) -> None:
        """Processes that are to map the buffer of a bucket have done so; now it ends with the last of them."""
        if number % NUM_BUFFERS in self._buffers:
            self._buffers[number % NUM_BUFFERS][0].close()

    def close(self) -> None:
        """Leave the group; the thread ends when its broadcast does.

        Raises:
            GroupError: it still may write to the engine's parameters.
        """
        for number in range(NUM_BUFFERS):
            self.drop_name(number)
        if self._group is not None:
            self._group.drop()
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._placing, WAIT_SHARE * self._spec.timeout_s):
                raise GroupError(f"group {self._spec.name} still receives")

    def _run(self, compute_device: torch.device) -> None:
        if compute_device.type == "cuda":
            torch.cuda.set_device(compute_device)
        try:
            if self._group is None:
                self._group = BroadcastGroup(self._spec, self._rank)
            self._receive(self._group, torch.zeros(2, dtype=torch.int64, device=compute_device))
        except (GroupError, OSError) as error:
            self._fail(str(error))
        except (ValueError, AttributeError, TypeError, IndexError, RuntimeError) as error:
            # A table or a size that this end does not understand; nobody else hears of it.
            self._fail(f"a bucket could not be received: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        # Sources that wait for this end to take something notice at once.
        if self._group is not None:
            self._group.drop()
        with self._changed:
            self._error = reason
            self._changed.notify_all()

    def _receive(self, group: BroadcastGroup, lengths: Tensor) -> None:
        while True:
            group.broadcast(lengths)
            nbytes, table_nbytes = lengths.tolist()
            if nbytes == 0:
                return
            table = lengths.new_empty(table_nbytes, dtype=torch.uint8)
            group.broadcast(table)
            slot = self._received % NUM_BUFFERS
            flat, pieces = self._buffer(slot), decode_pieces(table.tolist())
            placed = {piece.name: place for piece in pieces if (place := self._place(piece)) is not None}
            shares: list[list[Tensor]] = [[] for _ in range(self._spec.num_sources)]
            for piece in pieces:
                packed = flat[piece.offset : piece.offset + piece.nbytes]
                shares[piece.source].append(placed.get(piece.name, packed))
            self._set_placing(bool(placed))
            try:
                group.receive(shares)
            finally:
                self._set_placing(False)
            with self._changed:
                self._placed[slot] = frozenset(placed)
                self._received += 1
                self._changed.notify_all()

    def _place(self, piece: Piece) -> Tensor | None:
        """Bytes of a parameter that take the piece as it is; None where it goes through a buffer."""
        place = self._places.get(piece.name)
        if place is None or (tuple(place.shape), place.dtype) != (piece.shape, getattr(torch, piece.dtype)):
            return None
        return place.view(-1).view(torch.uint8)

    def _set_placing(self, placing: bool) -> None:
        with self._changed:
            if placing and self._closed:
                raise GroupError("the group was left")
            self._placing = placing
            self._changed.notify_all()

    def _buffer(self, index: int) -> Tensor:
        """uint8 [bucket_bytes of the group]"""
        if index not in self._buffers:
            nbytes = self._spec.bucket_bytes
            if device.device_type() == "cuda":
                buffer: SharedBuffer = CudaBuffer(nbytes, device.compute_device())
            else:
                buffer = FileBuffer(nbytes, "received")
            self._buffers[index] = buffer, buffer.segment()
        return self._buffers[index][0].tensor


class EngineReceivers:
    """What one rank of an engine does for the transport; it is kept beside the engine's model."""

    def __init__(self, ranks: "EngineRanks") -> None:
        self._ranks = ranks
        self._receiver: BucketReceiver | None = None
        self.group_name: str | None = None
        """Of the group that this engine is in."""
        self._mapped: dict[str, Tensor] = {}

    def open_version(self, spec: GroupSpec, first_rank: int, places: Mapping[str, Tensor] | None = None) -> None:
        """Take part in a version that comes through this group; a rank of each node joins it.

        Args:
            first_rank: of this engine's receivers within the group.
            places: where this rank wants tensors of these names, if it is a receiver.

        Raises:
            GroupError: see BucketReceiver.open_version and close.
        """
        if self.group_name != spec.name:
            self.close()
            self.group_name = spec.name
            node, index = divmod(self._ranks.rank, self._ranks.per_node)
            if index == 0:
                self._receiver = BucketReceiver(spec, first_rank + node)
        if self._receiver is not None:
            self._receiver.open_version(places or {})

    def bucket(self, group_name: str, number: int) -> Tensor:
        """The memory that holds bucket `number`; every rank of the engine asks for it at the same time.

        Raises:
            GroupError: a receiver of this engine has not got it, or this engine is not in the group.
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

    def placed(self, number: int) -> frozenset[str]:
        """Tensors of bucket `number` that this rank need not load, since they lie in their places."""
        return frozenset() if self._receiver is None else self._receiver.placed(number)

    def all_loaded(self, number: int) -> None:
        """Every rank of the engine has loaded this bucket, or failed to."""
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
        self.rank: int = group.rank_in_group
        self.per_node: int = group.world_size // get_server_args().nnodes
        self._world_size: int = group.world_size
        self._cpu_group: Any = group.cpu_group

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; all ranks call it."""
        if self._world_size == 1:
            return [value]
        values: list[Any] = [None] * self._world_size
        torch.distributed.all_gather_object(values, value, group=self._cpu_group)
        return values
