"""Who does what in a resync: pure functions of the trainer's layout and of where the engines are.

Each node of the trainer has a leader, its lowest rank, in whose shared memory a bucket comes together. Leaders that
serve engines are senders: with `ipc` those of the engines' nodes, with other transports rank 0 alone.

1. Each rank writes the pieces that it owns for its node to their place in the leader's memory.
2. What a sender's node lacks, leaders pass on: each byte crosses the network once for each node that needs it, never
   once per rank.
3. The senders have their engines load the bucket.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from slimrl.config.schema import TransportName
from slimrl.data.protocols import EnginePlace, Region, SourcePiece, SourceTensor, TensorPart
from slimrl.resync.buckets import PlannedBucket, Transform, cut_buckets


@dataclass(frozen=True, kw_only=True)
class Sender:
    rank: int
    """Of the trainer"""
    node: str
    engines: tuple[str, ...]
    """Names of the engines to which it sends"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one piece gives to a bucket."""

    part: TensorPart
    target: Region
    """Within the part"""
    source: Region
    """Within the piece"""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A block that leaders pass on."""

    block: Block
    source: str
    """The node that has it"""
    targets: tuple[str, ...]
    """Nodes that get it: one, or, by broadcast, all others of the trainer."""


@dataclass(frozen=True, kw_only=True)
class ResyncPlan:
    buckets: tuple[PlannedBucket, ...]
    tensors: Mapping[str, SourceTensor]
    """By name"""
    nodes: tuple[str, ...]
    """Node of each trainer rank"""
    senders: tuple[Sender, ...]

    @cached_property
    def leaders(self) -> dict[str, int]:
        """Lowest rank of each node of the trainer, in the order of ranks."""
        return self._owners(tuple(range(len(self.nodes))))

    def sender(self, rank: int) -> Sender | None:
        """None for a rank that sends to no engine."""
        return next((sender for sender in self.senders if sender.rank == rank), None)

    def owner(self, piece: SourcePiece, node: str) -> int | None:
        """The rank that writes a piece for its node, the lowest that holds it; None where none of the node does."""
        return self.owners(piece).get(node)

    def owners(self, piece: SourcePiece) -> Mapping[str, int]:
        """The owner on each node that holds a piece."""
        return self._owners(piece.holders)

    def writes(self, bucket: PlannedBucket, rank: int) -> list[Block]:
        """What a rank writes into its node's memory: what the node needs, or passes on."""
        node = self.nodes[rank]
        needed = node in self._needing
        return [
            block
            for block, piece in self.blocks(bucket)
            if self.owner(piece, node) == rank
            and (needed or any(source == node for source, _ in self.routes(bucket, block, piece)))
        ]

    def transfers(self, bucket: PlannedBucket) -> list[Transfer]:
        """What leaders pass on, in the order of the bucket's parts."""
        return [
            Transfer(block=block, source=source, targets=targets)
            for block, piece in self.blocks(bucket)
            for source, targets in self.routes(bucket, block, piece)
        ]

    def blocks(self, bucket: PlannedBucket) -> Iterator[tuple[Block, SourcePiece]]:
        """What the bucket consists of, in the order of its parts, and the piece that each block is of."""
        for part in bucket.gathered.parts:
            for piece in self.tensors[part.spec.name].pieces:
                if block := _block(part, piece.region):
                    yield block, piece

    def routes(self, bucket: PlannedBucket, block: Block, piece: SourcePiece) -> list[tuple[str, tuple[str, ...]]]:
        """(source, targets) by which the nodes that lack the block get it.

        Sources take turns along the bucket, so that nodes of equal content share the work.
        """
        lacking = self._lacking(piece.holders)
        if not lacking:
            return []
        holding = list(self.owners(piece))
        first = block.part.offset * len(holding) // bucket.gathered.nbytes
        if len(lacking) > len(holding):
            return [(holding[first], self._others[holding[first]])]
        return [(holding[(first + i) % len(holding)], (node,)) for i, node in enumerate(lacking)]

    @cached_property
    def _needing(self) -> tuple[str, ...]:
        """Nodes that need every bucket whole."""
        return tuple(sender.node for sender in self.senders)

    @cached_property
    def _others(self) -> dict[str, tuple[str, ...]]:
        """All nodes but this one."""
        return {node: tuple(other for other in self.leaders if other != node) for node in self.leaders}

    @cached_property
    def _known_owners(self) -> dict[tuple[int, ...], dict[str, int]]:
        return {}

    @cached_property
    def _known_lacking(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        return {}

    def _lacking(self, holders: tuple[int, ...]) -> tuple[str, ...]:
        """Nodes that need a piece of these holders and have none of them."""
        if holders not in self._known_lacking:
            holding = self._owners(holders)
            self._known_lacking[holders] = tuple(node for node in self._needing if node not in holding)
        return self._known_lacking[holders]

    def _owners(self, holders: tuple[int, ...]) -> dict[str, int]:
        """The lowest of these ranks on each node that has one."""
        if holders not in self._known_owners:
            owners: dict[str, int] = {}
            for rank in holders:
                owners.setdefault(self.nodes[rank], rank)
            self._known_owners[holders] = owners
        return self._known_owners[holders]


def plan_resync(
    tensors: Sequence[SourceTensor],
    nodes: Sequence[str],
    engines: Sequence[EnginePlace],
    *,
    transport: TransportName,
    bucket_bytes: int,
    transform: Transform | None = None,
) -> ResyncPlan:
    """The plan of all resyncs of a run, as long as the engines stay where they are.

    Args:
        nodes: name of the node of each trainer rank.

    Raises:
        ValueError: tensors do not go into buckets of this size, see `cut_buckets`; or, with `ipc`, an engine is not on
            one node of the trainer.
    """
    buckets = cut_buckets([tensor.spec for tensor in tensors], bucket_bytes, transform)
    by_name = {tensor.spec.name: tensor for tensor in tensors}
    return ResyncPlan(buckets=buckets, tensors=by_name, nodes=tuple(nodes), senders=_senders(nodes, engines, transport))


def _senders(nodes: Sequence[str], engines: Sequence[EnginePlace], transport: TransportName) -> tuple[Sender, ...]:
    if transport is not TransportName.ipc:
        return (Sender(rank=0, node=nodes[0], engines=tuple(engine.name for engine in engines)),)
    served: dict[str, list[str]] = {}
    for engine in engines:
        if len(engine.nodes) > 1 or engine.nodes[0] not in nodes:
            raise ValueError(
                f"resync.transport: ipc, but {engine.name} is on {', '.join(engine.nodes)}, the trainer on "
                f"{', '.join(dict.fromkeys(nodes))}. Use collective or disk."
            )
        served.setdefault(engine.nodes[0], []).append(engine.name)
    return tuple(
        Sender(rank=nodes.index(node), node=node, engines=tuple(names))
        for node, names in sorted(served.items(), key=lambda item: nodes.index(item[0]))
    )


def _block(part: TensorPart, region: Region) -> Block | None:
    """What a piece with this region gives to a part; None where they do not meet."""
    if not region:
        return Block(part=part, target=(), source=())
    rows, *columns = region
    start, stop = max(rows.start, part.start), min(rows.stop, part.stop)
    if start >= stop:
        return None
    return Block(
        part=part,
        target=(slice(start - part.start, stop - part.start), *columns),
        source=(slice(start - rows.start, stop - rows.start), *(slice(0, c.stop - c.start) for c in columns)),
    )
