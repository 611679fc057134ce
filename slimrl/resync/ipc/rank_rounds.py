"""One trainer rank's part of the rounds of the `ipc` transport, with its memory.

A receiver has two slots for each set of engines, which its node's ranks and the engines map. For each round,

1. messages between nodes begin, from a staging buffer into the slot of a receiver;
2. meanwhile each rank writes what it holds for receivers of its node straight into their slots, and stages what it
   sends to other nodes in the next round;
3. when all that has arrived on a node, receivers send on what engines of other nodes keep too.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl import device
from slimrl.data.peer_messages import views
from slimrl.resync.ipc.deliveries import Deliveries, Delivery, aligned
from slimrl.resync.ipc.shared_buffer import SharedBuffer, open_shared, shared_buffer
from slimrl.resync.ipc.stale_files import clean_stale_segments
from slimrl.resync.p2p.sent_values import SentValues
from slimrl.resync.ranks import Ranks, other_ranks
from slimrl.resync.steps import NUM_SLOTS

Part = Sequence[Deliveries]
"""The rounds of a set of engines, with the deliveries that concern this rank"""

Segments = dict[int, list[str]]
"""Segments of the slots of each receiver, by trainer rank"""


class RankRounds:
    """All ranks construct it together. Frees the buffers of killed runs first.

    Args:
        parts: this rank's part of each set.
        run_id: part of the names of files.
        timeout_s: deadline of a wait for another rank.

    Raises:
        OSError: on all ranks, when a node or a device has no memory left.
        RankError: another rank died or is late.
    """

    def __init__(self, parts: Sequence[Part], values: SentValues, ranks: Ranks, *, run_id: str, timeout_s: float):
        clean_stale_segments()
        self._values, self._ranks = values, ranks
        self._parts = parts
        self._slots: list[list[SharedBuffer]] = [[] for _ in parts]
        self._staging: list[Tensor] = []
        self._mapped: dict[tuple[int, int], list[Tensor]] = {}
        self._group: Any = None
        try:
            self._allocate(run_id)
            self.segments = self._gather_segments()
            """Those of the receivers of each set"""
            self._connect(timeout_s)
        except Exception:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank holds."""
        buffers = [buffer.tensor for slots in self._slots for buffer in slots]
        return sum(memory.numel() for memory in [*buffers, *self._staging])

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank writes and sends of a version, without those that it sends on."""
        rank = self._ranks.rank
        return sum(
            each.message.nbytes
            for part in self._parts
            for deliveries in part
            for each in deliveries
            if each.message.source == rank
        )

    def begin(self) -> None:
        """Prepare a version's first round.

        Raises:
            OSError: no memory to quantise or merge what is sent.
        """
        self._stage(0)

    def fill(self, number: int) -> Exception | None:
        """Fill the slots of a round. All ranks call it for each round in turn.

        Returns:
            An error of this rank; the round is not whole, but no other rank waits for it.

        Raises:
            RankError: another rank died or is late.
        """
        problem: Exception | None = None
        works = self._exchange(self._sends(number), self._receives(number))
        try:
            self._write(number)
            self._stage(number + 1)
        except OSError as error:
            problem = error
        self._wait(works)
        if self._passes_on:
            self._ranks.node_barrier()
            self._wait(self._exchange(self._passed_on(number, sends=True), self._passed_on(number, sends=False)))
        return problem

    def close(self) -> None:
        for slots in self._slots:
            for buffer in slots:
                buffer.close()
        self._slots, self._staging, self._mapped = [], [], {}
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _allocate(self, run_id: str) -> None:
        rank, where = self._ranks.rank, device.compute_device()
        problem = None
        nbytes = 0
        try:
            for part, slots in zip(self._parts, self._slots, strict=True):
                nbytes = max((each.end.get(rank, 0) for deliveries in part for each in deliveries), default=0)
                for _ in range(NUM_SLOTS if nbytes else 0):
                    slots.append(shared_buffer(nbytes, run_id, where))
            count = max(map(len, self._parts), default=0)
            nbytes = max((self._staged_bytes(number) for number in range(count)), default=0)
            if nbytes:
                self._staging = [torch.empty(nbytes, dtype=torch.uint8, device=where) for _ in range(NUM_SLOTS)]
        except (OSError, RuntimeError) as error:
            problem = f"rank {rank}: buffers of {nbytes} bytes: {error}"
        problems = [each for each in self._ranks.gather_objects(problem) if each is not None]
        if problems:
            raise OSError("; ".join(problems))

    def _gather_segments(self) -> list[Segments]:
        own = [[buffer.segment() for buffer in slots] for slots in self._slots]
        by_rank = self._ranks.gather_objects(own)
        return [
            {rank: segments[index] for rank, segments in enumerate(by_rank) if segments[index]}
            for index in range(len(self._parts))
        ]

    def _connect(self, timeout_s: float) -> None:
        """Form the group of all ranks, where some messages are between nodes."""
        several = [each for part in self._parts for deliveries in part for each in deliveries if len(each.places) > 1]
        crosses, passes_on = bool(self._staging), bool(several)
        crosses, self._passes_on = (bool(self._ranks.agree(int(verdict))) for verdict in (crosses, passes_on))
        if crosses or self._passes_on:
            with other_ranks():
                self._group = dist.new_group(list(range(self._ranks.size)), timeout=timedelta(seconds=timeout_s))
                # NCCL wants all members in a group's first call, and messages are between some of them.
                dist.all_reduce(torch.zeros(1, device=device.compute_device()), group=self._group)

    def _of(self, number: int) -> list[tuple[int, Delivery]]:
        """This rank's deliveries of a round, with the number of their set."""
        parts = ((index, part) for index, part in enumerate(self._parts) if number < len(part))
        return [(index, each) for index, part in parts for each in part[number]]

    def _is_far(self, rank: int) -> bool:
        return self._ranks.nodes[rank] != self._ranks.nodes[self._ranks.rank]

    def _outgoing(self, number: int) -> list[Delivery]:
        """What this rank sends to receivers of other nodes in a round."""
        return [
            each
            for _, each in self._of(number)
            if each.message.source == self._ranks.rank and self._is_far(each.places[0][0])
        ]

    def _staged_bytes(self, number: int) -> int:
        return sum(aligned(each.message.nbytes) for each in self._outgoing(number))

    def _staged(self, number: int) -> list[tuple[Delivery, Tensor]]:
        """The outgoing messages of a round with their places in the staging buffer."""
        result, start = [], 0
        for each in self._outgoing(number):
            memory = self._staging[number % NUM_SLOTS][start : start + each.message.nbytes]
            result.append((each, memory))
            start += aligned(each.message.nbytes)
        return result

    def _stage(self, number: int) -> None:
        for each, memory in self._staged(number):
            self._write_message(each, memory)
        device.finish_queued_work()

    def _write(self, number: int) -> None:
        """Write the messages to receivers of this node into their slots."""
        for index, each in self._of(number):
            receiver, offset = each.places[0]
            if each.message.source == self._ranks.rank and not self._is_far(receiver):
                slot = self._slot(index, receiver)[number % NUM_SLOTS]
                self._write_message(each, slot[offset : offset + each.message.nbytes])
        device.finish_queued_work()

    def _write_message(self, each: Delivery, memory: Tensor) -> None:
        try:
            with torch.no_grad():
                for (name, _, box), target in views(each.message.entries, memory):
                    self._values.write(name, box, target)
        except torch.OutOfMemoryError as error:
            raise OSError(f"no memory to quantise or merge what is sent: {error}") from error

    def _slot(self, index: int, receiver: int) -> list[Tensor]:
        """The slots of a receiver of this node, mapped where they are another rank's."""
        if (index, receiver) not in self._mapped:
            if receiver == self._ranks.rank:
                slots = [buffer.tensor for buffer in self._slots[index]]
            else:
                slots = [open_shared(segment, writable=True) for segment in self.segments[index][receiver]]
            self._mapped[index, receiver] = slots
        return self._mapped[index, receiver]

    def _own(self, index: int, number: int, offset: int, nbytes: int) -> Tensor:
        return self._slots[index][number % NUM_SLOTS].tensor[offset : offset + nbytes]

    def _sends(self, number: int) -> list[tuple[int, Tensor]]:
        """(receiver, bytes) of the messages to other nodes."""
        return [(each.places[0][0], memory) for each, memory in self._staged(number)]

    def _receives(self, number: int) -> list[tuple[int, Tensor]]:
        """(source, memory) of the messages from other nodes."""
        return [
            (each.message.source, self._own(index, number, each.places[0][1], each.message.nbytes))
            for index, each in self._of(number)
            if each.places[0][0] == self._ranks.rank and self._is_far(each.message.source)
        ]

    def _passed_on(self, number: int, *, sends: bool) -> list[tuple[int, Tensor]]:
        """(peer, bytes) of the messages that receivers send on to other nodes, as this rank sends or gets them."""
        rank, result = self._ranks.rank, []
        for index, each in self._of(number):
            (first, start), *others = each.places
            for receiver, offset in others:
                if rank == (first if sends else receiver):
                    own = self._own(index, number, start if sends else offset, each.message.nbytes)
                    result.append((receiver if sends else first, own))
        return result

    def _exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Any]:
        """Begin messages; both ends have those of a pair in the same order."""
        ways: list[tuple[Callable[..., Any], Sequence[tuple[int, Tensor]]]]
        ways = [(dist.isend, sends), (dist.irecv, receives)]
        with other_ranks():
            operations = [
                dist.P2POp(function, memory, peer, group=self._group)
                for function, messages in ways
                for peer, memory in messages
            ]
            return list(dist.batch_isend_irecv(operations)) if operations else []

    def _wait(self, works: Sequence[Any]) -> None:
        with other_ranks():
            for work in works:
                work.wait()
        device.finish_queued_work()
