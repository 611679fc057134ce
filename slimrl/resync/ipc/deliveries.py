"""The rounds in which a set of engines gets a version through shared memory: a pure function.

The plan is that of the `p2p` transport, with receivers in place of the engine's ranks. A message comes to one receiver
on each node whose engines keep some of it: from the trainer rank that holds it to one of them, which sends it on to the
others. All engines of a node load it from there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.data.boxes import contains, elements
from slimrl.data.model_weights import EngineModel
from slimrl.data.peer_messages import Message, Placed
from slimrl.resync.ipc.receivers import EngineSet
from slimrl.resync.p2p.demand import Kept
from slimrl.resync.p2p.engine_plan import EnginePlan

ALIGNMENT = 512
"""Bytes: messages begin at multiples of this, since NCCL is slow with memory that is not aligned."""


class Delivery(NamedTuple):
    """A message and its places in the memory of receivers."""

    message: Message
    """Its target and ranks are numbers of receivers in the set."""
    places: tuple[tuple[int, int], ...]
    """(trainer rank, offset in its slot), one on each node. The first gets the message and sends it to the others."""

    @property
    def end(self) -> dict[int, int]:
        """First free byte behind the message in each slot, by trainer rank."""
        return {rank: offset + aligned(self.message.nbytes) for rank, offset in self.places}


Deliveries = tuple[Delivery, ...]
"""Those of a round"""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def rounds_of(plan: EnginePlan, engines: EngineSet, nodes: Sequence[str]) -> list[tuple[EngineModel, Deliveries]]:
    """The rounds of a set, with the model that each is for.

    Args:
        plan: for the set's receivers.
        nodes: name of the node of each trainer rank.
    """
    return [
        (model, tuple(_deliveries(messages, engines.ranks, nodes)))
        for model, rounds in plan.rounds.items()
        for messages in rounds
    ]


def _deliveries(messages: Sequence[Message], receivers: Sequence[int], nodes: Sequence[str]) -> Iterator[Delivery]:
    ends: Counter[int] = Counter()
    for message in messages:
        on_node: dict[str, int] = {}
        for number in (message.target, *message.ranks):
            on_node.setdefault(nodes[receivers[number]], receivers[number])
        places = []
        for receiver in on_node.values():
            places.append((receiver, ends[receiver]))
            ends[receiver] += aligned(message.nbytes)
        yield Delivery(message, tuple(places))


def loads_of(
    engine: str,
    rounds: Sequence[tuple[EngineModel, Deliveries]],
    engines: EngineSet,
    nodes: Sequence[str],
    report: Mapping[EngineModel, Sequence[Kept]],
) -> list[list[list[Placed]]]:
    """Where each rank of an engine finds what it keeps: the messages of each round, whose source is the trainer rank in
    whose slot they lie.

    Args:
        rounds: see `rounds_of`.
        report: what the engine's ranks keep.
    """
    numbers = {rank: number for number, rank in enumerate(engines.ranks)}
    shared = engines.shares_receivers()
    result = []
    for rank, receiver in enumerate(engines.receivers[engine]):
        number, node = numbers[receiver], nodes[receiver]
        loads: list[list[Placed]] = []
        for model, deliveries in rounds:
            loads.append([])
            for message, places in deliveries:
                if number in message.ranks:
                    place = next(place for place in places if nodes[place[0]] == node)
                    loads[-1] += _loads(message, place, rank, report[model][rank] if shared else None)
        result.append(loads)
    return result


def _loads(message: Message, place: tuple[int, int], rank: int, kept: Kept | None) -> Iterator[Placed]:
    """A message as a rank loads it: whole; or, where it has regions that the rank does not keep, each region that it
    keeps.

    Args:
        kept: by the rank; None where that is all of the message.
    """
    source, offset = place
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
