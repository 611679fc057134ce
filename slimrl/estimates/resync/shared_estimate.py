"""Estimates a resync through the `ipc` transport: the plan of a run, its bytes on every link, and its seconds.

Each engine rank is taken to share its GPU with its receiver. For each round (slimrl/resync/ipc/rank_rounds.py):

1. Messages between nodes go over the adapters of both GPUs. Meanwhile each trainer rank writes what it holds for
   receivers of its node, over NVLink or within its GPU, and stages what it sends to other nodes in the next round.
2. Engine ranks copy what they keep out of the slots of their node, while the next round is filled. A slot is filled
   again when they have done so.

Each step takes as long as the rank that is busiest in it.

Of many nodes whose engines are alike, only some are planned. Then the ranks are taken to send as evenly within each
round as they do within a version, which the plan sees to.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.data.model_weights import EngineModel, EnginePlace, SourceLayout
from slimrl.estimates.resync.machine import GB, Machine
from slimrl.estimates.resync.peer_estimate import PeerEstimate, Spread, kept_by_rank, settle_cost
from slimrl.estimates.resync.peer_pipeline import link_seconds
from slimrl.estimates.resync.peer_traffic import TRAINER, Gpu, Load, Staging
from slimrl.resync.ipc.deliveries import Delivery, NodeRounds, rounds_of
from slimrl.resync.ipc.receivers import NodeEngines, alike, node_engines, node_plans
from slimrl.resync.p2p.demand import Kept, SentTensor
from slimrl.resync.transform import Quantize

PLANNED_NODES = 2


@dataclass
class _Round:
    between: Load = field(default_factory=Load)
    """Messages between nodes"""
    staged: Staging = field(default_factory=Staging)
    """What is staged for other nodes"""
    written: Staging = field(default_factory=Staging)
    """What is written into slots of the same node"""
    within: Load = field(default_factory=Load)
    """What of that goes over NVLink"""
    loaded: Load = field(default_factory=Load)
    """What engine ranks read from slots on other GPUs"""
    regions: Counter[int] = field(default_factory=Counter)
    """Regions that the ranks of engines copy which load from a receiver"""
    placed: Counter[int] = field(default_factory=Counter)
    """Their bytes"""

    def even_out(self, weight: float, num_ranks: int, sent: Spread) -> None:
        """Give what is sent to all nodes to the busiest rank as far as it is its part of a whole version.

        Args:
            weight: all nodes for each that was counted.
            sent: bytes that the ranks send of a version.
        """
        part = weight / num_ranks * sent.most / max(1, sent.mean)
        for by_gpu in (self.between.network_out, self.within.nvlink_out):
            busiest = round(by_gpu.total() * part)
            by_gpu.clear()
            by_gpu[_gpu(0)] = busiest
        for by_rank in (*self.staged.counters, *self.written.counters):
            busiest = round(by_rank.total() * part)
            by_rank.clear()
            by_rank[0] = busiest


def estimate_shared(
    layout: SourceLayout,
    trainer_nodes: Sequence[str],
    engines: Sequence[EnginePlace],
    machine: Machine,
    *,
    tensors: Sequence[SentTensor],
    models: Mapping[EngineModel, Sequence[Kept]],
    bucket_bytes: int,
    transform: Quantize | None,
) -> PeerEstimate:
    """
    Args:
        models: what each rank of each engine keeps.

    Raises:
        ValueError: a row of a tensor does not fit into `bucket_bytes`, or an engine is beside no trainer rank.
    """
    nodes = node_engines(engines, trainer_nodes)
    names = [engine.name for engine in engines]
    same = dict.fromkeys(names, "")
    plans = node_plans(
        tensors, nodes, same, dict.fromkeys(names, models), nodes=trainer_nodes, bucket_bytes=bucket_bytes
    )
    chosen = _chosen([alike(node, same) for node in nodes])
    planned = [(nodes[index], rounds_of(plans.of(index), nodes[index])) for index in chosen]
    rounds = _counted(planned, trainer_nodes)
    messages = [[each.message for each in _deliveries(of_node)] for _, of_node in planned]
    sent_by_rank = Spread.of(plans.sent[rank] for rank in range(len(trainer_nodes)))
    weight = len(nodes) / max(1, len(chosen))
    staged = sum(one.staged.moved.total() + one.written.moved.total() for one in rounds)
    if weight > 1:
        for one in rounds:
            one.even_out(weight, len(trainer_nodes), sent_by_rank)
    settle, settled_bytes = settle_cost(layout, transform, machine)
    steps = [_steps(each, machine) for each in rounds]
    total = Load()
    for one in rounds:
        for load in (one.between, one.within, one.loaded):
            total.update(load)
    moved = staged + 2 * sum(one.placed.total() for one in rounds)
    nvlink, network = total.nvlink_in.total(), total.network_in.total()
    links = {"memory": moved * weight + settled_bytes, "nvlink": nvlink * weight, "network": network * weight}
    spread = kept_by_rank(tensors, models) if engines else Spread.of(())
    stages = {
        "settle": settle,
        "stage": sum(step.stage for step in steps),
        "write": sum(step.write for step in steps),
        "agree": sum(step.agree for step in steps),
        "send": sum(step.send for step in steps),
        "load": sum(step.load for step in steps),
    }
    limit = max(total.network / machine.network_gb_per_s, max(sent_by_rank.most, spread.most) / machine.nvlink_gb_per_s)
    return PeerEstimate(
        tensors=len(layout),
        gathered_bytes=sum(map(spec_bytes, layout)),
        sent_bytes=sum(spec_bytes(tensor.spec) for tensor in tensors),
        link_bytes={name: round(nbytes) for name, nbytes in links.items() if nbytes},
        seconds=settle + _seconds(steps),
        stage_seconds={name: seconds for name, seconds in stages.items() if seconds},
        sent_by_rank=sent_by_rank,
        kept_by_rank=spread,
        adapter_bytes=total.network,
        rounds=len(rounds),
        messages=max(map(len, messages), default=0),
        entries=round(weight * sum(len(message.entries) for of_node in messages for message in of_node)),
        chain=1 if engines else 0,
        limit_seconds=limit / GB,
    )


def _chosen(keys: Sequence[tuple[object, ...]]) -> list[int]:
    """Indices of the nodes that are planned: of those that are alike, at most PLANNED_NODES."""
    indices_of: dict[tuple[object, ...], list[int]] = {}
    for index, key in enumerate(keys):
        indices_of.setdefault(key, []).append(index)
    return sorted(
        indices[number * len(indices) // count]
        for indices in indices_of.values()
        for count in [min(PLANNED_NODES, len(indices))]
        for number in range(count)
    )


def _deliveries(rounds: NodeRounds) -> Iterator[Delivery]:
    return (each for of_model in rounds.values() for deliveries in of_model for each in deliveries)


def _counted(planned: Sequence[tuple[NodeEngines, NodeRounds]], nodes: Sequence[str]) -> list[_Round]:
    """The rounds of some nodes together."""
    rounds: list[_Round] = []
    for engines, of_node in planned:
        in_order = [deliveries for of_model in of_node.values() for deliveries in of_model]
        rounds += [_Round() for _ in range(len(in_order) - len(rounds))]
        for into, deliveries in zip(rounds, in_order, strict=False):
            for delivery in deliveries:
                _count(into, delivery, engines, nodes)
    return rounds


def _count(into: _Round, delivery: Delivery, engines: NodeEngines, nodes: Sequence[str]) -> None:
    message, receiver, _ = delivery
    source = message.source
    if nodes[source] == engines.node:
        into.written.add(source, message)
        if source != receiver:
            into.within.add(_gpu(source), _gpu(receiver), message.nbytes, same_node=True)
    else:
        into.staged.add(source, message)
        into.between.add(_gpu(source), _gpu(receiver), message.nbytes, same_node=False)
    for number in message.ranks:
        reader = engines.all_receivers[number]
        times = engines.loading[reader]
        into.regions[reader] += times * len(message.entries)
        into.placed[reader] += times * message.nbytes
        if reader != receiver:
            into.loaded.add(_gpu(receiver), _gpu(reader), times * message.nbytes, same_node=True)


def _gpu(rank: int) -> Gpu:
    return Gpu(TRAINER, rank)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Seconds of the steps of a round."""

    stage: float
    write: float
    agree: float
    send: float
    load: float


def _steps(each: _Round, machine: Machine) -> _Steps:
    placing = max(each.regions.values(), default=0) * machine.place_us * 1e-6
    copying = machine.copy_seconds(max(each.placed.values(), default=0))
    return _Steps(
        stage=each.staged.seconds(machine),
        write=max(each.written.seconds(machine), link_seconds(each.within, machine)),
        agree=2 * machine.round_us * 1e-6,
        send=link_seconds(each.between, machine),
        load=max(placing, copying, link_seconds(each.loaded, machine)) + machine.round_us * 1e-6,
    )


def _seconds(steps: Sequence[_Steps]) -> float:
    """Seconds from the first region that is staged to the last one that is loaded."""
    filled = steps[0].stage if steps else 0.0
    loaded = [0.0, 0.0]
    for number, step in enumerate(steps):
        following = steps[number + 1].stage if number + 1 < len(steps) else 0.0
        begin = max(filled, loaded[-2])
        filled = begin + max(step.send, step.write + following) + step.agree
        loaded.append(max(filled, loaded[-1]) + step.load)
    return loaded[-1]
