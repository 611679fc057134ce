"""The first half of a bucket: from the trainer's ranks into the memory of rank 0."""

from collections import Counter

from slimrl.estimates.resync.machine import GB, Cost, Machine
from slimrl.resync.buckets import Bucket
from slimrl.resync.exchange import messages
from slimrl.resync.plan import ResyncPlan


def gather(plan: ResyncPlan, bucket: Bucket, machine: Machine) -> Cost:
    """All ranks write at once into their leader's memory."""
    nbytes: Counter[int] = Counter()
    pieces: Counter[int] = Counter()
    for block in plan.blocks(bucket):
        rank = plan.owners(block.piece)[plan.source(bucket, block)]
        nbytes[rank] += block.part.region_bytes(block.region)
        pieces[rank] += 1
    local: Counter[str] = Counter()
    remote: Counter[str] = Counter()
    for rank, written in nbytes.items():
        node = plan.nodes[rank]
        (local if plan.leaders[node] == rank else remote)[node] += written
    busiest = max(
        machine.copy_seconds(max(local.values(), default=0)),
        max(remote.values(), default=0) / (machine.nvlink_gb_per_s * GB),
    )
    overhead = max(pieces.values(), default=0) * machine.gather_us * 1e-6
    return Cost(busiest + overhead, Counter(memory=2 * local.total(), nvlink=remote.total()))


def exchange(plan: ResyncPlan, bucket: Bucket, machine: Machine) -> Cost:
    """The messages to the node of rank 0, whose adapters and memory are the busiest.

    Rails work side by side. All but the first reach the memory of a node's leader over NVLink.
    """
    received: Counter[int] = Counter()
    for message in messages(plan, bucket):
        received[message.rail] += message.nbytes
    over_nvlink = received.total() - received[0]
    seconds = max(
        max(received.values(), default=0) / (machine.network_gb_per_s * GB),
        over_nvlink / (machine.nvlink_gb_per_s * GB),
    )
    return Cost(seconds, Counter(network=received.total(), nvlink=2 * over_nvlink))


def transform(plan: ResyncPlan, bucket: Bucket, machine: Machine) -> Cost:
    """The transform on the leaders: each reads what it transforms of what was gathered, and writes what is sent; nodes
    work side by side."""
    if plan.transform is None:
        return Cost()
    nbytes: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for block in plan.passed_on(bucket):
        if block.outputs:
            made = sum(part.region_bytes(region) for part, region in block.outputs)
            node = plan.source(bucket, block)
            nbytes[node] += block.part.region_bytes(block.region) + made
            places[node] += 1
    for part in plan.transforms_behind(bucket):
        made = sum(output.nbytes for output in bucket.outputs(plan.transform, part))
        nbytes[plan.target] += part.nbytes + made
        places[plan.target] += 1
    seconds = max(nbytes.values(), default=0) / (machine.memory_gb_per_s * GB)
    overhead = max(places.values(), default=0) * machine.gather_us * 1e-6
    return Cost(seconds + overhead, Counter(memory=nbytes.total()))
