"""The first half of a bucket: out of the trainer's ranks into the memory of each sender."""

from collections import Counter
from math import prod

from slimrl.resync.buckets import PlannedBucket
from slimrl.resync.estimate.machine import GB, Machine
from slimrl.resync.estimate.stage import Stage, copy_seconds
from slimrl.resync.exchange import Message, messages
from slimrl.resync.plan import Block, ResyncPlan, Transfer


def gather(plan: ResyncPlan, bucket: PlannedBucket, machine: Machine) -> Stage:
    """Ranks write into their leader's memory, all at once: what the node needs, or passes on."""
    nbytes: Counter[int] = Counter()
    pieces: Counter[int] = Counter()
    needing = {sender.node for sender in plan.senders}
    for block, piece in plan.blocks(bucket):
        passing_on = {source for source, _ in plan.routes(bucket, block, piece)}
        for node, rank in plan.owners(piece).items():
            if node in needing or node in passing_on:
                nbytes[rank] += _block_bytes(block)
                pieces[rank] += 1
    local: Counter[str] = Counter()
    remote: Counter[str] = Counter()
    for rank, written in nbytes.items():
        node = plan.nodes[rank]
        (local if plan.leaders[node] == rank else remote)[node] += written
    busiest = max(
        copy_seconds(max(local.values(), default=0), machine),
        max(remote.values(), default=0) / (machine.nvlink_gb_per_s * GB),
    )
    overhead = max(pieces.values(), default=0) * machine.gather_us * 1e-6
    return Stage(busiest + overhead, Counter(memory=2 * local.total(), nvlink=remote.total()))


def exchange(plan: ResyncPlan, bucket: PlannedBucket, machine: Machine) -> Stage:
    """Broadcasts one after the other, along a chain of all leaders; then messages between two leaders, all at once."""
    transfers = (
        Transfer(block=block, source=source, targets=targets)
        for block, piece in plan.blocks(bucket)
        for source, targets in plan.routes(bucket, block, piece)
    )
    stage = Stage()
    incoming: Counter[str] = Counter()
    outgoing: Counter[str] = Counter()
    for message in messages(transfers):
        nbytes = _message_bytes(message)
        stage.link_bytes["network"] += nbytes * len(message.targets)
        if len(message.targets) > 1:
            stage.seconds += nbytes / (machine.network_gb_per_s * GB) + len(message.targets) * machine.hop_us * 1e-6
        else:
            outgoing[message.source] += nbytes
            incoming[message.targets[0]] += nbytes
    busiest = max((*incoming.values(), *outgoing.values()), default=0)
    stage.seconds += busiest / (machine.network_gb_per_s * GB)
    return stage


def transform(plan: ResyncPlan, bucket: PlannedBucket, machine: Machine) -> Stage:
    """Every sender reads what was gathered and writes what is sent."""
    if bucket.gathered is bucket.sent:
        return Stage()
    nbytes = bucket.gathered.nbytes + bucket.sent.nbytes
    overhead = len(bucket.gathered.parts) * machine.gather_us * 1e-6
    return Stage(nbytes / (machine.memory_gb_per_s * GB) + overhead, Counter(memory=nbytes * len(plan.senders)))


def _block_bytes(block: Block) -> int:
    """`target` has as many rows and columns of the part as the block."""
    numel = prod(part.stop - part.start for part in block.target)
    return numel * block.part.nbytes // max(1, prod(block.part.shape))


def _message_bytes(message: Message) -> int:
    return message.stop - message.start if message.columns is None else _block_bytes(message.columns)
