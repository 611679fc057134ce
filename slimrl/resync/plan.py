"""The part of each rank in a resync: pure functions of the trainer's layout and the engines' nodes.

Each node of the trainer has a leader, its lowest rank. A bucket is gathered in the leader's shared memory. Leaders that
serve engines are senders: with `ipc` those of the engines' nodes, with other transports rank 0 alone.

1. Each rank writes the pieces that it owns for its node to their place in the leader's memory.
2. A leader transforms what its node has, if that makes it smaller.
3. Nodes send each other what the senders' nodes lack: each byte crosses the network once for each node that needs it,
   never once per rank. All ranks of a node work on that, between the memories of the leaders.
4. The senders transform the rest and have their engines load the bucket.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from slimrl.config.schema.resync import TransportName
from slimrl.data.weights import EnginePlace, Place, Region, SourceLayout, SourcePiece, TensorPart
from slimrl.resync.buckets import Bucket, Transform, cut_buckets


@dataclass(frozen=True, kw_only=True)
class Sender:
    rank: int
    """Rank of the trainer"""
    node: str
    engines: tuple[str, ...]
    """Names of the engines to which the rank sends"""


Overlap = tuple[TensorPart, Region, SourcePiece]
"""A part, a piece of the same tensor, and the region of the tensor that lies in both."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What nodes pass on as one: an overlap, or a whole part where the same nodes have all of it."""

    part: TensorPart
    region: Region
    piece: SourcePiece
    """The piece that the block is of; its holders together hold the block."""
    outputs: tuple[Place, ...] = ()
    """Places of the results into which a node transforms the block before it passes it on; empty where it travels as it
    is."""


