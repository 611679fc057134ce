"""One trainer rank's part of the rounds of the `ipc` transport, with its memory.

A receiver has two slots, which its node's ranks and the engines map. For each round,

1. messages between nodes begin, from a staging buffer into the slot of a receiver;
2. meanwhile each rank writes what it holds for receivers of its node straight into their slots, and stages what it
   sends to other nodes in the next round.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl import device
from slimrl.data.peer_messages import aligned, views
from slimrl.resync.ipc.deliveries import Deliveries, Delivery
from slimrl.resync.ipc.shared_buffer import SharedBuffer, open_shared, shared_buffer
from slimrl.resync.ipc.stale_files import clean_stale_segments
from slimrl.resync.p2p.engine_plan import SLOTS
from slimrl.resync.p2p.sent_values import SentValues
from slimrl.resync.ranks import Ranks, other_ranks

Placing = tuple[Delivery, Tensor]
"""A message, and the memory into which it is written"""


class RankRounds:
    """All ranks construct it, and call its methods, together. Frees the buffers of killed runs first.

    Args:
        run_id: part of the names of files.
        timeout_s: deadline of a wait for another rank.
    """

    def __init__(self, values: SentValues, ranks: Ranks, *, run_id: str, timeout_s: float) -> None:
        clean_stale_segments()
        self._values, self._ranks, self._run_id, self._timeout_s = values, ranks, run_id, timeout_s
        self._rounds: Sequence[Deliveries] = ()
        self._slots: list[SharedBuffer] = []
        self._staging: list[Tensor] = []
        self._mapped: dict[int, list[Tensor]] = {}
        self._group: Any = None
        self.segments: dict[int, list[str]] = {}
        """Those of the slots of each receiver, by trainer rank"""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank holds."""
        return sum(memory.numel() for memory in [*(slot.tensor for slot in self._slots), *self._staging])

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank writes and sends of a version."""
        rank = self._ranks.rank
        return sum(each.message.nbytes for round_ in self._rounds for each in round_ if each.message.source == rank)

    def use(self, rounds: Sequence[Deliveries]) -> None:
        """Follow a plan.

        Args:
            rounds: the deliveries that this rank sends or receives.

        Raises:
            OSError: on all ranks, when a node or a device has no memory left; all of this object's is released.
            RankError: another rank died or is late; the same.
        """
        self._rounds = rounds
        try:
            self._on_all_ranks(self._allocate)
            own = [slot.segment() for slot in self._slots]
            self.segments = {rank: each for rank, each in enumerate(self._ranks.gather_objects(own)) if each}
            self._on_all_ranks(self._map)
            self._connect()
        except Exception:
            self.close()
            raise

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
        works = self._start(number)
        try:
            self._write(self._near(number))
            self._stage(number + 1)
        except OSError as error:
            problem = error
        with other_ranks():
            for work in works:
                work.wait()
        device.finish_queued_work()
        return problem

    def close(self) -> None:
        """Release all memory and leave the group; `use` makes both again."""
        for slot in self._slots:
            slot.close()
        self._slots, self._staging, self._mapped = [], [], {}
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _allocate(self) -> None:
        """Slots and staging buffers for the largest round; those that are large enough stay."""
        rank, where = self._ranks.rank, device.compute_device()
        needed = max((each.end for round_ in self._rounds for each in round_ if each.receiver == rank), default=0)
        if needed > sum(slot.tensor.numel() for slot in self._slots[:1]):
            while self._slots:
                self._slots.pop().close()
            while len(self._slots) < SLOTS:
                self._slots.append(shared_buffer(needed, self._run_id, where))
        needed = max((sum(self._sizes(number)) for number in range(len(self._rounds))), default=0)
        if needed > sum(buffer.numel() for buffer in self._staging[:1]):
            self._staging = []
            self._staging = [torch.empty(needed, dtype=torch.uint8, device=where) for _ in range(SLOTS)]

    def _map(self) -> None:
        """Map the slots of this node's receivers to which this rank writes."""
        rank, nodes = self._ranks.rank, self._ranks.nodes
        written = {each.receiver for round_ in self._rounds for each in round_ if each.message.source == rank}
        self._mapped = {
            receiver: [open_shared(segment, writable=True) for segment in self.segments[receiver]]
            for receiver in sorted(written - {rank})
            if nodes[receiver] == nodes[rank]
        }
        self._mapped[rank] = [slot.tensor for slot in self._slots]

    def _on_all_ranks(self, action: Callable[[], None]) -> None:
        problem = None
        try:
            action()
        except (OSError, RuntimeError) as error:
            problem = f"rank {self._ranks.rank}: buffers of a resync: {error}"
        problems = [each for each in self._ranks.gather_objects(problem) if each is not None]
        if problems:
            raise OSError("; ".join(problems))

    def _connect(self) -> None:
        """Form the group of all ranks, where some messages are between nodes."""
        if self._ranks.agree(int(bool(self._staging))) and self._group is None:
            with other_ranks():
                timeout = timedelta(seconds=self._timeout_s)
                self._group = dist.new_group(list(range(self._ranks.size)), timeout=timeout)
                # NCCL wants all members in a group's first call, and messages are between some of them.
                dist.all_reduce(torch.zeros(1, device=device.compute_device()), group=self._group)

    def _of(self, number: int) -> Deliveries:
        return self._rounds[number] if number < len(self._rounds) else ()

    def _is_far(self, rank: int) -> bool:
        return self._ranks.nodes[rank] != self._ranks.nodes[self._ranks.rank]

    def _outgoing(self, number: int) -> list[Delivery]:
        """What this rank sends to receivers of other nodes in a round."""
        rank = self._ranks.rank
        return [each for each in self._of(number) if each.message.source == rank and self._is_far(each.receiver)]

    def _sizes(self, number: int) -> list[int]:
        return [aligned(each.message.nbytes) for each in self._outgoing(number)]

    def _far(self, number: int) -> list[Placing]:
        """The messages to other nodes, in the staging buffer."""
        result, start = [], 0
        for each, size in zip(self._outgoing(number), self._sizes(number), strict=True):
            result.append((each, self._staging[number % SLOTS][start : start + each.message.nbytes]))
            start += size
        return result

    def _near(self, number: int) -> list[Placing]:
        """The messages to receivers of this node, in their slots."""
        return [
            (each, self._mapped[each.receiver][number % SLOTS][each.offset : each.offset + each.message.nbytes])
            for each in self._of(number)
            if each.message.source == self._ranks.rank and not self._is_far(each.receiver)
        ]

    def _incoming(self, number: int) -> list[Placing]:
        """The messages from other nodes, in this rank's slot."""
        rank = self._ranks.rank
        return [
            (each, self._mapped[rank][number % SLOTS][each.offset : each.offset + each.message.nbytes])
            for each in self._of(number)
            if each.receiver == rank and self._is_far(each.message.source)
        ]

    def _stage(self, number: int) -> None:
        self._write(self._far(number))

    def _write(self, placings: Sequence[Placing]) -> None:
        entries = [one for each, memory in placings for one in views(each.message.entries, memory)]
        try:
            with torch.no_grad():
                self._values.write_all(entries)
        except torch.OutOfMemoryError as error:
            raise OSError(f"no memory to quantise or merge what is sent: {error}") from error
        device.finish_queued_work()

    def _start(self, number: int) -> list[Any]:
        """Begin the messages between nodes; both ends have those of a pair in the same order."""
        with other_ranks():
            operations = [
                dist.P2POp(dist.isend, memory, each.receiver, group=self._group) for each, memory in self._far(number)
            ]
            operations += [
                dist.P2POp(dist.irecv, memory, each.message.source, group=self._group)
                for each, memory in self._incoming(number)
            ]
            return list(dist.batch_isend_irecv(operations)) if operations else []
