"""Messages for one bucket to the node of rank 0, from the memory of another node's leader straight into rank 0's.

1. Blocks that a node transforms before it passes them on travel as what they became, all others as they are.
2. Neighbouring blocks with the same source travel as one message. Regions of columns are not contiguous: each is a
   message of its own, copied at both ends.
3. The ranks of a node take turns: what a node sends is cut into equal shares, one for each rail, a rank of every node.
   Rails work side by side, so all network adapters of a node do.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl import device
from slimrl.data.model_weights import Place
from slimrl.resync.buckets import Bucket
from slimrl.resync.plan import ResyncPlan
from slimrl.resync.ranks import other_ranks

CUT_BYTES = 512
"""Messages are cut at multiples of this in a bucket: NCCL is slow with memory that is not aligned to 16 bytes."""


@dataclass(frozen=True, kw_only=True)
class Message:
    source: str
    """Node that has the bytes"""
    start: int
    stop: int
    """End of the bytes of the bucket that the message spans, excluded"""
    transformed: bool = False
    """Whether these bytes are of the bucket as it is sent to engines, not as it is gathered."""
    columns: Place | None = None
    """The region of a tensor that the message carries, where that does not fill the span."""
    rail: int = 0
    """Number of the rank that works on the message, among the ranks of its node in order"""

    @property
    def nbytes(self) -> int:
        return self.columns[0].region_bytes(self.columns[1]) if self.columns else self.stop - self.start


def messages(plan: ResyncPlan, bucket: Bucket) -> list[Message]:
    """The messages for a bucket, in one order for all nodes, in as few as possible."""
    each = [
        _message(place, source, transformed=bool(block.outputs))
        for block in plan.passed_on(bucket)
        if (source := plan.source(bucket, block)) != plan.target
        for place in block.outputs or [(block.part, block.region)]
    ]
    each.sort(key=lambda message: (message.transformed, message.start))
    joined: list[Message] = []
    for message in each:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.source, last.stop) == (message.source, message.start)
            and last.transformed is message.transformed
            and last.columns is None is message.columns
        ):
            joined[-1] = replace(last, stop=message.stop)
        else:
            joined.append(message)
    return list(_shared(joined, len(plan.rails)))


class Exchange:
    """The exchange of one rank on its rail. Made by all ranks of the trainer together; those of no rail do nothing.

    Args:
        target: the node that gets the messages.

    Raises:
        RankError: another rank died or is late.
    """

    def __init__(self, rails: Sequence[Mapping[str, int]], target: str, rank: int, timeout_s: float) -> None:
        self._target, self._rail, self._node, self._ranks = target, -1, "", rails[0]
        self._group: Any = None
        with other_ranks():
            for number, ranks in enumerate(rails):
                group = dist.new_group(list(ranks.values()), timeout=timedelta(seconds=timeout_s))
                node = next((node for node, each in ranks.items() if each == rank), None)
                if node is not None:
                    self._rail, self._node, self._ranks, self._group = number, node, ranks, group
            if self._group is not None:
                # NCCL wants all members in a group's first call, and messages are between some of them.
                dist.all_reduce(torch.zeros(1, device=device.compute_device()), group=self._group)

    def run(self, gathered: Tensor, sent: Tensor | None, todo: Iterable[Message]) -> None:
        """Send and receive those of a bucket's messages that are this rail's; all ranks have the same, in one order.

        Args:
            gathered: the bucket in this node's memory.
            sent: the same as the engines get it; None where no message is transformed.

        Raises:
            RankError: another rank of the rail died or is late.
        """
        operations: list[dist.P2POp] = []
        received: list[tuple[Tensor, Tensor]] = []
        with other_ranks():
            for message in todo:
                if message.rail != self._rail or self._node not in (message.source, self._target):
                    continue
                memory = _memory_of(gathered, sent, message)
                is_source = message.source == self._node
                tensor = memory.contiguous()
                if tensor is not memory and not is_source:
                    received.append((memory, tensor))
                # Backends do not know every dtype.
                data = tensor.view(torch.uint8)
                function = dist.isend if is_source else dist.irecv
                peer = self._target if is_source else message.source
                operations.append(dist.P2POp(function, data, self._ranks[peer], group=self._group))
            if operations:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        for memory, tensor in received:
            memory.copy_(tensor)
        device.finish_queued_work()

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


def _message(place: Place, source: str, *, transformed: bool) -> Message:
    part, region = place
    rows, *columns = part.local(region) or (slice(0, 1),)
    row_bytes = part.nbytes // (part.stop - part.start)
    start, stop = (part.offset + edge * row_bytes for edge in (rows.start, rows.stop))
    fills = all((edge.start, edge.stop) == (0, size) for edge, size in zip(columns, part.shape[1:], strict=True))
    return Message(
        source=source,
        start=start,
        stop=stop,
        transformed=transformed,
        columns=None if fills else place,
    )


def _shared(todo: Sequence[Message], num_rails: int) -> Iterator[Message]:
    """The messages, cut so that every rail has an equal share of what each node sends."""
    nbytes: Counter[str] = Counter()
    for message in todo:
        nbytes[message.source] += message.nbytes
    shares = {source: -(-sent // num_rails) for source, sent in nbytes.items()}
    done: Counter[str] = Counter()
    for message in todo:
        source, start = message.source, message.start
        while start < message.stop:
            rail = min(done[source] // max(1, shares[source]), num_rails - 1)
            stop = message.stop
            if message.columns is None and rail + 1 < num_rails:
                left = start + (rail + 1) * shares[source] - done[source]
                stop = min(stop, -(-left // CUT_BYTES) * CUT_BYTES)
            share = replace(message, start=start, stop=stop, rail=rail)
            yield share
            done[source] += share.nbytes
            start = stop


def _memory_of(gathered: Tensor, sent: Tensor | None, message: Message) -> Tensor:
    flat = sent if message.transformed else gathered
    assert flat is not None
    if message.columns is None:
        return flat[message.start : message.stop]
    part, region = message.columns
    return part.region_view(flat, region)  # type: ignore[no-any-return]
