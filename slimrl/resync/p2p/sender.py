"""One trainer rank's side of one engine's group: fills its slots round by round and sends them.

While one slot is being sent, the next one is filled. A round's messages go out once all their receivers have said that
they are ready for them.
"""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slimrl import device
from slimrl.data.model_weights import EngineModel, GroupSpec
from slimrl.data.peer_messages import Entry, Message, aligned, views
from slimrl.resync.p2p.engine_plan import SLOTS, EnginePlan
from slimrl.resync.p2p.peer_group import GroupError, Move, PeerGroup, Pending
from slimrl.resync.p2p.sent_values import SentValues


class EngineSender:
    """
    Args:
        rank: of this process in the trainer; one of the plan's sources.
        spec: of the engine's group.
    """

    def __init__(self, plan: EnginePlan, rank: int, spec: GroupSpec) -> None:
        self._plan, self._rank, self._spec = plan, rank, spec
        self._device = device.compute_device()
        self._group: PeerGroup | None = None
        self._slots: list[Tensor] = []
        self._rounds: Mapping[EngineModel, list[list[Message]]] = {
            model: [[message for message in each if message.source == rank] for each in rounds]
            for model, rounds in plan.rounds.items()
        }
        self.sent_bytes = 0
        """Bytes sent in the last version"""

    @property
    def slot_bytes(self) -> int:
        rounds = [messages for each in self._rounds.values() for messages in each]
        return max((sum(aligned(message.nbytes) for message in messages) for messages in rounds), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        return sum(slot.numel() for slot in self._slots)

    def send(self, version: int, values: SentValues, timeout_s: float) -> None:
        """Send this rank's part of a version.

        Raises:
            GroupError: a member is gone, late, or not ready for the round. The group is left, so that the others
                notice.
            OSError: no memory for the slots.
        """
        deadline = time.monotonic() + timeout_s
        self.sent_bytes = 0
        if self._device.type == "cuda":
            # Each thread has a device of its own.
            torch.cuda.set_device(self._device)
        try:
            if self._group is None:
                self._group = PeerGroup(self._spec, self._plan.member(self._rank))
            for rounds in self._rounds.values():
                self._send(self._group, rounds, version, values, deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.drop(self._slots)
        self._group = None
        self._slots.clear()

    def _send(
        self, group: PeerGroup, rounds: list[list[Message]], version: int, values: SentValues, deadline: float
    ) -> None:
        under_way: list[Pending | None] = [None] * SLOTS
        turn = 0
        for number, messages in enumerate(rounds):
            if not messages:
                continue
            if (before := under_way[turn]) is not None:
                before.wait()
            try:
                moves = self._fill(self._slot(turn), messages, values)
            except torch.OutOfMemoryError as error:
                raise OSError(f"no memory to quantise or merge what is sent: {error}") from error
            targets = list(dict.fromkeys(message.target for message in messages))
            sizes = [sum(message.nbytes for message in messages if message.target == target) for target in targets]
            announced = group.tell(targets, [(version, number, size) for size in sizes], deadline)
            for target, (ready,) in zip(targets, group.told(targets, 1, deadline), strict=True):
                if ready != number:
                    raise GroupError(f"rank {target} of the engine is ready for round {ready}, not for {number}")
            announced.wait()
            under_way[turn] = group.start(moves, deadline)
            self.sent_bytes += sum(sizes)
            turn = (turn + 1) % SLOTS
        for pending in under_way:
            if pending is not None:
                pending.wait()

    def _slot(self, turn: int) -> Tensor:
        while len(self._slots) <= turn:
            try:
                slot = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise OSError(f"no memory for {self.slot_bytes} bytes to send: {error}") from error
            self._slots.append(slot)
        return self._slots[turn]

    def _fill(self, slot: Tensor, messages: Sequence[Message], values: SentValues) -> list[Move]:
        """Write the messages into a slot; returns what is to be sent."""
        moves: list[Move] = []
        entries: list[tuple[Entry, Tensor]] = []
        offset = 0
        for message in messages:
            data = slot[offset : offset + message.nbytes]
            entries += views(message.entries, data)
            moves.append(Move(message.target, data, sends=True))
            offset += aligned(message.nbytes)
        with torch.no_grad():
            values.write_all(entries)
        device.finish_queued_work()
        return moves
