"""Packing of sequences into micro-batches that are balanced over data-parallel ranks.

1. First-fit-decreasing says how many micro-batches the token budget needs.
2. That number is rounded up to what all ranks and the schedule take, and the sequences are spread evenly over so many:
   the most expensive first, each to the cheapest micro-batch that has room. Where they do not fit, there is one round
   more; where sequences run out, micro-batches of padding fill up.
3. Balanced largest differencing (Karmarkar-Karp with equal counts; Yakir 1996, doi:10.1287/moor.21.1.85) deals the
   micro-batches to the ranks.
Costs are estimated FLOPs: attention grows with the square of a sequence, the rest with its length.

Everything is deterministic: equal input gives equal micro-batches in equal order.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimrl.data.trajectory import Trajectory

ATTENTION_WEIGHT = 1 / 4096
"""Cost of a sequence in tokens is T + T^2 * this: attention equals the rest of a layer at about 4096 tokens."""


@dataclass(kw_only=True, eq=False)
class PackedSequence:
    """One sequence to pack, L + 1 tokens: position t reads tokens[t] and predicts tokens[t + 1]."""

    tokens: np.ndarray
    """int [L + 1]"""
    loss_mask: np.ndarray
    """bool [L + 1], true on tokens to learn from"""
    rollout_logprobs: np.ndarray
    """float32 [L + 1]"""
    trajectory: int
    """Index into the batch's trajectories"""
    routed_experts: np.ndarray | None = None
    """int16 [L + 1, layers, topk], experts that the engine took for each token, -1 where it said nothing"""


@dataclass(kw_only=True, eq=False)
class MicroBatch:
    """One packed micro-batch of a data-parallel rank, T tokens and n trajectories, before context-parallel slicing."""

    tokens: np.ndarray
    """int64 [T], sequences one after another, each padded to the alignment"""
    targets: np.ndarray
    """int64 [T], the token that follows; 0 where there is none"""
    mask: np.ndarray
    """bool [T], true where the target was sampled by the policy"""
    padding: np.ndarray
    """bool [T], true on padding"""
    position_ids: np.ndarray
    """int64 [T], from 0 in every sequence"""
    cu_seqlens: np.ndarray
    """int32 [S + 1], boundaries of the padded sequences"""
    trajectory_ids: np.ndarray
    """int64 [T], 0..n-1 among this micro-batch's trajectories; 0 on padding, where mask is false"""
    rollout_logprobs: np.ndarray
    """float32 [T], of the targets; 0 where mask is false"""
    trajectories: np.ndarray
    """int64 [n], index of each trajectory in the batch that was packed"""
    num_sampled: np.ndarray
    """int64 [n], sampled tokens of the whole trajectory, in other micro-batches too"""
    advantages: np.ndarray
    """float32 [n]"""
    elsewhere_log_ratio: np.ndarray
    """float32 [n], sum of log pi - log pi_old over the trajectory's tokens in other micro-batches"""
    old_logprobs: np.ndarray | None = None
    """float32 [T], of the targets under the policy that is being improved"""
    routed_experts: np.ndarray | None = None
    """int16 [T, layers, topk], experts that the engine took for each of `tokens`, -1 where it said nothing; None where
    it did so for no sequence of the whole batch"""

    @property
    def num_tokens(self) -> int:
        return int((~self.padding).sum())


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `budget`; the longest first, ties by index.

    Raises:
        ValueError: one length is above the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > budget:
        raise ValueError(f"a sequence of {lengths[order[0]]} tokens does not fit into a micro-batch of {budget}")
    bins: list[list[int]] = []
    free: list[int] = []
    for i in order:
        slot = next((b for b, room in enumerate(free) if room >= lengths[i]), None)
        if slot is None:
            bins.append([])
            free.append(budget)
            slot = len(bins) - 1
        bins[slot].append(i)
        free[slot] -= lengths[i]
    return bins


def balanced_partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices dealt into `parts` lists of equal count with nearly equal sums.

    Raises:
        ValueError: `parts` does not divide the number of costs.
    """
    if len(costs) % parts:
        raise ValueError(f"{len(costs)} items cannot be dealt into {parts} equal parts")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for serial, start in enumerate(range(0, len(order), parts)):
        subsets = [(costs[i], [i]) for i in order[start : start + parts]]
        heapq.heappush(heap, (subsets[-1][0] - subsets[0][0], serial, subsets))
    serial = len(heap)
    while len(heap) > 1:
        large, small = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(large, reversed(small), strict=True)]
        merged.sort(key=lambda subset: (-subset[0], subset[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(parts)]


def pack(
    sequences: Sequence[PackedSequence],
    advantages_N: np.ndarray,
    *,
    budget_tokens: int,
    alignment: int,
    data_parallel: int,
    micro_batch_multiple: int = 1,
) -> list[list[MicroBatch]]:
    """Micro-batches for each data-parallel rank, equally many on all.

    Args:
        sequences: what to pack; every sequence with a loss token needs its trajectory in `advantages_N`.
        advantages_N: float32 [N], one per trajectory of the batch.
        budget_tokens: most tokens of one micro-batch, padding to the alignment included.
        alignment: each sequence is padded to a multiple of this (slimrl.config.alignment).
        micro_batch_multiple: the number of micro-batches of a rank is a multiple of this (the interleaved pipeline
            schedule needs its pipeline size).

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    lengths = [_aligned(len(sequence.tokens) - 1, alignment) for sequence in sequences]
    costs = [length + length**2 * ATTENTION_WEIGHT for length in lengths]
    multiple = data_parallel * micro_batch_multiple
    bins = _spread(lengths, costs, budget_tokens, multiple)
    bin_costs = [sum(costs[i] for i in indices) for indices in bins]
    num_sampled_N = np.zeros(len(advantages_N), np.int64)
    for sequence in sequences:
        num_sampled_N[sequence.trajectory] += int(sequence.loss_mask[1:].sum())
    experts_shape = next((s.routed_experts.shape[1:] for s in sequences if s.routed_experts is not None), None)
    return [
        [
            _micro_batch([sequences[i] for i in sorted(bins[b])], advantages_N, num_sampled_N, alignment, experts_shape)
            for b in part
        ]
        for part in balanced_partition(bin_costs, data_parallel)
    ]


