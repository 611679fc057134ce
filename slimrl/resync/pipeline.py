"""All buckets of a version: while one is sent and loaded, the next is gathered and transformed.

A sender has two slots that take turns. Without a transform, buckets are gathered straight into them; with one, into a
stage from which the transform fills the slots. Where the transport sends in place, other ranks of the sender's node
send what they left where it lies (contribution.py).
All ranks agree twice over each bucket k: that it is whole, whereupon it is sent, and that bucket k - 1 has arrived,
whereupon its slot is filled with bucket k + 1. Where the transport allows, bucket k is on its way before bucket k - 1
has arrived, so that the engines need not wait for it.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from slimrl.data.protocols import BucketSpec, TensorPart, WeightSource
from slimrl.models.shared_buffer import SharedBuffer
from slimrl.resync.buckets import PlannedBucket, Transform
from slimrl.resync.exchange import part_view
from slimrl.resync.gather import Gatherer, allocate
from slimrl.resync.live import LiveTensors
from slimrl.resync.plan import ResyncPlan
from slimrl.resync.ranks import RankError, Ranks
from slimrl.resync.report import Clock
from slimrl.resync.sending import SendClock, Sending
from slimrl.resync.shared_buffer import clean_stale_segments

Progress = Callable[[int, int], None]
"""Called with (buckets sent, buckets in all)."""

Send = Callable[[BucketSpec, SharedBuffer, LiveTensors], None]
"""Of a sender; see Transport."""

Contribute = Callable[[LiveTensors], None]
"""Of another rank; see Contribution."""

Record = Callable[[TensorPart, Tensor, list[Tensor]], None]
"""Called with a part of a tensor, its values, and what the transform made of them."""

Settle = Callable[[str, Exception | None], None]
"""Called on all ranks with the place and this rank's error; raises where any of them met one."""

NUM_SLOTS = 2


