"""Which trainer ranks receive what each engine's ranks keep, over the `ipc` transport: a pure function.

A rank of an engine loads from the memory of a trainer rank on its node, its receiver. The ranks of all engines of a
node take the node's trainer ranks in turn, in the order of both, so those that share a GPU find each other. What
several of them keep comes to the node once.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from slimrl.data.boxes import Box
from slimrl.data.model_weights import EngineModel, EnginePlace
from slimrl.resync.p2p.demand import Holders, Kept, SentTensor
from slimrl.resync.p2p.engine_plan import EnginePlans
from slimrl.resync.p2p.shares import Choice


@dataclass(frozen=True, kw_only=True)
class NodeEngines:
    """The ranks of engines on one node."""

    node: str
    leader: int
    """Lowest trainer rank of the node, which plans for it"""
    receivers: Mapping[str, Mapping[int, int]]
    """By the engine's name, the trainer rank from whose memory each of its ranks here loads"""

    @cached_property
    def all_receivers(self) -> tuple[int, ...]:
        """Ascending"""
        return tuple(sorted({rank for ranks in self.receivers.values() for rank in ranks.values()}))

    @cached_property
    def loading(self) -> Counter[int]:
        """How many ranks of engines have each receiver."""
        return Counter(rank for ranks in self.receivers.values() for rank in ranks.values())

    @property
    def shares_receivers(self) -> bool:
        """Whether several ranks of engines have the same receiver."""
        return max(self.loading.values()) > 1

    def nearest(self, nodes: Sequence[str]) -> Choice:
        """Chooses the holders on this node, if there are any, so that what they hold crosses no network.

        Args:
            nodes: name of the node of each trainer rank.
        """
        known: dict[Holders, Holders] = {}

        def choose(holders: Holders) -> Holders:
            if holders not in known:
                known[holders] = tuple(holder for holder in holders if nodes[holder] == self.node) or holders
            return known[holders]

        return choose


def node_engines(engines: Sequence[EnginePlace], nodes: Sequence[str]) -> list[NodeEngines]:
    """The engines by their nodes, in the order of the trainer's.

    Args:
        nodes: name of the node of each trainer rank.

    Raises:
        ValueError: an engine is on a node without trainer ranks.
    """
    on_node: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        on_node[node].append(rank)
    turn: Counter[str] = Counter()
    by_node: dict[str, dict[str, dict[int, int]]] = defaultdict(dict)
    for engine in engines:
        if missing := [node for node in engine.nodes if node not in on_node]:
            raise ValueError(
                f"resync.transport: ipc, but {engine.name} is on {', '.join(missing)}, the trainer on "
                f"{', '.join(on_node)}. Use p2p or disk."
            )
        per_node = engine.num_ranks // len(engine.nodes)
        for rank in range(engine.num_ranks):
            node = engine.nodes[rank // per_node]
            by_node[node].setdefault(engine.name, {})[rank] = on_node[node][turn[node] % len(on_node[node])]
            turn[node] += 1
    return [
        NodeEngines(node=node, leader=ranks[0], receivers=by_node[node])
        for node, ranks in on_node.items()
        if node in by_node
    ]


def kept_by_receiver(
    engines: NodeEngines, reports: Mapping[str, Mapping[EngineModel, Sequence[Kept]]]
) -> dict[EngineModel, list[Kept]]:
    """The regions that the engines keep of each receiver's memory, by model, in the order of `all_receivers`.

    Args:
        reports: what each rank of an engine keeps, by the engine's name.
    """
    numbers = {rank: number for number, rank in enumerate(engines.all_receivers)}
    result: dict[EngineModel, list[dict[str, list[Box]]]] = {}
    for name, receivers in engines.receivers.items():
        for model, ranks in reports[name].items():
            merged = result.setdefault(model, [{} for _ in engines.all_receivers])
            for rank, receiver in receivers.items():
                into = merged[numbers[receiver]]
                for tensor, boxes in ranks[rank].items():
                    into.setdefault(tensor, []).extend(boxes)
    return {model: list(ranks) for model, ranks in result.items()}


def alike(engines: NodeEngines, digests: Mapping[str, str]) -> tuple[object, ...]:
    """Equal for nodes whose receivers keep the same.

    Args:
        digests: of what each engine keeps, by its name.
    """
    numbers = {rank: number for number, rank in enumerate(engines.all_receivers)}
    return tuple(
        (digests[name], tuple((rank, numbers[receiver]) for rank, receiver in receivers.items()))
        for name, receivers in engines.receivers.items()
    )


def node_plans(
    tensors: Sequence[SentTensor],
    engines: Sequence[NodeEngines],
    digests: Mapping[str, str],
    reports: Mapping[str, Mapping[EngineModel, Sequence[Kept]]],
    *,
    nodes: Sequence[str],
    bucket_bytes: int,
) -> EnginePlans:
    """The plans of all nodes with engines, in their order; see EnginePlans.

    Args:
        digests: of what each engine keeps, by its name.
        reports: what each rank of an engine keeps, by the engine's name.
        nodes: name of the node of each trainer rank.
    """
    known: dict[tuple[object, ...], Mapping[EngineModel, Sequence[Kept]]] = {}
    keys = [alike(each, digests) for each in engines]
    for key, each in zip(keys, engines, strict=True):
        if key not in known:
            known[key] = kept_by_receiver(each, reports)
    return EnginePlans(
        tensors,
        [known[key] for key in keys],
        num_ranks=None,
        bucket_bytes=bucket_bytes,
        chosen=[each.nearest(nodes) for each in engines],
    )
