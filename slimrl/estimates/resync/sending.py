"""The second half of a bucket: from rank 0 to the disk, and at the end from there into the engines."""

from collections import Counter
from collections.abc import Sequence

from slimrl.data.model_weights import EnginePlace
from slimrl.estimates.resync.machine import GB, Cost, Machine
from slimrl.resync.buckets import Bucket
from slimrl.resync.plan import ResyncPlan


class DiskEstimate:
    """Rank 0 writes the buckets. Then each node of an engine reads all of it once, and each rank loads its shards.

    Args:
        replicated: tensors, by the name under which they are sent, that every rank of an engine holds whole.
    """

    def __init__(
        self, plan: ResyncPlan, engines: Sequence[EnginePlace], machine: Machine, replicated: frozenset[str]
    ) -> None:
        self._plan, self._engines, self._machine, self._replicated = plan, engines, machine, replicated

    def send(self, bucket: Bucket) -> Cost:
        sent = bucket.sent_bytes
        rate = 1 / self._machine.pcie_gb_per_s + 1 / self._machine.disk_write_gb_per_s
        return Cost(sent * rate / GB, Counter(pcie=sent, disk=sent))

    def end(self) -> Cost:
        """What follows when all buckets are written."""
        machine, buckets = self._machine, self._plan.buckets
        sent = sum(bucket.sent_bytes for bucket in buckets)
        nodes = len({node for engine in self._engines for node in engine.nodes})
        read = max(min(nodes, 1) * sent / machine.disk_read_gb_per_s, nodes * sent / machine.disk_read_total_gb_per_s)
        sizes = [self._sharded_and_replicated(bucket) for bucket in buckets]
        sharded, whole = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
        pcie = [(sharded // engine.num_ranks + whole, engine.num_ranks) for engine in self._engines]
        overhead = sum(map(self._load_overhead, buckets)) if pcie else 0.0
        copies = max((own for own, _ in pcie), default=0) / machine.pcie_gb_per_s
        return Cost(
            (read + copies) / GB + overhead, Counter(disk=nodes * sent, pcie=sum(own * ranks for own, ranks in pcie))
        )

    def _sharded_and_replicated(self, bucket: Bucket) -> tuple[int, int]:
        """Bytes of tensors that engines shard over their ranks, and of those that every rank holds whole."""
        whole = sum(part.nbytes for part in bucket.sent if part.spec.name in self._replicated)
        return bucket.sent_bytes - whole, whole

    def _load_overhead(self, bucket: Bucket) -> float:
        return len(bucket.sent) * self._machine.load_us * 1e-6
