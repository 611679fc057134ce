"""The engine's end of the `p2p` transport: a rank receives what it keeps, straight from the trainer ranks that have it.

1. The trainer sends each rank the plan of its rounds: which members send it which regions of which tensors.
2. It tells all ranks to receive a version. Those that are not in the group yet join it.
3. In each round, a rank waits for the numbers that announce its messages, says that it is ready, and receives all of
   them side by side into one of two buffers. While they arrive, the round before is copied out of the other buffer into
   the parameters.
4. What several ranks keep, one of them receives and passes on, first between nodes and then within them. Both ends say
   that they have it, or are ready for it, before the message begins.
5. If another engine is fed by this one, each rank sends what came from outside of the engine on to the same rank there,
   as a trainer rank would.

The engine's own thread does all this. It waits at most WAIT_FRACTION of the trainer's deadline for the version, so the
engine answers in time even if the trainer hangs. NCCL's connections, which a group's first version makes, have no
deadline of their own.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slimrl import device
from slimrl.data.boxes import contains, slices_of
from slimrl.data.model_weights import GroupSpec
from slimrl.data.peer_messages import Entry, Message, Placed, Round, aligned, views
from slimrl.engines.plugin.engine_ranks import EngineRanks
from slimrl.engines.plugin.kept_tensors import KeptRegion
from slimrl.resync.p2p.peer_group import GroupError, Move, PeerGroup, Pending

log = logging.getLogger(__name__)

WAIT_FRACTION = 0.8
"""Part of the trainer's deadline in which a version must have come."""
FEED_FRACTION = 0.4
"""Part of the trainer's deadline after which an engine that does not take what it is fed is left to the trainer."""


def placed(messages: Round) -> list[Placed]:
    """Where each message of a round lies, one after the other."""
    result, end = [], 0
    for message in messages:
        result.append(Placed(message, end))
        end += aligned(message.nbytes)
    return result


def buffer_bytes(rounds: Iterable[Round]) -> int:
    """Size of a buffer that holds the messages of each of the rounds."""
    return max((sum(aligned(message.nbytes) for message in messages) for messages in rounds), default=0)


def plain_rounds(rounds: Sequence[Round]) -> list[Any]:
    """Rounds as plain values: SGLang unpickles no class of ours."""
    return [
        [
            (message.source, message.target, message.ranks, [tuple(each) for each in message.entries], message.nbytes)
            for message in messages
        ]
        for messages in rounds
    ]


def parse_rounds(plain: list[Any]) -> list[Round]:
    return [
        tuple(
            Message(source=source, target=target, ranks=ranks, entries=tuple(map(Entry._make, entries)), nbytes=nbytes)
            for source, target, ranks, entries, nbytes in messages
        )
        for messages in plain
    ]


