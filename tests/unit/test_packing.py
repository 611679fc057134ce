"""Packing: every token exactly once, budgets kept, ranks balanced."""

from dataclasses import replace
from math import lcm

import numpy as np
import pytest

from slimrl.config.alignment import sequence_alignment, tile_tokens
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.data.packing import TEACHER_LOGPROBS, _spread, balanced_partition, first_fit_decreasing, is_split, pack
from slimrl.data.training import Layout
from slimrl.data.trajectory import Segment


def sequence(length: int, rng: np.random.Generator) -> Segment:
    mask = rng.random(length) < 0.5
    mask[0] = False
    segment = Segment.not_sampled(rng.integers(1, 1000, length), mask)
    return replace(segment, rollout_logprobs=rng.normal(size=length).astype(np.float32))


def batch(seed: int, count: int) -> list[list[Segment]]:
    """Trajectories of one segment each."""
    rng = np.random.default_rng(seed)
    return [[sequence(int(rng.integers(2, 60)), rng)] for _ in range(count)]


@pytest.mark.parametrize(
    ("alignment", "ranks", "multiple", "tokens"),
    [(1, 1, 1, 1), (8, 2, 1, 1), (4, 3, 2, 1), (16, 4, 2, 1), (1, 2, 1, 32), (8, 2, 1, 12), (4, 2, 1, 1000)],
)
def test_every_token_is_packed_once_and_in_order(alignment, ranks, multiple, tokens):
    sequences = batch(0, 50)
    parts = pack(
        sequences,
        np.arange(50, dtype=np.float32),
        budget_tokens=128,
        alignment=alignment,
        data_parallel=ranks,
        micro_batch_multiple=multiple,
        token_multiple=tokens,
    )
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) % multiple == 0
    found = {}
    for micro_batch in (m for part in parts for m in part):
        assert len(micro_batch.tokens) <= 128
        assert len(micro_batch.tokens) % lcm(alignment, tokens) == 0 or len(micro_batch.tokens) == 128
        for start, end in zip(micro_batch.cu_seqlens, micro_batch.cu_seqlens[1:], strict=False):
            assert (end - start) % alignment == 0
            real = ~micro_batch.padding[start:end]
            if not real.any():
                continue
            assert micro_batch.position_ids[start:end].tolist() == list(range(end - start))
            local = micro_batch.trajectory_ids[start]
            found[int(micro_batch.trajectories[local])] = (micro_batch, slice(start, start + real.sum()), local)
    assert sorted(found) == list(range(50))
    for trajectory, (s,) in enumerate(sequences):
        micro_batch, span, local = found[trajectory]
        assert micro_batch.tokens[span].tolist() == s.tokens[:-1].tolist()
        assert micro_batch.targets[span].tolist() == s.tokens[1:].tolist()
        assert micro_batch.mask[span].tolist() == s.loss_mask[1:].tolist()
        sampled = s.loss_mask[1:]
        assert (micro_batch.rollout_logprobs[span][sampled] == s.rollout_logprobs[1:][sampled]).all()
        assert micro_batch.num_sampled[local] == sampled.sum()
        assert micro_batch.advantages[local] == trajectory


