"""Packing of segments into micro-batches that are balanced over data-parallel ranks.

1. First-fit-decreasing says how many micro-batches the token budget needs.
2. That number is rounded up to a multiple that all ranks and the schedule accept. The sequences are spread evenly: the
   most expensive first, each to the cheapest micro-batch that has room. If one does not fit, that number grows by such
   multiples until all do; if there are fewer sequences than micro-batches, the others are padding.
3. Balanced largest differencing (Karmarkar-Karp with equal counts; Yakir 1996, doi:10.1287/moor.21.1.85) deals the
   micro-batches to the ranks.
Costs are estimated FLOPs: attention grows with the square of a sequence, the rest with its length.

Everything is deterministic: equal input gives equal micro-batches in equal order.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slimrl.config.alignment import round_up
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.data.training import Layout
from slimrl.data.trajectory import Segment

PackedBatch = list[list["MicroBatch"]]
"""What one optimizer update learns from: micro-batches by data-parallel rank."""

ATTENTION_WEIGHT = 1 / 4096
"""Cost of a sequence in tokens is T + T^2 * this: attention equals the rest of a layer at about 4096 tokens."""

OLD_LOGPROBS = "old_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"
ADVANTAGES = "advantages"
"""Names among a micro-batch's added arrays: log-probs of the targets under the trainer's policy before the rollout's
first update and under the reference, and advantages that differ by token."""

VALUES = "values"
RETURNS = "returns"
"""Names there in a critic's batches: its values before the rollout's first update, and what it learns."""

TEACHER_LOGPROBS = "teacher_logprobs"
"""Name of the teacher's log-probs there, which a batch has from the start if its segments have them; 0 where the mask
is false."""


@dataclass(kw_only=True, eq=False)
class MicroBatch:
    """One packed micro-batch of a data-parallel rank, T tokens and n trajectories, before context-parallel slicing.

    Position t of a sequence reads token t of its segment and predicts token t + 1.
    """

    tokens: np.ndarray
    """int32 [T], sequences one after another, each padded to the alignment"""
    targets: np.ndarray
    """int32 [T], the token that follows; 0 where there is none"""
    mask: np.ndarray
    """bool [T], true where the target was sampled by the policy"""
    padding: np.ndarray
    """bool [T], true on padding tokens"""
    position_ids: np.ndarray
    """int32 [T], position of each token in its sequence, from 0"""
    cu_seqlens: np.ndarray
    """int32 [S + 1], boundaries of the padded sequences"""
    sequences: np.ndarray
    """int64, the place of each sequence among all segments of the batch that was packed"""
    trajectory_ids: np.ndarray
    """int32 [T], 0..n-1 among this micro-batch's trajectories; 0 on padding, where mask is false"""
    rollout_logprobs: np.ndarray
    """float32 [T], of the targets; 0 where mask is false"""
    weight_versions: np.ndarray
    """int32 [T], of the weights that sampled the targets; -1 where mask is false"""
    trajectories: np.ndarray
    """int64 [n], index of each trajectory in the batch that was packed"""
    num_sampled: np.ndarray
    """int64 [n], sampled tokens of the whole trajectory, in other micro-batches too"""
    advantages: np.ndarray
    """float32 [n], advantage of each whole trajectory"""
    remote: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 [n] by name, sums over the trajectory's tokens in other micro-batches; a name that is missing means 0"""
    added: dict[str, np.ndarray] = field(default_factory=dict)
    """float32 [T] by name, for each target: results of earlier passes, and advantages that differ by turn"""
    routed_experts: np.ndarray | None = None
    """int16 [T, layers, topk], experts that the engine chose for each of `tokens`, -1 where it reported none; None if
    it reported none for the whole batch"""
    replay_experts: np.ndarray | None = None
    """int16 [T, layers, topk], experts that the trainer takes instead of its routers' own choice, which stands where
    this is -1; None if it stands throughout"""

    @property
    def num_tokens(self) -> int:
        return int((~self.padding).sum())


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> int:
    """How many bins of size `budget` first-fit-decreasing needs.

    Raises:
        ValueError: one length is above the budget.
    """
    # Without loads the cheapest bin is the first.
    bins = _OpenBins()
    for length in sorted(lengths, reverse=True):
        if length > budget:
            raise ValueError(f"a sequence of {length} tokens does not fit into a micro-batch of {budget}")
        room, _, index = bins.take(length) or (budget, 0.0, len(bins))
        bins.put(room - length, 0.0, index)
    return len(bins)


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
    segments_N: Sequence[Sequence[Segment]],
    advantages_N: np.ndarray,
    turn_advantages_N: Sequence[np.ndarray] | None = None,
    *,
    budget_tokens: int,
    alignment: int,
    data_parallel: int,
    micro_batch_multiple: int = 1,
    token_multiple: int = 1,
) -> PackedBatch:
    """Micro-batches for each data-parallel rank, equally many on all.

    Args:
        advantages_N: float32 [N], the advantage of each trajectory.
        turn_advantages_N: float32 [turns] of each trajectory; each target gets that of its turn, as ADVANTAGES.
        budget_tokens: most tokens of one micro-batch, padding to the alignment included.
        alignment: each sequence is padded to a multiple of this (slimrl.config.alignment).
        micro_batch_multiple: the number of micro-batches of a rank is a multiple of this (the interleaved pipeline
            schedule needs its pipeline size).
        token_multiple: a micro-batch is padded to a multiple of this many tokens, as far as the budget allows.

    Raises:
        ValueError: a sequence is longer than the budget, only some segments have log-probs of a teacher, or a sampled
            token has no turn and turns have advantages.
    """
    sequences = [(index, segment) for index, segments in enumerate(segments_N) for segment in segments]
    lengths = [round_up(len(segment) - 1, alignment) for _, segment in sequences]
    costs = [length + length**2 * ATTENTION_WEIGHT for length in lengths]
    multiple = data_parallel * micro_batch_multiple
    bins = _spread(lengths, costs, budget_tokens, multiple)
    bin_costs = [sum(costs[i] for i in indices) for indices in bins]
    num_sampled_N = np.array([sum(int(s.loss_mask[1:].sum()) for s in own) for own in segments_N], np.int64)
    experts_shape = next((s.routed_experts.shape[1:] for _, s in sequences if s.routed_experts is not None), None)
    taught = {segment.teacher_logprobs is not None for _, segment in sequences}
    if len(taught) > 1:
        raise ValueError("some segments have log-probs of a teacher, and others have none")
    most, whole = budget_tokens // alignment * alignment, math.lcm(alignment, token_multiple)

    def made(indices: list[int]) -> MicroBatch:
        chosen = sorted(indices)
        padded = [lengths[i] for i in chosen] or [alignment]
        # The last sequence has the padding of all.
        padded[-1] += max(0, min(round_up(sum(padded), whole), most) - sum(padded))
        of_each = [sequences[i] for i in chosen]
        numbers = np.array(chosen, np.int64)
        batch = _micro_batch(numbers, of_each, padded, advantages_N, num_sampled_N, experts_shape)
        if True in taught:
            batch.added[TEACHER_LOGPROBS] = _teacher_logprobs(batch, [segment for _, segment in of_each])
        if turn_advantages_N is not None:
            batch.added[ADVANTAGES] = _by_turn(of_each, batch, turn_advantages_N)
        return batch

    return [[made(bins[b]) for b in part] for part in balanced_partition(bin_costs, data_parallel)]


