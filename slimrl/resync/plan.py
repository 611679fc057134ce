"""The part of each rank in a resync in buckets: pure functions of the trainer's layout and nodes.

Each node of the trainer has a leader, its lowest rank, in whose shared memory a bucket is gathered: on the node of
rank 0 whole, on other nodes what they pass on to that one.

1. Each rank writes the pieces that it owns for its node to their place in the leader's memory.
2. A leader transforms what its node has, if that makes it smaller.
3. The node of rank 0 gets what it lacks: each byte crosses the network once. All ranks of a node work on that, between
   the memories of the leaders.
4. Rank 0 transforms the rest and sends the bucket.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from slimrl.data.model_weights import Place, Region, SourceLayout, SourcePiece, TensorPart
from slimrl.resync.buckets import Bucket, Transform, cut_buckets


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
    transform: Transform | None = None

    @property
    def target(self) -> str:
        """The node of rank 0."""
        return self.nodes[0]

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

    def owners(self, piece: SourcePiece) -> Mapping[str, int]:
        """The rank that writes a piece for each node that holds it: the lowest holder there."""
        return self._owners(piece.holders)

    def writes(self, bucket: Bucket, rank: int) -> list[Block]:
        """What a rank writes into its node's memory."""
        node = self.nodes[rank]
        return [
            block
            for block in self.blocks(bucket)
            if self.owners(block.piece).get(node) == rank and self.source(bucket, block) == node
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
        """What a node transforms before the exchange."""
        return [block for block in self.passed_on(bucket) if block.outputs and self.source(bucket, block) == node]

    def transforms_behind(self, bucket: Bucket) -> list[TensorPart]:
        """What rank 0 transforms behind the exchange."""
        if self.transform is None:
            return []
        before = {(block.part.spec.name, block.part.start) for block in self.passed_on(bucket) if block.outputs}
        return [part for part in bucket.gathered if (part.spec.name, part.start) not in before]

    def source(self, bucket: Bucket, block: Block) -> str:
        """The node that gathers a block: that of rank 0 if it holds the block, otherwise one that passes it on.

        Those take turns along the bucket, so that nodes with the same pieces divide the work.
        """
        owners = self.owners(block.piece)
        if self.target in owners:
            return self.target
        return list(owners)[block.part.offset * len(owners) // bucket.gathered_bytes]

    def _blocks(self, part: TensorPart) -> Iterator[Block]:
        for piece in self.pieces[part.spec.name]:
            rows = piece.region[0] if piece.region else slice(0, 1)
            start, stop = max(rows.start, part.start), min(rows.stop, part.stop)
            if start < stop:
                yield Block(part, (slice(start, stop), *piece.region[1:]) if piece.region else (), piece)

    def _joined(self, blocks: list[Block]) -> list[Block]:
        """Blocks of a part, as one if the same nodes hold each: then their sources are equal."""
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

    @cached_property
    def _known_owners(self) -> dict[tuple[int, ...], dict[str, int]]:
        return {}

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
    *,
    bucket_bytes: int,
    transform: Transform | None = None,
) -> ResyncPlan:
    """The plan of all resyncs of a run.

    Args:
        nodes: name of the node of each trainer rank.

    Raises:
        ValueError: tensors do not go into buckets of this size.
    """
    return ResyncPlan(
        buckets=cut_buckets(list(layout), bucket_bytes, transform),
        pieces={spec.name: pieces for spec, pieces in layout.items()},
        nodes=tuple(nodes),
        transform=transform,
    )