def trajectory_sequences(trajectories: Sequence[Trajectory]) -> list[PackedSequence]:
    """One sequence per segment, `trajectory` being the position in the list."""
    return [
        PackedSequence(
            tokens=segment.tokens,
            loss_mask=segment.loss_mask,
            rollout_logprobs=segment.rollout_logprobs,
            trajectory=index,
            routed_experts=segment.routed_experts,
        )
        for index, trajectory in enumerate(trajectories)
        for segment in trajectory.segments
    ]


def is_split(parts: list[list[MicroBatch]]) -> bool:
    """Whether some trajectory has sampled tokens in more than one micro-batch."""
    seen: set[int] = set()
    for micro_batch in (m for part in parts for m in part):
        here = set(micro_batch.trajectories.tolist())
        if here & seen:
            return True
        seen |= here
    return False


def _aligned(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment


def _spread(lengths: list[int], costs: list[float], budget: int, multiple: int) -> list[list[int]]:
    """Bins of even cost within the budget, in a number that is a multiple of `multiple`."""
    count = _aligned(max(len(first_fit_decreasing(lengths, budget)), 1), multiple)
    while True:
        bins = _spread_over(count, lengths, costs, budget)
        if bins is not None:
            return bins
        count += multiple


def _spread_over(count: int, lengths: list[int], costs: list[float], budget: int) -> list[list[int]] | None:
    """The sequences over `count` bins, the most expensive first; None where one finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens, loads = [0] * count, [0.0] * count
    for i in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        with_room = [b for b in range(count) if tokens[b] + lengths[i] <= budget]
        if not with_room:
            return None
        best = min(with_room, key=lambda b: (loads[b], b))
        bins[best].append(i)
        tokens[best] += lengths[i]
        loads[best] += costs[i]
    return bins


def _micro_batch(
    sequences: list[PackedSequence],
    advantages_N: np.ndarray,
    num_sampled_N: np.ndarray,
    alignment: int,
    experts_shape: tuple[int, ...] | None,
) -> MicroBatch:
    trajectories = sorted({s.trajectory for s in sequences})
    local = {trajectory: i for i, trajectory in enumerate(trajectories)}
    padded = [_aligned(len(s.tokens) - 1, alignment) for s in sequences] or [alignment]
    bounds = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    total = int(bounds[-1])
    batch = MicroBatch(
        tokens=np.zeros(total, np.int64),
        targets=np.zeros(total, np.int64),
        mask=np.zeros(total, np.bool_),
        padding=np.ones(total, np.bool_),
        position_ids=np.concatenate([np.arange(n, dtype=np.int64) for n in padded]),
        cu_seqlens=bounds,
        trajectory_ids=np.zeros(total, np.int64),
        rollout_logprobs=np.zeros(total, np.float32),
        trajectories=np.array(trajectories, np.int64),
        num_sampled=num_sampled_N[trajectories] if trajectories else np.zeros(0, np.int64),
        advantages=advantages_N[trajectories].astype(np.float32) if trajectories else np.zeros(0, np.float32),
        elsewhere_log_ratio=np.zeros(len(trajectories), np.float32),
        routed_experts=None if experts_shape is None else np.full((total, *experts_shape), -1, np.int16),
    )
    for sequence, start in zip(sequences, bounds, strict=False):
        span = slice(start, start + len(sequence.tokens) - 1)
        batch.tokens[span] = sequence.tokens[:-1]
        batch.targets[span] = sequence.tokens[1:]
        batch.mask[span] = sequence.loss_mask[1:]
        batch.padding[span] = False
        batch.trajectory_ids[span] = local[sequence.trajectory]
        batch.rollout_logprobs[span] = np.where(sequence.loss_mask[1:], sequence.rollout_logprobs[1:], 0)
        if batch.routed_experts is not None and sequence.routed_experts is not None:
            batch.routed_experts[span] = sequence.routed_experts[:-1]
    return batch
