"""The rounds in which the engines of a node get a version through shared memory: a pure function.

The plan is that of the `p2p` transport, with receivers in place of an engine's ranks. A message comes to one receiver,
out of whose memory all engines of the node load it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.data.boxes import contains, elements
from slimrl.data.model_weights import EngineModel
from slimrl.data.peer_messages import Message, Placed, aligned
from slimrl.resync.ipc.receivers import NodeEngines
from slimrl.resync.p2p.demand import Kept
from slimrl.resync.p2p.engine_plan import EnginePlan


class Delivery(NamedTuple):
    """A message and its place in the memory of a receiver."""

    message: Message
    """Its target and ranks are numbers of receivers."""
    receiver: int
    """Trainer rank"""
    offset: int
    """Byte offset in its slot"""

    @property
    def end(self) -> int:
        """First byte behind the message at which another one may begin."""
        return self.offset + aligned(self.message.nbytes)


Deliveries = tuple[Delivery, ...]
"""Those of a round"""

NodeRounds = Mapping[EngineModel, Sequence[Deliveries]]
"""The rounds of the engines of a node, for each of their models"""


def rounds_of(plan: EnginePlan, engines: NodeEngines) -> NodeRounds:
    """
    Args:
        plan: for the node's receivers.
    """
    return {
        model: [tuple(_deliveries(messages, engines.all_receivers)) for messages in rounds]
        for model, rounds in plan.rounds.items()
    }


def _deliveries(messages: Sequence[Message], receivers: Sequence[int]) -> Iterator[Delivery]:
    ends: Counter[int] = Counter()
    for message in messages:
        receiver = receivers[message.target]
        yield Delivery(message, receiver, ends[receiver])
        ends[receiver] += aligned(message.nbytes)


def loads_of(
    engine: str, rank: int, rounds: NodeRounds, engines: NodeEngines, report: Mapping[EngineModel, Sequence[Kept]]
) -> dict[EngineModel, list[list[Placed]]]:
    """Where a rank of an engine finds what it keeps: the messages of each round, whose source is the trainer rank in
    whose slot they lie.

    Args:
        rounds: of its node.
        report: what the engine's ranks keep.
    """
    number = engines.all_receivers.index(engines.receivers[engine][rank])
    shared = engines.shares_receivers
    return {
        model: [
            [
                placed
                for each in deliveries
                if number in each.message.ranks
                for placed in _loads(each, rank, report[model][rank] if shared else None)
            ]
            for deliveries in of_model
        ]
        for model, of_model in rounds.items()
    }


def _loads(each: Delivery, rank: int, kept: Kept | None) -> Iterator[Placed]:
    """A message as a rank loads it: whole; or, where it has regions that the rank does not keep, each region that it
    keeps.

    Args:
        kept: by the rank; None where that is all of the message.
    """
    message, source, offset = each
    entries = [
        entry
        for entry in message.entries
        if kept is None or any(contains(box, entry.box) for box in kept.get(entry.name, ()))
    ]
    if len(entries) == len(message.entries):
        yield Placed(replace(message, source=source, target=rank, ranks=(rank,)), offset)
        return
    for entry in message.entries:
        nbytes = elements(entry.box) * element_bytes(entry.dtype)
        if entry in entries:
            yield Placed(Message(source=source, target=rank, ranks=(rank,), entries=(entry,), nbytes=nbytes), offset)
        offset += nbytes
