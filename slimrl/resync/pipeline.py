"""All buckets of a version: while one is sent and loaded, the next is gathered and transformed.

Rank 0 has two slots that take turns. Without a transform, buckets are gathered straight into them; with one, into a
staging buffer from which the transform fills the slots. Other leaders have a slot too, if they transform what they pass
on.

A bucket's slot is filled in these steps, with a barrier of the node's ranks between each two:

1. Each rank writes its pieces, each to its final place, in one copy from the live weight that also converts the dtype.
2. The leader transforms what its node has (transform.py).
3. The other nodes send what rank 0's lacks (exchange.py).
4. Rank 0 transforms the rest.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from slimrl import device
from slimrl.data.model_weights import TensorPart, WeightSource
from slimrl.resync.exchange import Exchange, Message, messages
from slimrl.resync.ipc.shared_buffer import SharedBuffer, open_shared, shared_buffer
from slimrl.resync.ipc.stale_files import clean_stale_segments
from slimrl.resync.plan import ResyncPlan
from slimrl.resync.ranks import RankError, Ranks
from slimrl.resync.report import Clock
from slimrl.resync.steps import Pipelined
from slimrl.resync.transfer import Progress, SyncErrors
from slimrl.resync.transform import NodeTransform, Record

Send = Callable[[Sequence[TensorPart], SharedBuffer], None]
"""Function that sends a bucket; see Transport.send."""

NUM_SLOTS = 2
"""Buffers that take turns: one is filled while the other is sent."""


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
        self._gatherer = Gatherer(plan, source, ranks.rank)
        self._exchange: Exchange | None = None
        self._messages: list[list[Message]] = []
        if len(plan.leaders) > 1:
            self._messages = [messages(plan, bucket) for bucket in plan.buckets]
        num_staging = 1 if plan.transform else NUM_SLOTS
        gathered = max((bucket.gathered_bytes for bucket in plan.buckets), default=0)
        self._staging = self._slots = NodeMemory(ranks, leader, num_staging, gathered, run_id, mapped=True)
        self._node_transform: NodeTransform | None = None
        try:
            if plan.transform is not None:
                passes_on = any(message.transformed for todo in self._messages for message in todo)
                num_slots = NUM_SLOTS if ranks.rank == 0 else int(passes_on)
                sent = max((bucket.sent_bytes for bucket in plan.buckets), default=0)
                self._slots = NodeMemory(ranks, leader, num_slots, sent, run_id, mapped=passes_on)
                if self._slots.buffers:
                    self._node_transform = NodeTransform(plan, ranks.rank)
            if len(plan.leaders) > 1:
                self._exchange = Exchange(plan.rails, plan.target, ranks.rank, timeout_s)
        except (OSError, RankError):
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank holds."""
        return sum(memory.nbytes for memory in {self._staging, self._slots})

    def run(
        self,
        send: Send | None,
        sync_errors: SyncErrors,
        clock: Clock,
        on_progress: Progress | None,
        record: Record,
    ) -> None:
        """Gather every bucket and, on rank 0, send it.

        Args:
            send: None on other ranks, and where there is no engine.
            record: called for each place whose hashes this rank has to add.

        Raises:
            RankError: another rank died or is late. Whatever `sync_errors` raises.
        """
        buckets = self._plan.buckets

        def send_bucket(number: int) -> None:
            assert send is not None, "sends nothing"
            send(buckets[number].sent, self._slots.buffers[number % NUM_SLOTS])

        pipelined = Pipelined(
            [self._place(number) for number in range(len(buckets))], sync_errors, clock, on_progress, self._timeout_s
        )
        pipelined.run(
            lambda number: self._fill(number, number % NUM_SLOTS, clock, record),
            send_bucket if send is not None else None,
            overlapping=False,
        )

    def close(self) -> None:
        self._slots.close()
        self._staging.close()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _fill(self, number: int, slot: int, clock: Clock, record: Record) -> ValueError | None:
        """Fill a slot with a bucket; returns what the transform raised, which all ranks must learn."""
        staging, slots, transform = self._staging.tensors, self._slots.tensors, self._node_transform
        gathered = staging[slot % len(staging)]
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

    def _place(self, number: int) -> str:
        first = self._plan.buckets[number].gathered[0].spec.name
        return f"at bucket {number + 1} of {len(self._plan.buckets)} ({first})"


class NodeMemory:
    """Buffers on the leader of this rank's node. All ranks construct it together.

    Args:
        leader: of this rank's node.
        count: buffers on this rank, if it is the leader; the number may differ between leaders.
        run_id: part of a file's name.
        mapped: whether the other ranks map them.

    Raises:
        OSError: on all ranks, when one of them got no memory; all is released.
        RankError: another rank died or is late; this one's is released.
    """

    def __init__(self, ranks: Ranks, leader: int, count: int, nbytes: int, run_id: str, *, mapped: bool) -> None:
        self.buffers: list[SharedBuffer] = []
        """The leader's buffers; empty on other ranks."""
        self.tensors: list[Tensor] = []
        """The buffers as tensors, uint8 [nbytes]; on other ranks those of the leader, if they are mapped."""
        try:
            self._allocate(ranks, count if ranks.rank == leader else 0, nbytes, run_id)
            self.tensors = [buffer.tensor for buffer in self.buffers]
            if mapped:
                segments = ranks.gather_objects([buffer.segment() for buffer in self.buffers])[leader]
                self.tensors = self.tensors or [open_shared(segment, writable=True) for segment in segments]
        except (OSError, RankError):
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank holds."""
        return sum(buffer.tensor.numel() for buffer in self.buffers)

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()
        self.buffers, self.tensors = [], []

    def _allocate(self, ranks: Ranks, count: int, nbytes: int, run_id: str) -> None:
        problem = None
        try:
            for _ in range(count):
                self.buffers.append(shared_buffer(nbytes, run_id, device.compute_device()))
        except OSError as error:
            problem = f"rank {ranks.rank}: {count} buckets of {nbytes} bytes: {error}"
        problems = [each for each in ranks.gather_objects(problem) if each is not None]
        if problems:
            raise OSError("; ".join(problems))


class Gatherer:
    def __init__(self, plan: ResyncPlan, source: WeightSource, rank: int) -> None:
        self._source = source
        self._writes = [plan.writes(bucket, rank) for bucket in plan.buckets]

    def write(self, number: int, flat: Tensor) -> None:
        """Write this rank's pieces of bucket `number` into the node's memory.

        It has all that the node gathers when all of its ranks have returned.
        """
        for part, region, piece, _ in self._writes[number]:
            groups = self._source.groups(part.spec.name)
            target = part.region_view(flat, region)
            first_row = piece.first_row + (region[0].start - piece.region[0].start if region else 0)
            # Without the padding that may follow.
            columns = [slice(0, edge.stop - edge.start) for edge in region[1:]]
            copy_rows(target if target.ndim else target[None], groups[:, :, *columns], first_row)
        device.finish_queued_work()


def copy_rows(target: Tensor, groups: Tensor, start: int) -> None:
    """Fill `target` with the rows of groups [G, R, ...] from row `start` on, counted through all groups."""
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
