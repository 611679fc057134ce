"""Seconds of a version through the `p2p` transport, from what each rank does in each round.

Both ends have two buffers that take turns, so

1. a round is staged when the one before is staged, and the one before that is sent;
2. its receivers are ready for it when they have placed the round before the last. Then a round trip of numbers, and its
   messages, which follow those of the round before through the adapters;
3. it is passed on and placed while the next one arrives. What is passed on between nodes shares the adapters with that.

Each step takes as long as the rank that is busiest in it. Engines that another one feeds get a round when that one has
it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from slimrl.estimates.resync.machine import GB, Machine
from slimrl.estimates.resync.peer_traffic import Load, PeerRound


@dataclass(frozen=True, kw_only=True)
class RoundSeconds:
    """Seconds of the steps of a round."""

    stage: float
    agree: float
    send: float
    pass_on: float
    place: float


def round_seconds(each: PeerRound, before: PeerRound | None, machine: Machine) -> RoundSeconds:
    """
    Args:
        before: the round that is passed on while this one is sent.
    """
    sent = Load()
    sent.update(each.sent)
    if before is not None:
        sent.update(before.between_nodes)
    placing = max(each.placed.values(), default=0) * machine.place_us * 1e-6
    return RoundSeconds(
        stage=each.staged.seconds(machine),
        agree=(machine.round_us + max(each.messages.values(), default=0) * machine.message_us) * 1e-6,
        send=link_seconds(sent, machine),
        pass_on=link_seconds(each.between_nodes, machine) + link_seconds(each.within_nodes, machine),
        place=max(placing, machine.copy_seconds(max(each.placed_bytes.values(), default=0))),
    )


def link_seconds(load: Load, machine: Machine) -> float:
    """Seconds of messages that are under way side by side: those of the busiest link."""
    return max(load.network / machine.network_gb_per_s, load.nvlink / machine.nvlink_gb_per_s) / GB


def pipeline_seconds(levels: Sequence[Sequence[RoundSeconds]]) -> float:
    """Seconds from the first region that is staged to the last one that is placed.

    Args:
        levels: rounds of the engines that the trainer feeds, of those that these feed, and so on.
    """
    staged: dict[int, float] = defaultdict(float)
    begun: dict[tuple[int, int], float] = defaultdict(float)
    sent: dict[tuple[int, int], float] = defaultdict(float)
    placed: dict[tuple[int, int], float] = defaultdict(float)
    # A round is placed only when its receivers have begun the next one, so the last one needs one more that is empty.
    for number in range(1 + max(map(len, levels), default=0)):
        for level, rounds in enumerate(levels):
            if number < len(rounds):
                each = rounds[number]
                if level == 0:
                    staged[number] = max(staged[number - 1], sent[0, number - 2]) + each.stage
                source = sent[level - 1, number] if level else staged[number]
                free = max(placed[level, number - 2], sent[level + 1, number - 2])
                begun[level, number] = max(source, free, begun[level, number - 1]) + each.agree
                sent[level, number] = max(begun[level, number], sent[level, number - 1]) + each.send
        for level, rounds in enumerate(levels):
            before = number - 1
            if 0 <= before < len(rounds):
                after = max(sent[level, before], placed[level, before - 1], begun[level, number])
                after = max(after, begun[level + 1, before])
                placed[level, before] = after + rounds[before].pass_on + rounds[before].place
    return max(placed.values(), default=0.0)