class PeerReceiver:
    """One rank of an engine in the group of its engine.

    Args:
        rounds: of each model of the engine, with the messages that this rank gets. Their `source` is the member of the
            group that sends them; the first members are the engine's ranks.
        fed: the group of the engine that is fed by this one, which has as many ranks.
    """

    def __init__(
        self, spec: GroupSpec, ranks: EngineRanks, rounds: dict[str, list[Round]], fed: GroupSpec | None
    ) -> None:
        self.name, self._spec, self._rounds = spec.name, spec, rounds
        self._rank, self._per_node = ranks.rank, ranks.per_node
        self._group: PeerGroup | None = None
        self._feed = Feed(fed, ranks) if fed else None
        self._buffers: list[Tensor] = []
        self._version, self._deadline = -1, 0.0
        self._begun: set[str] = set()
        """Models of which the version has been received, or is"""
        self.received_bytes = 0
        """Bytes that came from other processes in the last version"""

    def receive(self, holder: str, version: int, regions: dict[str, list[KeptRegion]]) -> None:
        """Receive the version of one model into its parameters.

        Raises:
            GroupError: a member is gone, late, or sends another version or length than planned. The group is left, so
                that the others notice.
            ValueError: a message has a region that this rank does not keep.
        """
        if version != self._version or holder in self._begun:
            # One deadline for all models of the engine, as the trainer has. A model that comes again is a new attempt.
            self._version, self._deadline = version, time.monotonic() + WAIT_FRACTION * self._spec.timeout_s
            self._begun.clear()
        self._begun.add(holder)
        try:
            if self._group is None:
                spec = replace(self._spec, timeout_s=WAIT_FRACTION * self._spec.timeout_s)
                self._group = PeerGroup(spec, self._rank)
            if self._feed is not None:
                self._feed.begin(self._deadline)
            self._receive(self._group, self._rounds[holder], version, regions, self._deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the groups."""
        if self._group is not None:
            self._group.drop(self._buffers)
        self._group = None
        if self._feed is not None:
            self._feed.close()
        self._buffers.clear()

    def _receive(
        self,
        group: PeerGroup,
        rounds: list[Round],
        version: int,
        regions: dict[str, list[KeptRegion]],
        deadline: float,
    ) -> None:
        self.received_bytes = 0
        layouts = [placed(messages) for messages in rounds]
        pending = self._begin(group, layouts, 0, version, deadline)
        for number, layout in enumerate(layouts):
            if self._feed is not None:
                # It reads the buffer that is filled next.
                self._feed.wait(number - 1)
            following = self._begin(group, layouts, number + 1, version, deadline)
            pending.wait()
            buffer = self._buffer(number)
            if self._feed is not None:
                self._feed.send(version, number, [one for one in layout if one.message.target == self._rank], buffer)
            self._pass_on(group, number, layout, buffer, deadline)
            with torch.no_grad():
                for message, offset in layout:
                    place(message.entries, buffer[offset:], regions)
            # The buffer is filled again in the round after the next.
            device.finish_queued_work()
            pending = following
        if self._feed is not None:
            self._feed.wait(len(layouts) - 1)

    def _begin(
        self, group: PeerGroup, layouts: list[list[Placed]], number: int, version: int, deadline: float
    ) -> Pending:
        """Begin to receive what trainer ranks send in a round."""
        mine = [one for one in layouts[number] if one.message.target == self._rank] if number < len(layouts) else []
        sources = list(dict.fromkeys(one.message.source for one in mine))
        planned = {
            source: [version, number, sum(one.message.nbytes for one in mine if one.message.source == source)]
            for source in sources
        }
        for source, numbers in zip(sources, group.told(sources, 3, deadline), strict=True):
            if numbers != planned[source]:
                raise GroupError(
                    f"member {source} announces version, round and bytes {numbers}, planned are {planned[source]}"
                )
        ready = group.tell(sources, [[number]] * len(sources), deadline)
        buffer = self._buffer(number)
        pending = group.start([self._move(one, buffer, one.message.source, sends=False) for one in mine], deadline)
        ready.wait()
        return pending

    def _pass_on(self, group: PeerGroup, number: int, layout: list[Placed], buffer: Tensor, deadline: float) -> None:
        """Pass on what other ranks keep too."""
        for step in (1, 2):
            moves = []
            for one in layout:
                for when, source, target in one.message.hops(self._per_node):
                    if when == step and self._rank in (source, target):
                        peer = target if self._rank == source else source
                        moves.append(self._move(one, buffer, peer, sends=self._rank == source))
            peers = list(dict.fromkeys(move.peer for move in moves))
            ready = group.tell(peers, [[number]] * len(peers), deadline)
            for peer, (said,) in zip(peers, group.told(peers, 1, deadline), strict=True):
                if said != number:
                    raise GroupError(f"rank {peer} of the engine passes on round {said}, not {number}")
            ready.wait()
            group.start(moves, deadline).wait()

    def _move(self, one: Placed, buffer: Tensor, peer: int, *, sends: bool) -> Move:
        if not sends:
            self.received_bytes += one.message.nbytes
        return Move(peer, buffer[one.offset : one.offset + one.message.nbytes], sends)

    def _buffer(self, number: int) -> Tensor:
        """uint8, for the rounds of this number's parity."""
        while len(self._buffers) < 2:
            nbytes = max(map(buffer_bytes, self._rounds.values()), default=0)
            self._buffers.append(torch.empty(nbytes, dtype=torch.uint8, device=device.compute_device()))
        return self._buffers[number % 2]


class Feed:
    """What one rank passes on to the same rank of the next engine. That engine's faults are not this one's: after one
    nothing more is sent to it."""

    def __init__(self, spec: GroupSpec, ranks: EngineRanks) -> None:
        self._spec = replace(spec, timeout_s=FEED_FRACTION * spec.timeout_s)
        self._rank, self._member = ranks.rank, ranks.size + ranks.rank
        self._group: PeerGroup | None = None
        self._failed = False
        self._until = self._deadline = 0.0
        self._pending: dict[int, Pending] = {}

    def begin(self, deadline: float) -> None:
        """Begin a version of one model. All ranks join here, since the group forms only with all of them, and some may
        have nothing to send before a late round, or never.

        Args:
            deadline: of the engine that feeds.
        """
        if self._failed:
            return
        if deadline != self._until:
            self._until, self._deadline = deadline, time.monotonic() + self._spec.timeout_s
        try:
            if self._group is None:
                self._group = PeerGroup(self._spec, self._member)
        except GroupError as error:
            self._give_up(error)

    def send(self, version: int, number: int, layout: list[Placed], buffer: Tensor) -> None:
        """Begin to send a round's messages; the buffer must stay as it is until `wait` of the round."""
        if self._group is None or not layout:
            return
        try:
            peers = [self._rank]
            nbytes = sum(one.message.nbytes for one in layout)
            announced = self._group.tell(peers, [(version, number, nbytes)], self._deadline)
            ((ready,),) = self._group.told(peers, 1, self._deadline)
            if ready != number:
                raise GroupError(f"the engine that is fed is ready for round {ready}, not for {number}")
            announced.wait()
            moves = [
                Move(self._rank, buffer[one.offset : one.offset + one.message.nbytes], sends=True) for one in layout
            ]
            self._pending[number] = self._group.start(moves, self._deadline)
        except GroupError as error:
            self._give_up(error)

    def wait(self, number: int) -> None:
        """Returns when nothing of a round is being sent any more."""
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        try:
            pending.wait()
        except GroupError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._group is not None:
            self._group.drop()
        self._group = None

    def _give_up(self, error: GroupError) -> None:
        log.warning("the next engine is no longer fed: %s", error)
        self._failed = True
        self._pending.clear()
        self.close()


def place(entries: Sequence[Entry], data: Tensor, regions: dict[str, list[KeptRegion]]) -> None:
    """Copy the regions of a message to their places.

    Args:
        data: uint8, the message's bytes; others may follow.

    Raises:
        ValueError: this rank does not keep a region.
    """
    for (name, _, box), values in views(entries, data):
        places = [region for region in regions.get(name, ()) if contains(region.box, box)]
        if not places:
            raise ValueError(f"this rank does not keep {list(box)} of {name}")
        for region in places:
            memory = region.memory[slices_of(box, region.box)] if box else region.memory
            memory.copy_(values)