@dataclass(frozen=True, kw_only=True)
class ResyncPlan:
    buckets: tuple[Bucket, ...]
    pieces: Mapping[str, tuple[SourcePiece, ...]]
    """Pieces of each tensor, by its name"""
    nodes: tuple[str, ...]
    """Name of the node of each trainer rank"""
    senders: tuple[Sender, ...]
    transform: Transform | None = None

    @cached_property
    def leaders(self) -> dict[str, int]:
        """Lowest rank of each node of the trainer, in the order of ranks."""
        return self._owners(tuple(range(len(self.nodes))))

    @cached_property
    def rails(self) -> tuple[dict[str, int], ...]:
        """The ranks that exchange with each other, by node: the first of each node, the second of each, and so on.

        Ranks that have no counterpart on some node are in none.
        """
        ranks: dict[str, list[int]] = {node: [] for node in self.leaders}
        for rank, node in enumerate(self.nodes):
            ranks[node].append(rank)
        return tuple(dict(zip(ranks, members, strict=True)) for members in zip(*ranks.values(), strict=False))

    def sender(self, rank: int) -> Sender | None:
        """The rank as a sender; None for a rank that sends to no engine."""
        return next((sender for sender in self.senders if sender.rank == rank), None)

    def owners(self, piece: SourcePiece) -> Mapping[str, int]:
        """The rank that writes a piece for each node that holds it: the lowest holder there."""
        return self._owners(piece.holders)

    def writes(self, bucket: Bucket, rank: int) -> list[Overlap]:
        """What a rank writes into its node's memory: what the node needs, or passes on."""
        node = self.nodes[rank]
        return [
            (part, region, piece)
            for part, region, piece in self.overlaps(bucket)
            if self.owners(piece).get(node) == rank and self._uses(node, bucket, part, piece)
        ]

    def overlaps(self, bucket: Bucket) -> Iterator[Overlap]:
        """What the bucket consists of, in the order of its parts."""
        for part in bucket.gathered:
            yield from self._overlaps(part)

    def blocks(self, bucket: Bucket) -> Iterator[Block]:
        """What the bucket consists of, in the order of its parts."""
        for part in bucket.gathered:
            overlaps = self._joined(list(self._overlaps(part)))
            outputs = self._outputs(bucket, overlaps)
            for (_, region, piece), output in zip(overlaps, outputs, strict=True):
                yield Block(part=part, region=region, piece=piece, outputs=output)

    def transforms(self, bucket: Bucket, node: str) -> list[Block]:
        """What a node transforms before the exchange: what it has, and needs or passes on."""
        return [
            block
            for block in self.blocks(bucket)
            if block.outputs and node in self.owners(block.piece) and self._uses(node, bucket, block.part, block.piece)
        ]

    def transforms_behind(self, bucket: Bucket) -> list[TensorPart]:
        """What every sender transforms behind the exchange."""
        if self.transform is None:
            return []
        before = {(block.part.spec.name, block.part.start) for block in self.blocks(bucket) if block.outputs}
        return [part for part in bucket.gathered if (part.spec.name, part.start) not in before]

    def answers_for(self, bucket: Bucket, block: Block) -> str:
        """The node that hashes a block before and after its transform: where the first sender has it from."""
        first = self._needing[0]
        routes = self.routes(bucket, block.part, block.piece)
        return next((source for source, targets in routes if first in targets), first)

    def routes(self, bucket: Bucket, part: TensorPart, piece: SourcePiece) -> list[tuple[str, tuple[str, ...]]]:
        """(source, targets) by which nodes that need a piece's rows of a part, and do not hold them, get them.

        Sources take turns along the bucket, so that nodes with the same pieces divide the work.
        """
        lacking = self._lacking(piece.holders)
        if not lacking:
            return []
        holding = list(self.owners(piece))
        first = part.offset * len(holding) // bucket.gathered_bytes
        if len(lacking) > len(holding):
            return [(holding[first], self._others[holding[first]])]
        return [(holding[(first + i) % len(holding)], (node,)) for i, node in enumerate(lacking)]

    def _overlaps(self, part: TensorPart) -> Iterator[Overlap]:
        for piece in self.pieces[part.spec.name]:
            rows = piece.region[0] if piece.region else slice(0, 1)
            start, stop = max(rows.start, part.start), min(rows.stop, part.stop)
            if start < stop:
                yield part, (slice(start, stop), *piece.region[1:]) if piece.region else (), piece

    def _joined(self, overlaps: list[Overlap]) -> list[Overlap]:
        """Overlaps of a part, as one if the same nodes hold each: then their routes are equal."""
        if len(overlaps) == 1 or len({tuple(self.owners(piece)) for _, _, piece in overlaps}) > 1:
            return overlaps
        part = overlaps[0][0]
        holders = tuple(sorted({rank for _, _, piece in overlaps for rank in piece.holders}))
        return [(part, part.region, SourcePiece(region=part.region, holders=holders))]

    def _outputs(self, bucket: Bucket, overlaps: list[Overlap]) -> list[tuple[Place, ...]]:
        """Results of each overlap of a part; if one overlap has none, none has any."""
        part = overlaps[0][0]
        none: list[tuple[Place, ...]] = [()] * len(overlaps)
        if self.transform is None or len(self.leaders) == 1 or not self.transform.changes(part.spec):
            return none
        places = bucket.outputs(self.transform, part)
        outputs: list[tuple[Place, ...]] = []
        for _, region, _ in overlaps:
            regions = self.transform.output_regions(part.spec, region)
            if regions is None:
                return none
            outputs.append(tuple(zip(places, regions, strict=True)))
        return outputs

    def _uses(self, node: str, bucket: Bucket, part: TensorPart, piece: SourcePiece) -> bool:
        """Whether a node needs the rows of a piece, or passes them on."""
        return node in self._needing or any(source == node for source, _ in self.routes(bucket, part, piece))

    @cached_property
    def _needing(self) -> tuple[str, ...]:
        """Nodes that need every bucket whole."""
        return tuple(sender.node for sender in self.senders)

    @cached_property
    def _others(self) -> dict[str, tuple[str, ...]]:
        """Names of all other nodes, for each node."""
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
    layout: SourceLayout,
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
    return ResyncPlan(
        buckets=cut_buckets(list(layout), bucket_bytes, transform),
        pieces={spec.name: pieces for spec, pieces in layout.items()},
        nodes=tuple(nodes),
        senders=_senders(nodes, engines, transport),
        transform=transform,
    )


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
