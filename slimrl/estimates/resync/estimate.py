"""Estimates a resync in buckets, through `disk`: bytes on every kind of link and seconds, from its plan and the speeds
of the links. peer_estimate.py estimates `p2p`.

1. The plan says what each rank writes of a bucket and which messages nodes send; nothing else is simulated. Gathering
   and sending a bucket each take as long as their busiest link needs.
2. Gathering, exchange and transform of a bucket follow each other, and run while the bucket before is sent. A
   bucket takes the longer of the two.
3. At the end the engines load all of them.

Left out: pause, flush and resume, which do not depend on the model's size, verification, and other jobs on the network.
Engines are assumed to shard the tensors that the trainer shards, and to replicate others.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slimrl.config.schema.resync import TransportName
from slimrl.data.model_weights import EnginePlace
from slimrl.estimates.resync.gathering import exchange, gather, transform
from slimrl.estimates.resync.machine import Machine
from slimrl.estimates.resync.sending import DiskEstimate
from slimrl.resync.plan import ResyncPlan

ESTIMATED = (TransportName.ipc, TransportName.p2p, TransportName.disk)
"""Transports whose bytes follow from the model; those of `delta` follow from what an update changes."""

NOT_ESTIMATED = (
    "delta sends what an update changes, which does not follow from the layout. Estimate "
    f"{', '.join(known.value for known in ESTIMATED)}."
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    tensors: int
    gathered_bytes: int
    """Bytes of the model as the trainer has it, counted once."""
    sent_bytes: int
    """Bytes of the model as the engines get it, which may be quantised, counted once."""
    link_bytes: dict[str, int]
    """Bytes by kind of link, all machines together: memory (read and written within a GPU), nvlink, network, pcie,
    disk."""
    seconds: float
    stage_seconds: dict[str, float]
    """Seconds of each stage, added up over buckets or rounds. Stages overlap."""


@dataclass(frozen=True, kw_only=True)
class BucketEstimate(Estimate):
    """The stages are gather, exchange, transform, send, end."""

    buckets: int


def estimate(
    plan: ResyncPlan,
    engines: Sequence[EnginePlace],
    machine: Machine,
    *,
    replicated: Collection[str] = (),
) -> BucketEstimate:
    """Bytes and seconds of one version.

    Args:
        engines: all that load it.
        replicated: tensors, by the name under which they are sent, that every rank of an engine holds whole.
    """
    sending = DiskEstimate(plan, engines, machine, frozenset(replicated))
    seconds: dict[str, float] = defaultdict(float)
    link_bytes: Counter[str] = Counter()
    total = last_send = 0.0
    for bucket in plan.buckets:
        first = {
            "gather": gather(plan, bucket, machine),
            "exchange": exchange(plan, bucket, machine),
            "transform": transform(plan, bucket, machine),
        }
        send = sending.send(bucket)
        total += max(sum(stage.seconds for stage in first.values()), last_send)
        last_send = send.seconds
        for name, stage in (*first.items(), ("send", send)):
            seconds[name] += stage.seconds
            link_bytes += stage.link_bytes
    end = sending.end()
    seconds["end"] += end.seconds
    sent = sum(bucket.sent_bytes for bucket in plan.buckets)
    return BucketEstimate(
        tensors=len(plan.pieces),
        gathered_bytes=sum(bucket.gathered_bytes for bucket in plan.buckets),
        sent_bytes=sent,
        buckets=len(plan.buckets),
        link_bytes=dict(link_bytes + end.link_bytes),
        seconds=total + last_send + end.seconds,
        stage_seconds={name: value for name, value in seconds.items() if value},
    )


def as_json(result: Estimate, machine: Machine) -> dict[str, Any]:
    """The figures and the speeds that they rest on."""
    return {**asdict(result), "machine": asdict(machine)}
