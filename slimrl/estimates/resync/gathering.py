"""The first half of a bucket: from the trainer's ranks into the memory of each sender."""

from collections import Counter, defaultdict

from slimrl.estimates.resync.machine import GB, Cost, Machine
from slimrl.resync.buckets import Bucket
from slimrl.resync.exchange import messages
from slimrl.resync.plan import ResyncPlan


def gather(plan: ResyncPlan, bucket: Bucket, machine: Machine) -> Cost:
    """All ranks write at once into their leader's memory: what the node needs, or passes on."""
    nbytes: Counter[int] = Counter()
    pieces: Counter[int] = Counter()
    needing = {sender.node for sender in plan.senders}
    for block in plan.blocks(bucket):
        passing_on = {source for source, _ in plan.routes(bucket, block)}
        for node, rank in plan.owners(block.piece).items():
            if node in needing or node in passing_on:
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
    """The exchange between nodes: on each rail broadcasts one after the other, along a chain of all nodes; then
    messages of two nodes, all at once.

    Rails work side by side. All but the first reach the memory of a node's leader over NVLink.
    """
    broadcasts: defaultdict[int, float] = defaultdict(float)
    adapters: Counter[tuple[str, str, int]] = Counter()
    leaders: Counter[tuple[str, str]] = Counter()
    link_bytes: Counter[str] = Counter()
    for message in messages(plan, bucket):
        nbytes, rail = message.nbytes, message.rail
        link_bytes["network"] += nbytes * len(message.targets)
        if len(message.targets) > 1:
            hops = len(message.targets) * machine.hop_us * 1e-6
            broadcasts[rail] += nbytes / (machine.network_gb_per_s * GB) + hops
        else:
            adapters["out", message.source, rail] += nbytes
            adapters["in", message.targets[0], rail] += nbytes
        if rail:
            leaders["out", message.source] += nbytes
            leaders.update({("in", target): nbytes for target in message.targets})
            link_bytes["nvlink"] += nbytes * (1 + len(message.targets))
    busiest: defaultdict[int, int] = defaultdict(int)
    for (_, _, rail), nbytes in adapters.items():
        busiest[rail] = max(busiest[rail], nbytes)
    rails = [broadcasts[rail] + busiest[rail] / (machine.network_gb_per_s * GB) for rail in range(len(plan.rails))]
    over_nvlink = max(leaders.values(), default=0) / (machine.nvlink_gb_per_s * GB)
    return Cost(max(*rails, over_nvlink), link_bytes)


def transform(plan: ResyncPlan, bucket: Bucket, machine: Machine) -> Cost:
    """The transform on the leaders: each reads what it transforms of what was gathered, and writes what is sent; nodes
    work side by side."""
    if plan.transform is None:
        return Cost()
    nbytes: Counter[str] = Counter()
    places: Counter[str] = Counter()
    needing = [sender.node for sender in plan.senders]
    for block in plan.passed_on(bucket):
        if block.outputs:
            made = sum(part.region_bytes(region) for part, region in block.outputs)
            passing_on = {source for source, _ in plan.routes(bucket, block)}
            nodes = [node for node in plan.owners(block.piece) if node in needing or node in passing_on]
            for node in nodes:
                nbytes[node] += block.part.region_bytes(block.region) + made
                places[node] += 1
    for part in plan.transforms_behind(bucket):
        made = sum(output.nbytes for output in bucket.outputs(plan.transform, part))
        for node in needing:
            nbytes[node] += part.nbytes + made
            places[node] += 1
    seconds = max(nbytes.values(), default=0) / (machine.memory_gb_per_s * GB)
    overhead = max(places.values(), default=0) * machine.gather_us * 1e-6
    return Cost(seconds + overhead, Counter(memory=nbytes.total()))
