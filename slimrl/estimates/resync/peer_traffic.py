"""What the ranks of trainer and engines do in each round of the `p2p` transport, counted from its plans.

1. A trainer rank stages its messages and sends them. Those to a rank of an engine on the same node go over NVLink,
   others over the network adapters of both GPUs.
2. A rank of an engine passes on what others of the engine keep: between nodes over the adapters, within a node over
   NVLink.
3. It passes on what came from outside to the same rank of the engine that its own one feeds.
4. It places what it keeps.

Rounds of equal number of all engines are taken to be under way at the same time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slimrl.data.model_weights import EnginePlace
from slimrl.data.peer_messages import Message
from slimrl.estimates.resync.machine import GB, Machine
from slimrl.resync.p2p.engine_plan import EnginePlan, EnginePlans

TRAINER = -1
"""Number of the trainer among the engines"""

FP8 = "float8_e4m3fn"
"""Dtype of the matrices that are quantised, one byte for each element"""

QUANTIZE_BYTES = 19
"""Bytes read and written in a GPU's memory for each element that is quantised: bf16 to float32, divided by its scale,
rounded (quantization/fp8.py)"""


class Gpu(NamedTuple):
    engine: int
    """Index of the engine, or TRAINER"""
    rank: int


@dataclass
class Load:
    """Bytes into and out of GPUs, by the kind of link."""

    network_out: Counter[Gpu] = field(default_factory=Counter)
    network_in: Counter[Gpu] = field(default_factory=Counter)
    nvlink_out: Counter[Gpu] = field(default_factory=Counter)
    nvlink_in: Counter[Gpu] = field(default_factory=Counter)

    def add(self, source: Gpu, target: Gpu, nbytes: int, *, same_node: bool) -> None:
        out, into = (self.nvlink_out, self.nvlink_in) if same_node else (self.network_out, self.network_in)
        out[source] += nbytes
        into[target] += nbytes

    def update(self, other: "Load") -> None:
        for mine, more in zip(self._counters, other._counters, strict=True):
            mine.update(more)

    @property
    def network(self) -> int:
        """Bytes of the busiest adapter in one direction."""
        return max((n for each in (self.network_out, self.network_in) for n in each.values()), default=0)

    @property
    def nvlink(self) -> int:
        """Bytes of the busiest GPU over NVLink in one direction."""
        return max((n for each in (self.nvlink_out, self.nvlink_in) for n in each.values()), default=0)

    @property
    def _counters(self) -> tuple[Counter[Gpu], ...]:
        return self.network_out, self.network_in, self.nvlink_out, self.nvlink_in


@dataclass
class Staging:
    """Regions that trainer ranks write from their live weights."""

    copied: Counter[int] = field(default_factory=Counter)
    """Regions that a rank copies"""
    quantized: Counter[int] = field(default_factory=Counter)
    """Regions that a rank quantises"""
    moved: Counter[int] = field(default_factory=Counter)
    """Bytes that a rank reads and writes for them"""

    def add(self, rank: int, message: Message) -> None:
        count = quantized = 0
        for entry in message.entries:
            if entry.dtype == FP8:
                (first, last), (left, right) = entry.box
                count += 1
                quantized += (last - first) * (right - left)
        self.copied[rank] += len(message.entries) - count
        self.quantized[rank] += count
        self.moved[rank] += 2 * (message.nbytes - quantized) + QUANTIZE_BYTES * quantized

    @property
    def counters(self) -> tuple[Counter[int], ...]:
        return self.copied, self.quantized, self.moved

    def seconds(self, machine: Machine) -> float:
        """Seconds of the busiest rank. The device works on a copy while the next ones are launched."""
        launching = max(
            (self.copied[rank] * machine.stage_us + self.quantized[rank] * machine.quantize_us for rank in self.moved),
            default=0.0,
        )
        return max(launching * 1e-6, max(self.moved.values(), default=0) / (machine.memory_gb_per_s * GB))


@dataclass
class PeerRound:
    """A round of the engines that are equally far from the trainer."""

    sent: Load = field(default_factory=Load)
    """From the trainer, or the engine that feeds them"""
    between_nodes: Load = field(default_factory=Load)
    """Passed on within engines, first step"""
    within_nodes: Load = field(default_factory=Load)
    """The second step"""
    messages: Counter[Gpu] = field(default_factory=Counter)
    """Messages that a rank sends or gets from outside of its engine"""
    staged: Staging = field(default_factory=Staging)
    """What trainer ranks write into their slots"""
    placed: Counter[Gpu] = field(default_factory=Counter)
    """Regions that a rank of an engine copies to their place"""
    placed_bytes: Counter[Gpu] = field(default_factory=Counter)


@dataclass
class PeerTraffic:
    """The traffic of one version."""

    levels: list[list[PeerRound]] = field(default_factory=list)
    """Rounds of the engines that the trainer feeds, of those that these feed, and so on"""
    engine_messages: list[int] = field(default_factory=list)
    """Messages to each engine from outside"""
    entries: int = 0
    """Regions in the messages of all engines"""

    def total(self) -> Load:
        """All rounds together."""
        result = Load()
        for each in self._rounds():
            for load in (each.sent, each.between_nodes, each.within_nodes):
                result.update(load)
        return result

    def sent_by(self) -> Counter[int]:
        """Bytes that each trainer rank sends."""
        result: Counter[int] = Counter()
        for each in self.levels[0]:
            for out in (each.sent.network_out, each.sent.nvlink_out):
                result.update({gpu.rank: nbytes for gpu, nbytes in out.items()})
        return result

    def moved_in_memory(self) -> int:
        """Bytes that are read and written for staging and placing."""
        return sum(each.staged.moved.total() + 2 * each.placed_bytes.total() for each in self._rounds())

    def _rounds(self) -> list[PeerRound]:
        return [each for rounds in self.levels for each in rounds]


def count_traffic(plans: EnginePlans, engines: Sequence[EnginePlace], trainer_nodes: Sequence[str]) -> PeerTraffic:
    """Computes one engine's plan at a time, since those of a large model are long.

    Args:
        trainer_nodes: node of each trainer rank.
    """
    traffic = PeerTraffic()
    nodes = {Gpu(TRAINER, rank): node for rank, node in enumerate(trainer_nodes)}
    for index, place in enumerate(engines):
        per_node = place.num_ranks // len(place.nodes)
        nodes |= {Gpu(index, rank): place.nodes[rank // per_node] for rank in range(place.num_ranks)}
    followers = {feeder: index for index, feeder in enumerate(plans.feeders) if feeder is not None}
    for head, feeder in enumerate(plans.feeders):
        if feeder is None:
            chain = [head]
            while (after := followers.get(chain[-1])) is not None:
                chain.append(after)
            _add_chain(traffic, plans.of(head), chain, engines, nodes)
    return traffic


def _add_chain(
    traffic: PeerTraffic,
    plan: EnginePlan,
    chain: Sequence[int],
    engines: Sequence[EnginePlace],
    nodes: Mapping[Gpu, str],
) -> None:
    rounds = [each for of_model in plan.rounds.values() for each in of_model]
    count = sum(map(len, rounds))
    for level, engine in enumerate(chain):
        if level == len(traffic.levels):
            traffic.levels.append([])
        known = traffic.levels[level]
        known += [PeerRound() for _ in range(len(rounds) - len(known))]
        per_node = engines[engine].num_ranks // len(engines[engine].nodes)
        traffic.engine_messages.append(count)
        for into, messages in zip(known, rounds, strict=False):
            for message in messages:
                source = Gpu(chain[level - 1], message.target) if level else Gpu(TRAINER, message.source)
                target = Gpu(engine, message.target)
                into.sent.add(source, target, message.nbytes, same_node=nodes[source] == nodes[target])
                into.messages.update((source, target))
                _pass_on(into, message, engine, per_node)
                if not level:
                    into.staged.add(message.source, message)
                traffic.entries += len(message.entries)


def _pass_on(into: PeerRound, message: Message, engine: int, per_node: int) -> None:
    for rank in message.ranks:
        gpu = Gpu(engine, rank)
        into.placed[gpu] += len(message.entries)
        into.placed_bytes[gpu] += message.nbytes
    if len(message.ranks) > 1:
        for step, source, target in message.hops(per_node):
            load = into.between_nodes if step == 1 else into.within_nodes
            load.add(Gpu(engine, source), Gpu(engine, target), message.nbytes, same_node=step == 2)