def pack_for(
    trainer: TrainerConfig,
    layout: Layout,
    segments_N: Sequence[Sequence[Segment]],
    advantages_N: np.ndarray,
    turn_advantages_N: Sequence[np.ndarray] | None = None,
) -> PackedBatch:
    """`pack` for a trainer; a context-parallel group has the token budgets of all its ranks."""
    return pack(
        segments_N,
        advantages_N,
        turn_advantages_N,
        budget_tokens=trainer.max_tokens_per_rank * trainer.parallel.context,
        alignment=layout.alignment,
        data_parallel=layout.data,
        micro_batch_multiple=layout.micro_batch_multiple,
        token_multiple=trainer.token_multiple * trainer.parallel.context,
    )


def micro_batches(updates: Sequence[PackedBatch]) -> list[MicroBatch]:
    """All micro-batches of all updates, in the order in which the ranks report on each."""
    return [m for batch in updates for part in batch for m in part]


def is_split(batch: PackedBatch) -> bool:
    """Whether some trajectory has sampled tokens in more than one micro-batch."""
    seen: set[int] = set()
    for micro_batch in (m for part in batch for m in part):
        here = set(micro_batch.trajectories.tolist())
        if here & seen:
            return True
        seen |= here
    return False


def _spread(lengths: list[int], costs: list[float], budget: int, multiple: int) -> list[list[int]]:
    """Bins of even cost within the budget; their number is a multiple of `multiple`.

    A number that is enough is sought in doubling steps, and a smaller one above the last that was not by halving: the
    least, where more bins never fit worse.
    """
    too_few = round_up(max(first_fit_decreasing(lengths, budget), 1), multiple)
    bins, step = _spread_over(too_few, lengths, costs, budget), 1
    if bins is not None:
        return bins
    while (bins := _spread_over(too_few + step * multiple, lengths, costs, budget)) is None:
        too_few += step * multiple
        step *= 2
    while step > 1:
        step //= 2
        fewer = _spread_over(too_few + step * multiple, lengths, costs, budget)
        if fewer is None:
            too_few += step * multiple
        else:
            bins = fewer
    return bins


