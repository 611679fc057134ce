"""Which trainer ranks receive what each engine's ranks keep, over the `ipc` transport: a pure function.

A rank of an engine loads from the memory of a trainer rank on its node, its receiver. The ranks of all engines of a
node take the node's trainer ranks in turn, in the order of both, so those that share a GPU find each other. Engines on
the same nodes are one set: what several of them keep comes once to each node.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from slimrl.data.boxes import Box
from slimrl.data.model_weights import EngineModel, EnginePlace
from slimrl.resync.p2p.demand import Kept
from slimrl.resync.p2p.shares import Choice, Holders


@dataclass(frozen=True, kw_only=True)
class EngineSet:
    """Engines on the same nodes."""

    leader: int
    """Lowest trainer rank on the first node; it plans for the set and calls its engines"""
    receivers: Mapping[str, tuple[int, ...]]
    """The trainer rank from whose memory each rank of an engine loads, by the engine's name"""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All receivers, ascending."""
        return tuple(sorted({rank for ranks in self.receivers.values() for rank in ranks}))

    def shares_receivers(self) -> bool:
        """Whether several ranks of engines load from the same memory."""
        return sum(map(len, self.receivers.values())) > len(self.ranks)

    def nearest(self, nodes: Sequence[str]) -> Choice:
        """Chooses the holders on the nodes that need something, if there are any, so that it crosses no network.

        Args:
            nodes: name of the node of each trainer rank.
        """

        def choose(holders: Holders, numbers: tuple[int, ...]) -> Holders:
            near = {nodes[self.ranks[number]] for number in numbers}
            return tuple(holder for holder in holders if nodes[holder] in near) or holders

        return choose


def engine_sets(engines: Sequence[EnginePlace], nodes: Sequence[str]) -> list[EngineSet]:
    """
    Args:
        nodes: name of the node of each trainer rank.

    Raises:
        ValueError: an engine is on a node without trainer ranks.
    """
    on_node: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        on_node[node].append(rank)
    turn: Counter[str] = Counter()
    by_nodes: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for engine in engines:
        if missing := [node for node in engine.nodes if node not in on_node]:
            raise ValueError(
                f"resync.transport: ipc, but {engine.name} is on {', '.join(missing)}, the trainer on "
                f"{', '.join(on_node)}. Use p2p or disk."
            )
        per_node = engine.num_ranks // len(engine.nodes)
        receivers = []
        for rank in range(engine.num_ranks):
            node = engine.nodes[rank // per_node]
            receivers.append(on_node[node][turn[node] % len(on_node[node])])
            turn[node] += 1
        by_nodes.setdefault(engine.nodes, {})[engine.name] = tuple(receivers)
    return [EngineSet(leader=on_node[where[0]][0], receivers=receivers) for where, receivers in by_nodes.items()]


def kept_by_receiver(
    engines: EngineSet, reports: Mapping[str, Mapping[EngineModel, Sequence[Kept]]]
) -> dict[EngineModel, list[Kept]]:
    """The regions that the engines keep of each receiver's memory, by model, in the order of `engines.ranks`.

    Args:
        reports: what each rank of an engine keeps, by the engine's name.
    """
    numbers = {rank: number for number, rank in enumerate(engines.ranks)}
    result: dict[EngineModel, list[dict[str, list[Box]]]] = {}
    for name, receivers in engines.receivers.items():
        for model, ranks in reports[name].items():
            merged = result.setdefault(model, [{} for _ in engines.ranks])
            for receiver, kept in zip(receivers, ranks, strict=True):
                into = merged[numbers[receiver]]
                for tensor, boxes in kept.items():
                    into.setdefault(tensor, []).extend(boxes)
    return {model: list(ranks) for model, ranks in result.items()}


def alike(engines: EngineSet, digests: Mapping[str, str]) -> tuple[object, ...]:
    """Equal for sets of engines whose receivers keep the same.

    Args:
        digests: of what each engine keeps, by its name.
    """
    first = {rank: number for number, rank in enumerate(engines.ranks)}
    return tuple(
        (digests[name], tuple(first[rank] for rank in receivers)) for name, receivers in engines.receivers.items()
    )