class Pipeline:
    """This rank's part, with the memory for it. Made by all ranks together.

    Args:
        in_place_bytes: of tensors that the transport takes from where they lie; see Transport.

    Raises:
        OSError: on all ranks; no shared memory is left, that of killed runs included, which is freed first.
    """

    def __init__(
        self,
        plan: ResyncPlan,
        source: WeightSource,
        ranks: Ranks,
        transform: Transform | None,
        *,
        in_place_bytes: int | None,
        run_id: str,
        timeout_s: float,
    ) -> None:
        clean_stale_segments()
        self._plan, self._ranks, self._transform = plan, ranks, transform
        self._timeout_s = timeout_s
        num_stages = 1 if transform else NUM_SLOTS
        self._gatherer = Gatherer(
            plan, source, ranks, num_stages=num_stages, in_place_bytes=None if transform else in_place_bytes,
            run_id=run_id, timeout_s=timeout_s,
        )  # fmt: skip
        self._slots = self._gatherer.buffers if plan.sender(ranks.rank) else []
        if transform is not None:
            nbytes = max((bucket.sent.nbytes for bucket in plan.buckets), default=0)
            try:
                self._slots = allocate(ranks, NUM_SLOTS if self._slots else 0, nbytes, run_id)
            except OSError:
                self._gatherer.close()
                raise

    @property
    def sources(self) -> list[int]:
        """The first sender, and other ranks that send what they leave in place."""
        return self._gatherer.sources

    @property
    def nbytes(self) -> int:
        """Memory that this rank holds."""
        buffers = {id(buffer): buffer for buffer in (*self._gatherer.buffers, *self._slots)}
        return sum(buffer.tensor.numel() for buffer in buffers.values())

    def run(
        self,
        send: Send | None,
        settle: Settle,
        clock: Clock,
        on_progress: Progress | None,
        record: Record | None = None,
        *,
        contribute: Contribute | None = None,
        arrived: Callable[[], None] | None = None,
        overlapping: bool = False,
    ) -> None:
        """Gather every bucket and, on a sender, send it.

        Args:
            send: None on a rank that sends to no engine, or to none any more.
            record: told what the transform makes of each part, where this rank transforms.
            contribute: of a rank that is a source beside the sender.
            arrived: called when all ranks have sent what they have of a bucket, in the order of buckets.
            overlapping: a send may begin before the one before it has ended.

        Raises:
            RankError: another rank died or is late. Whatever `settle` raises.
        """
        send_clock = SendClock(clock)
        sending: list[Sending] = []
        total = len(self._plan.buckets)
        number = 0
        try:
            for number, bucket in enumerate(self._plan.buckets):
                slot = number % NUM_SLOTS
                live, problem = self._fill(number, slot, clock, record)
                with clock("agree"):
                    settle(self._place(number), problem)
                call: Callable[[], None] | None = None
                if send is not None:
                    call = partial(send, bucket.sent, self._slots[slot], live)
                elif contribute is not None:
                    call = partial(contribute, live)
                if call is not None:
                    after = None if overlapping else next(iter(sending), None)
                    sending.append(Sending(partial(send_clock.run, call), after))
                if number:
                    self._arrive(number - 1, sending, settle, clock, arrived, on_progress)
            if total:
                self._arrive(total - 1, sending, settle, clock, arrived, on_progress)
        except RankError as error:
            raise RankError(f"{self._place(number)}: {error}") from error
        finally:
            for each in sending:
                each.wait(self._timeout_s)

    def close(self) -> None:
        for buffer in self._slots:
            buffer.close()
        self._slots = []
        self._gatherer.close()

    def _fill(
        self, number: int, slot: int, clock: Clock, record: Record | None
    ) -> tuple[LiveTensors, ValueError | None]:
        """Bring this rank's share of a bucket into a slot.

        Returns:
            What is left where it lies, and what the transform raised, so that the others hear of it.
        """
        with clock("gather"):
            live = self._gatherer.gather(number, 0 if self._transform else slot)
        if self._transform is None:
            return live, None
        self._ranks.meet_on_node()
        return live, self._fill_slot(self._plan.buckets[number], slot, clock, record)

    def _arrive(
        self,
        number: int,
        sending: list[Sending],
        settle: Settle,
        clock: Clock,
        arrived: Callable[[], None] | None,
        on_progress: Progress | None,
    ) -> None:
        """Wait until a bucket, the first of those under way, has arrived everywhere."""
        error = None
        if sending:
            with clock("wait"):
                error = sending.pop(0).wait(self._timeout_s)
                if error is not None:
                    # Whose fault it was is found out by asking all engines, and one that still loads does not answer.
                    for each in sending:
                        each.wait(self._timeout_s)
        with clock("agree"):
            settle(self._place(number), error)
        if arrived is not None:
            arrived()
        if on_progress is not None:
            on_progress(number + 1, len(self._plan.buckets))

    def _place(self, number: int) -> str:
        first = self._plan.buckets[number].gathered.parts[0].spec.name
        return f"at bucket {number + 1} of {len(self._plan.buckets)} ({first})"

    def _fill_slot(self, bucket: PlannedBucket, slot: int, clock: Clock, record: Record | None) -> ValueError | None:
        """Transform the bucket; what the transform raised."""
        if not self._slots:
            return None
        assert self._transform is not None
        stage, target = self._gatherer.buffers[0].tensor, self._slots[slot].tensor
        sent = {(part.spec.name, part.start): part for part in bucket.sent.parts}
        for part in bucket.gathered.parts:
            outputs = self._transform.outputs(part.spec, part.start, part.stop)
            views = [part_view(target, sent[spec.name, start]) for spec, start, _ in outputs]
            value = part_view(stage, part)
            try:
                with clock("transform"):
                    self._transform.apply(part, value, views)
            except ValueError as error:
                return error
            if record is not None:
                with clock("hash"):
                    record(part, value, views)
        return None