def _spread_over(count: int, lengths: list[int], costs: list[float], budget: int) -> list[list[int]] | None:
    """Deal the sequences to `count` bins, the most expensive first, which is the longest; None if one does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    rooms = _OpenBins()
    for index in range(count):
        rooms.put(budget, 0.0, index)
    for i in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        if (cheapest := rooms.take(lengths[i])) is None:
            return None
        room, load, index = cheapest
        bins[index].append(i)
        rooms.put(room - lengths[i], load + costs[i], index)
    return bins


class _OpenBins:
    """A pool of bins that gives the cheapest one that has room, of equal ones the first, for lengths that never grow.

    A bin without room is set aside until a length fits. It is set aside at most once for each sequence that it gets, so
    all of them together take the time of sorting.
    """

    def __init__(self) -> None:
        self._cheapest: list[tuple[float, int, int]] = []
        """Heap of (load, index, room); some may have too little room"""
        self._aside: list[tuple[int, float, int]] = []
        """Heap of (-room, load, index), of bins that had too little room for a length"""

    def __len__(self) -> int:
        """Number of bins, without those that are taken."""
        return len(self._cheapest) + len(self._aside)

    def put(self, room: int, load: float, index: int) -> None:
        heapq.heappush(self._cheapest, (load, index, room))

    def take(self, length: int) -> tuple[int, float, int] | None:
        """(room, load, index) of the bin, which is not among them until it is put back; None if none has room."""
        while self._aside and -self._aside[0][0] >= length:
            room, load, index = heapq.heappop(self._aside)
            self.put(-room, load, index)
        while self._cheapest:
            load, index, room = heapq.heappop(self._cheapest)
            if room >= length:
                return room, load, index
            heapq.heappush(self._aside, (-room, load, index))
        return None


def _micro_batch(
    numbers: np.ndarray,
    sequences: list[tuple[int, Segment]],
    padded: list[int],
    advantages_N: np.ndarray,
    num_sampled_N: np.ndarray,
    experts_shape: tuple[int, ...] | None,
) -> MicroBatch:
    """Make a micro-batch of (index of the trajectory, segment) pairs and their padded lengths; of padding alone if
    there are no pairs."""
    trajectories = np.unique(np.array([index for index, _ in sequences], np.int64))
    bounds = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    total = int(bounds[-1])
    batch = MicroBatch(
        tokens=np.zeros(total, np.int32),
        targets=np.zeros(total, np.int32),
        mask=np.zeros(total, np.bool_),
        padding=np.ones(total, np.bool_),
        position_ids=np.concatenate([np.arange(n, dtype=np.int32) for n in padded]),
        cu_seqlens=bounds,
        sequences=numbers,
        trajectory_ids=np.zeros(total, np.int32),
        rollout_logprobs=np.zeros(total, np.float32),
        weight_versions=np.full(total, -1, np.int32),
        trajectories=trajectories,
        num_sampled=num_sampled_N[trajectories],
        advantages=advantages_N[trajectories].astype(np.float32),
        routed_experts=None if experts_shape is None else np.full((total, *experts_shape), -1, np.int16),
    )
    for (index, segment), start in zip(sequences, bounds, strict=False):
        span = slice(start, start + len(segment) - 1)
        batch.tokens[span] = segment.tokens[:-1]
        batch.targets[span] = segment.tokens[1:]
        batch.mask[span] = segment.loss_mask[1:]
        batch.padding[span] = False
        batch.trajectory_ids[span] = np.searchsorted(trajectories, index)
        batch.rollout_logprobs[span] = np.where(segment.loss_mask[1:], segment.rollout_logprobs[1:], 0)
        batch.weight_versions[span] = np.where(segment.loss_mask[1:], segment.weight_versions[1:], -1)
        if batch.routed_experts is not None and segment.routed_experts is not None:
            batch.routed_experts[span] = segment.routed_experts[:-1]
    return batch


def _teacher_logprobs(batch: MicroBatch, segments: Sequence[Segment]) -> np.ndarray:
    """float32 [T], the teacher's log-probs of the targets."""
    found_T = np.zeros(len(batch.tokens), np.float32)
    for segment, start in zip(segments, batch.cu_seqlens, strict=False):
        assert segment.teacher_logprobs is not None
        span = slice(start, start + len(segment) - 1)
        found_T[span] = np.where(segment.loss_mask[1:], segment.teacher_logprobs[1:], 0)
    return found_T


def _by_turn(
    sequences: list[tuple[int, Segment]], batch: MicroBatch, turn_advantages_N: Sequence[np.ndarray]
) -> np.ndarray:
    """float32 [T]: the advantage of each target's turn; turns are numbered through all segments of a trajectory."""
    advantages = np.zeros(len(batch.tokens), np.float32)
    for (index, segment), start in zip(sequences, batch.cu_seqlens, strict=False):
        sampled, turns = segment.loss_mask[1:], segment.turn_ids[1:]
        if (turns[sampled] < 0).any():
            raise ValueError("a sampled token has turn -1, so there is no advantage for it")
        of_turns = np.append(turn_advantages_N[index], 0.0)
        advantages[start : start + len(segment) - 1] = np.where(sampled, of_turns[np.where(sampled, turns, -1)], 0.0)
    return advantages
