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
from typing import NamedTuple

from slimrl.config.schema.resync import TransportName
from slimrl.data.model_weights import EnginePlace, Place, Region, SourceLayout, SourcePiece, TensorPart
from slimrl.resync.buckets import Bucket, Transform, cut_buckets


@dataclass(frozen=True, kw_only=True)
class Sender:
    rank: int
    """Rank of the trainer"""
    node: str
    engines: tuple[str, ...]
    """Names of the engines to which the rank sends"""


class Block(NamedTuple):
    """What ranks write and nodes pass on as one."""

    part: TensorPart
    region: Region
    """The region of the tensor that lies both in the part and in the piece."""
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

    def writes(self, bucket: Bucket, rank: int) -> list[Block]:
        """What a rank writes into its node's memory: what the node needs, or passes on."""
        node = self.nodes[rank]
        return [
            block
            for block in self.blocks(bucket)
            if self.owners(block.piece).get(node) == rank and self._uses(node, bucket, block)
        ]

    def blocks(self, bucket: Bucket) -> Iterator[Block]:
        """What the bucket consists of, in the order of its parts: a block for each piece of a part."""
        for part in bucket.gathered:
            yield from self._blocks(part)

    def passed_on(self, bucket: Bucket) -> Iterator[Block]:
        """The same, but that a part of which the same nodes have all is one block."""
        for part in bucket.gathered:
            yield from self._with_outputs(bucket, self._joined(list(self._blocks(part))))

    def transforms(self, bucket: Bucket, node: str) -> list[Block]:
        """What a node transforms before the exchange: what it has, and needs or passes on."""
        return [
            block
            for block in self.passed_on(bucket)
            if block.outputs and node in self.owners(block.piece) and self._uses(node, bucket, block)
        ]

    def transforms_behind(self, bucket: Bucket) -> list[TensorPart]:
        """What every sender transforms behind the exchange."""
        if self.transform is None:
            return []
        before = {(block.part.spec.name, block.part.start) for block in self.passed_on(bucket) if block.outputs}
        return [part for part in bucket.gathered if (part.spec.name, part.start) not in before]

    def answers_for(self, bucket: Bucket, block: Block) -> str:
        """The node that hashes a block before and after its transform: where the first sender has it from."""
        first = self._needing[0]
        return next((source for source, targets in self.routes(bucket, block) if first in targets), first)

    def routes(self, bucket: Bucket, block: Block) -> list[tuple[str, tuple[str, ...]]]:
        """(source, targets) by which nodes that need a block, and do not hold it, get it.

        Sources take turns along the bucket, so that nodes with the same pieces divide the work.
        """
        lacking = self._lacking(block.piece.holders)
        if not lacking:
            return []
        holding = list(self.owners(block.piece))
        first = block.part.offset * len(holding) // bucket.gathered_bytes
        if len(lacking) > len(holding):
            return [(holding[first], self._others[holding[first]])]
        return [(holding[(first + i) % len(holding)], (node,)) for i, node in enumerate(lacking)]

    def _blocks(self, part: TensorPart) -> Iterator[Block]:
        for piece in self.pieces[part.spec.name]:
            rows = piece.region[0] if piece.region else slice(0, 1)
            start, stop = max(rows.start, part.start), min(rows.stop, part.stop)
            if start < stop:
                yield Block(part, (slice(start, stop), *piece.region[1:]) if piece.region else (), piece)

    def _joined(self, blocks: list[Block]) -> list[Block]:
        """Blocks of a part, as one if the same nodes hold each: then their routes are equal."""
        if len(blocks) == 1 or len({tuple(self.owners(block.piece)) for block in blocks}) > 1:
            return blocks
        part = blocks[0].part
        holders = tuple(sorted({rank for block in blocks for rank in block.piece.holders}))
        return [Block(part, part.region, SourcePiece(region=part.region, holders=holders))]

    def _with_outputs(self, bucket: Bucket, blocks: list[Block]) -> list[Block]:
        """Blocks of a part, with their outputs; if one block has none, none has any."""
        part = blocks[0].part
        if self.transform is None or len(self.leaders) == 1 or not self.transform.changes(part.spec):
            return blocks
        parts = bucket.outputs(self.transform, part)
        result = []
        for block in blocks:
            regions = self.transform.output_regions(part.spec, block.region)
            if regions is None:
                return blocks
            result.append(block._replace(outputs=tuple(zip(parts, regions, strict=True))))
        return result

    def _uses(self, node: str, bucket: Bucket, block: Block) -> bool:
        """Whether a node needs a block, or passes it on."""
        return node in self._needing or any(source == node for source, _ in self.routes(bucket, block))

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
                f"{', '.join(dict.fromkeys(nodes))}. Use p2p or disk."
            )
        served.setdefault(engine.nodes[0], []).append(engine.name)
    return tuple(
        Sender(rank=nodes.index(node), node=node, engines=tuple(names))
        for node, names in sorted(served.items(), key=lambda item: nodes.index(item[0]))
    )
