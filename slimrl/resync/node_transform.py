"""The transform of each bucket on the leader of a node, before the exchange with other nodes and behind it.

1. Before: what the node has, and needs or passes on, if it can be transformed there and is smaller then.
2. Behind, on a sender: everything else.

Each tensor is hashed once before and after its transform, by the leader from which the first sender has it; so a fault
of the exchange shows in the engines, whose fingerprints differ.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from slimrl import device
from slimrl.data.weights import Place
from slimrl.resync.plan import Block, ResyncPlan
from slimrl.resync.report import Clock

Record = Callable[[Place, Tensor, Sequence[tuple[Place, Tensor]]], None]
"""Function that is called with a place, its values, and what the transform made of it."""


class NodeTransform:
    """The transform of a plan's buckets on a leader."""

    def __init__(self, plan: ResyncPlan, rank: int) -> None:
        assert plan.transform is not None
        self._transform, self._buckets = plan.transform, plan.buckets
        node, is_sender = plan.nodes[rank], plan.sender(rank) is not None
        self._is_first = plan.senders[:1] == (plan.sender(rank),)
        self._before: list[list[tuple[Block, bool]]] = [
            [(block, plan.answers_for(bucket, block) == node) for block in plan.transforms(bucket, node)]
            for bucket in plan.buckets
        ]
        self._behind = [plan.transforms_behind(bucket) if is_sender else [] for bucket in plan.buckets]

    def before(self, number: int, gathered: Tensor, sent: Tensor, clock: Clock, record: Record) -> ValueError | None:
        """Returns what the transform raised, since other nodes wait for this one in the exchange."""
        blocks = self._before[number]
        error = self._apply(number, gathered, sent, [(block.part, block.region) for block, _ in blocks], clock)
        if error is None:
            with clock("hash"):
                for block, answers in blocks:
                    if answers:
                        results = [(place, place[0].region_view(sent, place[1])) for place in block.outputs]
                        value = block.part.region_view(gathered, block.region)
                        record((block.part, block.region), value, results)
        return error

    def behind(self, number: int, gathered: Tensor, sent: Tensor, clock: Clock, record: Record) -> ValueError | None:
        bucket, parts = self._buckets[number], self._behind[number]
        error = self._apply(number, gathered, sent, [(part, part.region) for part in parts], clock)
        if error is None and self._is_first:
            with clock("hash"):
                for part in parts:
                    outputs = bucket.outputs(self._transform, part)
                    results = [((output, output.region), output.view(sent)) for output in outputs]
                    record((part, part.region), part.view(gathered), results)
        return error

    def _apply(
        self, number: int, gathered: Tensor, sent: Tensor, places: Sequence[Place], clock: Clock
    ) -> ValueError | None:
        if not places:
            return None
        try:
            with clock("transform"):
                self._transform.apply(self._buckets[number], gathered, sent, places)
        except ValueError as error:
            return error
        finally:
            # Next all ranks agree or exchange, and then some write the following bucket into the stage.
            with clock("transform"):
                device.finish_queued_work()
        return None