@pytest.mark.parametrize(
    ("settings", "tile"),
    [
        ({}, 1),
        ({"fp8": Fp8Scaling.blockwise}, 16),
        ({"fp8": Fp8Scaling.delayed, "fp8_emulation": True}, 16),
        ({"fp8": Fp8Scaling.mxfp8}, 32),
        ({"megatron": {"fp4": "e2m1"}}, 32),
    ],
)
@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True), (3, True)])
@pytest.mark.parametrize("context", [1, 2, 4])
def test_every_rank_has_equal_pieces_and_whole_tiles_of_each_micro_batch(settings, tile, tensor, sequence, context):
    assert tile_tokens(TrainerConfig(**settings)) == tile
    alignment = sequence_alignment(tensor=tensor, context=context, sequence=sequence, tile=tile)
    budget = 2 * max(alignment, 64)
    parts = pack(batch(3, 20), np.zeros(20, np.float32), budget_tokens=budget, alignment=alignment, data_parallel=2)
    for micro_batch in (m for part in parts for m in part):
        for length in np.diff(micro_batch.cu_seqlens):
            of_a_rank, rest = divmod(int(length), context * (2 if context > 1 else 1))
            assert rest == 0
            assert of_a_rank % tensor == 0
            # In front of a linear layer, where tensor-parallel ranks have gathered their pieces, and between layers.
            assert length // context % tile == 0
            assert not sequence or length // context // tensor % tile == 0
    smaller = (d for d in range(1, alignment) if d % (tensor * (2 * context if context > 1 else 1)) == 0)
    assert all(d // context // (tensor if sequence else 1) % tile for d in smaller)


def test_a_layout_aligns_by_its_sizes_and_tiles_and_is_the_same_layout_with_others():
    sizes = dict.fromkeys(("world_size", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "data"), 1)
    places = dict.fromkeys(("rank", "tensor_rank", "pipeline_rank", "context_rank", "data_rank"), 0)
    plain = Layout(**sizes, **places, tensor=2, context=2, sequence=True)
    tiled = replace(plain, tile=16)
    assert (plain.alignment, tiled.alignment) == (8, 64)
    assert replace(tiled, sequence=False).alignment == 32
    # A checkpoint's random-number states carry over between them.
    assert plain.sizes() == tiled.sizes()


def test_stages_that_interleave_take_micro_batches_by_the_size_of_the_pipeline():
    ones = dict.fromkeys(("world_size", "expert", "expert_tensor", "data", "tensor", "context"), 1)
    places = dict.fromkeys(("rank", "tensor_rank", "pipeline_rank", "context_rank", "data_rank"), 0)
    layout = Layout(**ones, **places, pipeline=4, virtual_pipeline=1, sequence=False)
    assert layout.micro_batch_multiple == 1
    assert replace(layout, virtual_pipeline=2).micro_batch_multiple == 4
    assert replace(layout, pipeline=1).micro_batch_multiple == 1


def test_of_the_ranks_that_compute_one_batch_the_first_of_the_last_stage_reports():
    ones = dict.fromkeys(("world_size", "expert", "expert_tensor", "data", "virtual_pipeline"), 1)
    layouts = [
        Layout(
            **ones, tensor=2, pipeline=3, context=2, sequence=True, rank=0, data_rank=0,
            tensor_rank=tensor, pipeline_rank=stage, context_rank=context,
        )
        for tensor in range(2) for stage in range(3) for context in range(2)
    ]  # fmt: skip
    reporting = [(one.tensor_rank, one.pipeline_rank, one.context_rank) for one in layouts if one.is_output_rank]
    assert reporting == [(0, 2, 0)]
    assert sum(one.is_last_stage for one in layouts) == 4


def test_where_evenly_spread_sequences_find_no_room_there_is_a_micro_batch_more():
    """Two micro-batches of 6 hold 3 + 3 and 2 + 2 + 2, but not 3 + 2 and 3 + 2 with another 2."""
    rng = np.random.default_rng(0)
    sequences = [[sequence(length + 1, rng)] for length in (3, 3, 2, 2, 2)]
    for ranks, count in ((1, 3), (2, 4)):
        parts = pack(sequences, np.zeros(5, np.float32), budget_tokens=6, alignment=1, data_parallel=ranks)
        micro_batches = [m for part in parts for m in part]
        assert len(micro_batches) == count
        assert max(m.num_tokens for m in micro_batches) <= 6
        assert sum(m.num_tokens for m in micro_batches) == 12


def spread_by_lists(lengths: list[int], costs: list[float], budget: int, count: int) -> list[list[int]] | None:
    """Each sequence, the most expensive first, to the cheapest of all bins that have room, found by looking at each."""
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        with_room = [b for b in bins if sum(lengths[j] for j in b) + lengths[i] <= budget]
        if not with_room:
            return None
        min(with_room, key=lambda b: sum(costs[j] for j in b)).append(i)
    return bins


@pytest.mark.parametrize("multiple", [1, 3])
def test_sequences_are_spread_as_by_looking_at_every_bin_over_the_fewest_that_hold_them(multiple: int):
    more = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        budget = 60
        shortest, longest = budget // rng.choice([3, 5, 8]), budget * rng.choice([2, 3]) // rng.choice([4, 5])
        lengths = rng.integers(shortest, longest, int(rng.integers(1, 150)), endpoint=True).tolist()
        costs = [float(length + length**2) for length in lengths]
        fewest = -(-max(first_fit_decreasing(lengths, budget), 1) // multiple)
        steps = next(n for n in range(len(lengths)) if spread_by_lists(lengths, costs, budget, (fewest + n) * multiple))
        expected = spread_by_lists(lengths, costs, budget, (fewest + steps) * multiple)
        assert _spread(lengths, costs, budget, multiple) == expected
        more.add(steps)
    # Found at once, by the first steps, and by doubling and halving.
    assert more >= {0, 1, 2}
    assert multiple > 1 or max(more) > 4


def test_first_fit_decreasing_counts_as_by_looking_at_every_bin():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 60, int(rng.integers(1, 120)), endpoint=True).tolist()
        rooms: list[int] = []
        for length in sorted(lengths, reverse=True):
            first = next((b for b, room in enumerate(rooms) if room >= length), None)
            if first is None:
                rooms.append(60 - length)
            else:
                rooms[first] -= length
        assert first_fit_decreasing(lengths, 60) == len(rooms)


def test_segments_of_one_trajectory_count_together():
    rng = np.random.default_rng(1)
    sequences = [[sequence(40, rng), sequence(40, rng)], [sequence(30, rng)]]
    parts = pack(sequences, np.zeros(2, np.float32), budget_tokens=40, alignment=1, data_parallel=1)
    total = sum(int(s.loss_mask[1:].sum()) for s in sequences[0])
    for micro_batch in parts[0]:
        if micro_batch.trajectories.tolist() == [0]:
            assert micro_batch.num_sampled.tolist() == [total]
    assert is_split(parts)


def test_a_batch_of_single_segments_is_not_split():
    parts = pack(batch(2, 20), np.zeros(20, np.float32), budget_tokens=128, alignment=1, data_parallel=2)
    assert not is_split(parts)


def test_fewer_sequences_than_ranks_leave_pure_padding():
    rng = np.random.default_rng(3)
    parts = pack([[sequence(10, rng)]], np.zeros(1, np.float32), budget_tokens=64, alignment=4, data_parallel=3)
    assert [len(part) for part in parts] == [1, 1, 1]
    assert sorted(m.num_tokens for part in parts for m in part) == [0, 0, 9]


def test_without_sequences_every_rank_has_one_piece_of_padding():
    parts = pack([], np.zeros(0, np.float32), budget_tokens=64, alignment=4, data_parallel=2, micro_batch_multiple=2)
    assert [[len(m.tokens) for m in part] for part in parts] == [[4, 4], [4, 4]]
    for m in (m for part in parts for m in part):
        assert m.padding.all()
        assert not m.mask.any()
        assert (len(m.trajectories), len(m.advantages), len(m.num_sampled), len(m.sequences)) == (0,) * 4
    assert first_fit_decreasing([], 4) == 0
    assert balanced_partition([], 2) == [[], []]
    with pytest.raises(ValueError, match="3 items cannot be dealt into 2 equal parts"):
        balanced_partition([1.0, 2.0, 3.0], 2)


def test_arrays_of_a_micro_batch_have_the_dtypes_that_they_say():
    (m,) = pack(batch(0, 2), np.zeros(2), budget_tokens=128, alignment=1, data_parallel=1)[0]
    dtypes = {
        "tokens": np.int32, "targets": np.int32, "mask": np.bool_, "padding": np.bool_, "position_ids": np.int32,
        "cu_seqlens": np.int32, "trajectory_ids": np.int32, "rollout_logprobs": np.float32, "trajectories": np.int64,
        "num_sampled": np.int64, "advantages": np.float32, "sequences": np.int64,
    }  # fmt: skip
    assert {name: getattr(m, name).dtype for name in dtypes} == dtypes
    assert (m.remote, m.added) == ({}, {})
    assert not m.rollout_logprobs[~m.mask].any()


def test_a_sequence_above_the_budget_is_refused():
    with pytest.raises(ValueError, match="a sequence of 65 tokens does not fit into a micro-batch of 64"):
        first_fit_decreasing([3, 65], 64)


def test_first_fit_decreasing_reaches_the_optimum_of_a_known_case():
    assert first_fit_decreasing([6, 4, 6, 4, 5, 5], 10) == 3


def test_balanced_partition_beats_dealing_in_turn():
    rng = np.random.default_rng(4)
    for _ in range(20):
        costs = rng.uniform(1, 3, size=24).tolist()
        parts = balanced_partition(costs, 4)
        assert sorted(i for part in parts for i in part) == list(range(24))
        assert {len(part) for part in parts} == {6}
        sums = [sum(costs[i] for i in part) for part in parts]
        dealt = [sum(costs[i] for i in range(r, 24, 4)) for r in range(4)]
        assert max(sums) <= max(dealt)
        assert max(sums) < 1.03 * sum(costs) / 4


@pytest.mark.parametrize("budget", [256, 1024, 4096])
def test_ranks_get_nearly_equal_work(budget):
    sequences = batch(5, 200)
    parts = pack(sequences, np.zeros(200, np.float32), budget_tokens=budget, alignment=1, data_parallel=2)
    tokens = [sum(m.num_tokens for m in part) for part in parts]
    assert sum(tokens) == sum(len(s.tokens) - 1 for (s,) in sequences)
    assert max(tokens) < 1.02 * sum(tokens) / 2


def test_a_long_sequence_costs_more_than_its_tokens_in_short_ones():
    """8193 tokens are 8192 of work and 16384 of attention: more than sixteen of 1024 + 256 each."""
    rng = np.random.default_rng(0)
    sequences = [[sequence(8193, rng)], *([sequence(1025, rng)] for _ in range(16))]
    ranks = pack(sequences, np.zeros(17, np.float32), budget_tokens=32768, alignment=1, data_parallel=2)
    assert sorted(m.trajectories.tolist() for rank in ranks for m in rank) == [[0], list(range(1, 17))]


def test_routed_experts_stay_with_their_tokens_and_are_unknown_elsewhere():
    rng = np.random.default_rng(6)
    sequences = [sequence(length, rng) for length in (9, 14, 11)]
    for s in sequences[:2]:
        s.routed_experts = rng.integers(0, 8, (len(s.tokens), 3, 2)).astype(np.int16)
    parts = pack([[s] for s in sequences], np.zeros(3, np.float32), budget_tokens=16, alignment=4, data_parallel=2)
    micro_batches = [m for part in parts for m in part]
    assert len(micro_batches) == 4
    for m in micro_batches:
        expected = np.full((len(m.tokens), 3, 2), -1)
        for index in m.trajectories:
            if sequences[index].routed_experts is not None:
                expected[: len(sequences[index].tokens) - 1] = sequences[index].routed_experts[:-1]
        np.testing.assert_array_equal(m.routed_experts, expected)
    for s in sequences:
        s.routed_experts = None
    (only,) = pack([sequences], np.zeros(1, np.float32), budget_tokens=64, alignment=4, data_parallel=1)[0]
    assert only.routed_experts is None


def test_the_teacher_s_log_probs_are_those_of_the_targets_that_were_sampled():
    rng = np.random.default_rng(5)
    segments = [[sequence(int(length), rng)] for length in (9, 3, 17)]
    scored = [
        [replace(s, teacher_logprobs=np.where(s.loss_mask, -rng.random(len(s)), np.nan).astype(np.float32))]
        for (s,) in segments
    ]
    parts = pack(scored, np.zeros(3, np.float32), budget_tokens=32, alignment=8, data_parallel=4)
    seen = 0
    for batch in (m for part in parts for m in part):
        found_T = batch.added[TEACHER_LOGPROBS]
        assert (found_T.dtype, found_T.shape) == (np.float32, batch.tokens.shape)
        assert (found_T[~batch.mask] == 0).all()
        for n, trajectory in enumerate(batch.trajectories):
            (own,) = scored[trajectory]
            here = batch.mask & (batch.trajectory_ids == n)
            assert found_T[here].tolist() == own.teacher_logprobs[1:][own.loss_mask[1:]].tolist()
            seen += int(here.sum())
    assert seen == sum(int(s.loss_mask[1:].sum()) for (s,) in scored)
    assert (
        TEACHER_LOGPROBS
        not in pack(segments, np.zeros(3, np.float32), budget_tokens=32, alignment=8, data_parallel=1)[0][0].added
    )
    with pytest.raises(ValueError, match="some segments have log-probs of a teacher, and others have none"):
        pack([*scored, segments[0]], np.zeros(4, np.float32), budget_tokens=32, alignment=8, data_parallel=1)
