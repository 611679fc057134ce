"""One bucket out of the trainer's ranks into the shared memory of each node that needs it.

1. Each rank writes the pieces that it owns for its node straight to their final place: one copy from the live weight,
   converted to the tensor's dtype on the way. Where the transport sends in place, the ranks of the sender's node leave
   their large tensors where they lie: each is a source, which sends them itself.
2. Leaders pass on what nodes of senders lack (exchange.py); nothing, where all ranks are on one node.

Several stages take turns, so that one is filled while another is sent.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from slimrl.data.protocols import WeightSource
from slimrl.models.shared_buffer import SharedBuffer
from slimrl.models.shared_segment import open_shared
from slimrl.resync.exchange import Exchange, Message, messages, part_view
from slimrl.resync.live import LiveTensors
from slimrl.resync.plan import Block, ResyncPlan
from slimrl.resync.ranks import Ranks
from slimrl.resync.shared_buffer import shared_buffer


class Gatherer:
    """This rank's part in the gathering. Made by all ranks together.

    Args:
        num_stages: buckets that a node holds at a time.
        in_place_bytes: whole tensors of as many bytes are left where they lie on the sender's node; None for none.
        run_id: part of the shared memory's name.
        timeout_s: deadline of an exchange between leaders.

    Raises:
        OSError: on all ranks; no shared memory is left on some node.
    """

    def __init__(
        self,
        plan: ResyncPlan,
        source: WeightSource,
        ranks: Ranks,
        *,
        num_stages: int,
        in_place_bytes: int | None,
        run_id: str,
        timeout_s: float,
    ) -> None:
        self._source, self._ranks = source, ranks
        node = ranks.nodes[ranks.rank]
        leader = plan.leaders[node]
        self._writes = [plan.writes(bucket, ranks.rank) for bucket in plan.buckets]
        nbytes = max((bucket.gathered.nbytes for bucket in plan.buckets), default=0)
        self.buffers = allocate(ranks, num_stages if leader == ranks.rank else 0, nbytes, run_id)
        """The stages of this node, on its leader; empty on the others."""
        segments = ranks.gather_objects([buffer.segment() for buffer in self.buffers])[leader]
        self._stages = [buffer.tensor for buffer in self.buffers] or [
            open_shared(segment, writable=True) for segment in segments
        ]
        self._exchange: Exchange | None = None
        self._messages: list[list[Message]] = []
        self.sources = [sender.rank for sender in plan.senders[:1]]
        """The first sender, and other ranks of its node that leave something in place, which they send themselves."""
        self._live: list[frozenset[int]] = [frozenset()] * len(plan.buckets)
        self._left: list[dict[int, int]] = [{}] * len(plan.buckets)
        if in_place_bytes is not None:
            if node == plan.senders[0].node:
                self._live = [self._live_offsets(blocks, in_place_bytes) for blocks in self._writes]
            live = ranks.gather_objects(self._live)
            self.sources += [rank for rank, buckets in enumerate(live) if any(buckets) and rank not in self.sources]
            self._left = [
                {offset: source for source, rank in enumerate(self.sources) for offset in live[rank][number]}
                for number in range(len(plan.buckets))
            ]
        if len(plan.leaders) > 1:
            self._exchange = Exchange(plan.leaders, ranks.rank, timeout_s)
            self._messages = [messages(plan.transfers(bucket)) for bucket in plan.buckets]

    def gather(self, number: int, stage: int) -> LiveTensors:
        """Write this rank's share of bucket `number` into a stage, and pass on what other nodes lack.

        The bucket is whole when all ranks have returned.

        Returns:
            What is left where it lies.

        Raises:
            RankError: another rank died or is late.
        """
        flat = self._stages[stage]
        live: dict[int, Tensor] = {}
        for block in self._writes[number]:
            rows, *columns = block.source or (slice(0, 1),)
            groups = self._source.groups(block.part.spec.name)
            if block.part.offset in self._live[number]:
                live[block.part.offset] = groups.view(-1).view(torch.uint8)
                continue
            target = part_view(flat, block.part)[block.target]
            copy_rows(target if target.ndim else target[None], groups[:, :, *columns], rows.start)
        if flat.is_cuda:
            # The leader's device and this rank's may be two.
            torch.cuda.synchronize(flat.device)
            torch.cuda.synchronize()
        if self._exchange is not None:
            self._ranks.meet_on_node()
            if self.buffers:
                self._exchange.run(flat, self._messages[number])
        return LiveTensors(live, self._left[number])

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.buffers, self._stages = [], []
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _live_offsets(self, blocks: Iterable[Block], in_place_bytes: int) -> frozenset[int]:
        """Where in a bucket the tensors lie that this rank leaves in place."""
        return frozenset(
            block.part.offset
            for block in blocks
            if block.part.nbytes >= in_place_bytes and _is_live(block, self._source.groups(block.part.spec.name))
        )


def _is_live(block: Block, groups: Tensor) -> bool:
    """Whether the live weight is a tensor of the bucket, byte for byte."""
    part = block.part
    return (
        part.is_whole
        and part.shape == tuple(edge.stop - edge.start for edge in block.target)
        and groups.is_contiguous()
        and groups.dtype == getattr(torch, part.spec.dtype)
        and groups.nbytes == part.nbytes
    )


def allocate(ranks: Ranks, count: int, nbytes: int, run_id: str) -> list[SharedBuffer]:
    """Buffers of this rank, each rank as many as it asks for; all call it together.

    Raises:
        OSError: on all ranks, where one of them got no memory; none keeps any.
    """
    buffers: list[SharedBuffer] = []
    problem = None
    try:
        for _ in range(count):
            buffers.append(shared_buffer(nbytes, run_id))
    except OSError as error:
        problem = f"rank {ranks.rank}: {count} buckets of {nbytes} bytes: {error}"
    problems = [each for each in ranks.gather_objects(problem) if each is not None]
    if problems:
        for buffer in buffers:
            buffer.close()
        raise OSError("; ".join(problems))
    return buffers


def copy_rows(target: Tensor, groups: Tensor, start: int) -> None:
    """Fill `target` with rows from `start` on of groups [G, R, ...], counted through all groups."""
    size, row, stop = groups.shape[1], start, start + target.shape[0]
    while row < stop:
        group, within = divmod(row, size)
        whole = (stop - row) // size if within == 0 else 0
        count = whole * size or min(size - within, stop - row)
        place = target[row - start : row - start + count]
        if whole:
            place.unflatten(0, (whole, size)).copy_(groups[group : group + whole])
        else:
            place.copy_(groups[group, within : within + count])
        row += count
