"""All buckets of a version: while one is sent and loaded, the next is gathered and transformed.

A sender has two slots that take turns. Without a transform, buckets are gathered straight into them; with one, into a
stage from which the transform fills the slots. Other leaders have a slot too, if they transform what they pass on.

A bucket's slot is filled in these steps, with a barrier of the node's ranks between each two:

1. Each rank writes its pieces.
2. The leader transforms what its node has (node_transform.py).
3. Nodes send each other what they lack (exchange.py).
4. A sender transforms the rest.

All ranks agree twice on each bucket k: that it is whole, so it is sent; and that bucket k - 1 has arrived, so its slot
is filled with bucket k + 1. An overlapping transport starts to send bucket k before bucket k - 1 has arrived, so the
engines need not wait for it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from slimrl.data.weights import TensorPart, WeightSource
from slimrl.resync.exchange import Exchange, Message, messages
from slimrl.resync.gather import Gatherer
from slimrl.resync.ipc.shared_buffer import SharedBuffer
from slimrl.resync.ipc.stale_files import clean_stale_segments
from slimrl.resync.node_memory import NodeMemory
from slimrl.resync.node_transform import NodeTransform, Record
from slimrl.resync.plan import ResyncPlan
from slimrl.resync.ranks import RankError, Ranks
from slimrl.resync.report import Clock
from slimrl.resync.sending import SendClock, SendThread

Progress = Callable[[int, int], None]
"""Function that is called with (buckets sent, buckets in all)."""

Send = Callable[[Sequence[TensorPart], SharedBuffer], None]
"""Function that sends a bucket; see Transport.send."""

SyncErrors = Callable[[str, Exception | None], None]
"""Called on all ranks with the place and this rank's error or None; raises on all where any has an error."""

NUM_SLOTS = 2


class Pipeline:
    """One rank of the pipeline, with its memory. All ranks construct it together. Frees the buffers of killed runs
    first.

    Raises:
        OSError: on all ranks, when a node or a device has no memory left.
        RankError: another rank died or is late.
    """

    def __init__(self, plan: ResyncPlan, source: WeightSource, ranks: Ranks, *, run_id: str, timeout_s: float) -> None:
        clean_stale_segments()
        self._plan, self._ranks, self._timeout_s = plan, ranks, timeout_s
        leader = plan.leaders[ranks.nodes[ranks.rank]]
        sender = plan.sender(ranks.rank)
        self._gatherer = Gatherer(plan, source, ranks.rank)
        self._exchange: Exchange | None = None
        self._messages: list[list[Message]] = []
        if len(plan.leaders) > 1:
            self._messages = [messages(plan, bucket) for bucket in plan.buckets]
        num_stages = 1 if plan.transform else NUM_SLOTS
        gathered = max((bucket.gathered_bytes for bucket in plan.buckets), default=0)
        self._stages = self._slots = NodeMemory(ranks, leader, num_stages, gathered, run_id, mapped=True)
        self._node_transform: NodeTransform | None = None
        try:
            if plan.transform is not None:
                passes_on = any(message.transformed for todo in self._messages for message in todo)
                num_slots = NUM_SLOTS if sender else int(passes_on)
                sent = max((bucket.sent_bytes for bucket in plan.buckets), default=0)
                self._slots = NodeMemory(ranks, leader, num_slots, sent, run_id, mapped=passes_on)
                if self._slots.buffers:
                    self._node_transform = NodeTransform(plan, ranks.rank)
            if len(plan.leaders) > 1:
                self._exchange = Exchange(plan.rails, ranks.rank, timeout_s)
        except (OSError, RankError):
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank holds."""
        return sum(memory.nbytes for memory in {self._stages, self._slots})

    def run(
        self,
        send: Send | None,
        sync_errors: SyncErrors,
        clock: Clock,
        on_progress: Progress | None,
        record: Record,
        *,
        overlapping: bool = False,
    ) -> None:
        """Gather every bucket and, on a sender, send it.

        Args:
            send: None on a rank that sends to no engine, or no longer.
            record: called for each place whose hashes this rank has to add.
            overlapping: a send may begin before the one before it has ended.

        Raises:
            RankError: another rank died or is late. Whatever `sync_errors` raises.
        """
        send_clock = SendClock(clock)
        sending: list[SendThread] = []
        total = len(self._plan.buckets)
        number = 0
        try:
            for number, bucket in enumerate(self._plan.buckets):
                slot = number % NUM_SLOTS
                problem = self._fill(number, slot, clock, record)
                with clock("agree"):
                    sync_errors(self._place(number), problem)
                if send is not None:
                    call = partial(send, bucket.sent, self._slots.buffers[slot])
                    after = None if overlapping else next(iter(sending), None)
                    sending.append(SendThread(partial(send_clock.run, call), after))
                if number:
                    self._arrive(number - 1, sending, sync_errors, clock, on_progress)
            if total:
                self._arrive(total - 1, sending, sync_errors, clock, on_progress)
        except RankError as error:
            raise RankError(f"{self._place(number)}: {error}") from error
        finally:
            for each in sending:
                each.wait(self._timeout_s)

    def close(self) -> None:
        self._slots.close()
        self._stages.close()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _fill(self, number: int, slot: int, clock: Clock, record: Record) -> ValueError | None:
        """Fill a slot with a bucket; returns what the transform raised, which all ranks must learn."""
        stages, slots, transform = self._stages.tensors, self._slots.tensors, self._node_transform
        gathered = stages[slot % len(stages)]
        # A rank that is no leader may map none.
        sent = slots[slot % len(slots)] if slots else None
        problem = None
        with clock("gather"):
            self._gatherer.write(number, gathered)
        if self._exchange is not None:
            self._ranks.node_barrier()
            if transform is not None and sent is not None:
                problem = transform.before(number, gathered, sent, clock, record)
            if self._plan.transform is not None:
                self._ranks.node_barrier()
            with clock("gather"):
                self._exchange.run(gathered, sent, self._messages[number])
        if self._plan.transform is not None:
            self._ranks.node_barrier()
        if problem is None and transform is not None and sent is not None:
            problem = transform.behind(number, gathered, sent, clock, record)
        return problem

    def _arrive(
        self,
        number: int,
        sending: list[SendThread],
        sync_errors: SyncErrors,
        clock: Clock,
        on_progress: Progress | None,
    ) -> None:
        """Wait until a bucket, the oldest that is being sent, has arrived everywhere."""
        error = None
        if sending:
            with clock("wait"):
                error = sending.pop(0).wait(self._timeout_s)
                if error is not None:
                    # All engines are probed next, and one that still loads does not answer.
                    for each in sending:
                        each.wait(self._timeout_s)
        with clock("agree"):
            sync_errors(self._place(number), error)
        if on_progress is not None:
            on_progress(number + 1, len(self._plan.buckets))

    def _place(self, number: int) -> str:
        first = self._plan.buckets[number].gathered[0].spec.name
        return f"at bucket {number + 1} of {len(self._plan.buckets)} ({first})"
