"""What leaders of the trainer's nodes pass to each other of one bucket.

Neighbouring blocks with the same way travel as one message, out of the memory of one leader straight into that of the
other. Blocks of columns are not contiguous in memory; each is a message of its own, copied at both ends.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.data.protocols import TensorPart
from slimrl.resync.plan import Block, Transfer
from slimrl.resync.ranks import other_ranks


@dataclass(frozen=True, kw_only=True)
class Message:
    source: str
    """The node that has it"""
    targets: tuple[str, ...]
    start: int
    stop: int
    """Bytes of the bucket that it spans"""
    columns: Block | None = None
    """The block, where it does not fill the span."""


def messages(transfers: Iterable[Transfer]) -> list[Message]:
    """The transfers of a bucket as few messages."""
    joined: list[Message] = []
    for message in map(_message, transfers):
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.source, last.targets, last.stop) == (message.source, message.targets, message.start)
            and last.columns is None is message.columns
        ):
            joined[-1] = replace(last, stop=message.stop)
        else:
            joined.append(message)
    return joined


def part_view(flat: Tensor, part: TensorPart) -> Tensor:
    """The part of a tensor that lies in a bucket's memory."""
    return flat[part.offset : part.offset + part.nbytes].view(getattr(torch, part.spec.dtype)).view(part.shape)


class Exchange:
    """The group of all leaders. Made by all ranks of the trainer together, used by the leaders alone."""

    def __init__(self, leaders: Mapping[str, int], rank: int, timeout_s: float) -> None:
        self._leaders, self._rank = leaders, rank
        self._node = next((node for node, leader in leaders.items() if leader == rank), None)
        self._group: Any = dist.new_group(list(leaders.values()), timeout=timedelta(seconds=timeout_s))

    def run(self, flat: Tensor, todo: Iterable[Message]) -> None:
        """Send and receive a bucket's messages; those of every leader must be the same, in one order.

        Raises:
            RankError: another leader died or is late.
        """
        operations: list[dist.P2POp] = []
        received: list[tuple[Tensor, Tensor]] = []
        with other_ranks():
            for message in todo:
                to_all = len(message.targets) > 1
                if not to_all and self._node not in (message.source, *message.targets):
                    continue
                place = _place(flat, message)
                is_source = message.source == self._node
                tensor = place.contiguous()
                if tensor is not place and not is_source:
                    received.append((place, tensor))
                if to_all:
                    dist.broadcast(tensor, self._leaders[message.source], group=self._group)
                    continue
                function = dist.isend if is_source else dist.irecv
                peer = message.targets[0] if is_source else message.source
                operations.append(dist.P2POp(function, tensor, self._leaders[peer], group=self._group))
            if operations:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        for place, tensor in received:
            place.copy_(tensor)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def close(self) -> None:
        if self._node is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


def _message(transfer: Transfer) -> Message:
    part, target = transfer.block.part, transfer.block.target
    if not target:
        start, stop, fills = part.offset, part.offset + part.nbytes, True
    else:
        row = part.nbytes // (part.stop - part.start)
        start, stop = (part.offset + edge * row for edge in (target[0].start, target[0].stop))
        fills = all(
            (columns.start, columns.stop) == (0, size) for columns, size in zip(target[1:], part.shape[1:], strict=True)
        )
    return Message(
        source=transfer.source,
        targets=transfer.targets,
        start=start,
        stop=stop,
        columns=None if fills else transfer.block,
    )


def _place(flat: Tensor, message: Message) -> Tensor:
    if message.columns is None:
        return flat[message.start : message.stop]
    return part_view(flat, message.columns.part)[message.columns.target]
