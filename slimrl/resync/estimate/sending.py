"""The second half of a bucket, by transport: from the senders into the engines."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from slimrl.data.protocols import EnginePlace
from slimrl.resync.buckets import PlannedBucket
from slimrl.resync.estimate.machine import GB, Machine
from slimrl.resync.estimate.stage import Stage, copy_seconds
from slimrl.resync.plan import ResyncPlan


class Sending(Protocol):
    def send(self, bucket: PlannedBucket) -> Stage: ...

    def end(self) -> Stage:
        """What follows when all buckets are sent."""
        ...


class IpcSending:
    """Engines copy out of the memory of their node's leader, whose GPU the first rank of one of them shares.

    The call for a bucket is under way while the one before is loaded, so calls take no time of their own.
    """

    def __init__(
        self, plan: ResyncPlan, engines: Sequence[EnginePlace], machine: Machine, replicated: frozenset[str]
    ) -> None:
        self._machine, self._replicated = machine, replicated
        places = {engine.name: engine for engine in engines}
        self._nodes = Counter(
            tuple(places[name].num_ranks for name in sender.engines) for sender in plan.senders if sender.engines
        )
        """Ranks of each engine of a node, and how many nodes are like that."""

    def send(self, bucket: PlannedBucket) -> Stage:
        cut, whole = _cut_and_whole(bucket, self._replicated)
        stage = Stage()
        for engines, nodes in self._nodes.items():
            everything = sum(cut + whole * ranks for ranks in engines)
            own = cut // engines[0] + whole
            seconds = max(copy_seconds(own, self._machine), (everything - own) / (self._machine.nvlink_gb_per_s * GB))
            stage.seconds = max(stage.seconds, seconds)
            stage.link_bytes += Counter(memory=2 * own * nodes, nvlink=(everything - own) * nodes)
        stage.seconds += _load_overhead(bucket, self._machine)
        return stage

    def end(self) -> Stage:
        return Stage()


class CollectiveSending:
    """One broadcast to a receiver for each engine and node, along a chain that enters a node once.

    The other ranks of the engine on that node copy out of the receiver's memory, while it receives the next bucket.
    """

    def __init__(
        self, plan: ResyncPlan, engines: Sequence[EnginePlace], machine: Machine, replicated: frozenset[str]
    ) -> None:
        self._engines, self._machine, self._replicated = engines, machine, replicated
        nodes = {node for engine in engines for node in engine.nodes}
        self._remote_nodes = len(nodes - {plan.senders[0].node})
        self._receivers = sum(len(engine.nodes) for engine in engines)
        self._last_loading = 0.0

    def send(self, bucket: PlannedBucket) -> Stage:
        machine, sent = self._machine, bucket.sent.nbytes
        within = sent * (self._receivers - self._remote_nodes)
        stage = Stage(link_bytes=Counter(network=sent * self._remote_nodes, nvlink=within))
        cut, whole = _cut_and_whole(bucket, self._replicated)
        loading = 0.0
        for engine in self._engines:
            ranks = engine.num_ranks // len(engine.nodes)
            own = cut // engine.num_ranks + whole
            others = own * (ranks - 1)
            loading = max(loading, copy_seconds(own, machine), others / (machine.nvlink_gb_per_s * GB))
            stage.link_bytes += Counter(memory=2 * own * len(engine.nodes), nvlink=others * len(engine.nodes))
        loading += _load_overhead(bucket, machine) + machine.bucket_ms * 1e-3
        stage.seconds = max(self._broadcast_seconds(sent), self._last_loading)
        self._last_loading = loading
        return stage

    def end(self) -> Stage:
        return Stage(self._last_loading)

    def _broadcast_seconds(self, nbytes: int) -> float:
        if self._remote_nodes:
            return nbytes / (self._machine.network_gb_per_s * GB) + self._remote_nodes * self._machine.hop_us * 1e-6
        return nbytes / (self._machine.nvlink_gb_per_s * GB)


class DiskSending:
    """Rank 0 writes the buckets; then each node of an engine reads all of it once, and each rank loads its share."""

    def __init__(
        self, plan: ResyncPlan, engines: Sequence[EnginePlace], machine: Machine, replicated: frozenset[str]
    ) -> None:
        self._plan, self._engines, self._machine, self._replicated = plan, engines, machine, replicated

    def send(self, bucket: PlannedBucket) -> Stage:
        sent = bucket.sent.nbytes
        rate = 1 / self._machine.pcie_gb_per_s + 1 / self._machine.disk_write_gb_per_s
        return Stage(sent * rate / GB, Counter(pcie=sent, disk=sent))

    def end(self) -> Stage:
        machine, buckets = self._machine, self._plan.buckets
        sent = sum(bucket.sent.nbytes for bucket in buckets)
        nodes = len({node for engine in self._engines for node in engine.nodes})
        read = max(min(nodes, 1) * sent / machine.disk_read_gb_per_s, nodes * sent / machine.disk_read_total_gb_per_s)
        sizes = [_cut_and_whole(bucket, self._replicated) for bucket in buckets]
        cut, whole = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
        pcie = [(cut // engine.num_ranks + whole, engine.num_ranks) for engine in self._engines]
        overhead = sum(len(bucket.sent.parts) for bucket in buckets) * machine.load_us * 1e-6 if pcie else 0.0
        copies = max((share for share, _ in pcie), default=0) / machine.pcie_gb_per_s
        return Stage(
            (read + copies) / GB + overhead,
            Counter(disk=nodes * sent, pcie=sum(share * ranks for share, ranks in pcie)),
        )


def _load_overhead(bucket: PlannedBucket, machine: Machine) -> float:
    return len(bucket.sent.parts) * machine.load_us * 1e-6


def _cut_and_whole(bucket: PlannedBucket, replicated: frozenset[str]) -> tuple[int, int]:
    """Bytes of tensors that engines cut over their ranks, and of those that every rank holds whole."""
    whole = sum(part.nbytes for part in bucket.sent.parts if part.spec.name in replicated)
    return bucket.sent.nbytes - whole, whole
