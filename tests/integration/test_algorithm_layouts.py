"""Every algorithm under every layout: loss, gradient norm and reported sums of an update equal those of one rank.

Four trajectories of three segments each. On one rank they are in one micro-batch; on several ranks they are split over
micro-batches and data-parallel ranks, so sums over whole trajectories come from elsewhere. The log-probs of the old
policy, the engine, the reference and a teacher are the current ones plus known functions of the position.
"""

import numpy as np
import pytest
from algorithm_cases import CASES
from ranks import run_ranks
from trainer_cases import in_layouts, sequences

from slimrl.algorithms.objective import denominator, loss_function
from slimrl.algorithms.passes import needs_sums
from slimrl.algorithms.token_advantages import has_token_advantages
from slimrl.config.schema.trainer import OptimizerConfig
from slimrl.data.packing import (
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    is_split,
    micro_batches,
    pack,
)
from slimrl.runtime.cluster.rank_batches import RankBatches

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

TP2_SP = {"tensor": 2, "sequence": True}
TWO_RANKS = [{}, {"context": 2}]
"""The first is two data-parallel ranks."""
TWO_RANKS_MORE = [{**TP2_SP, "expert_tensor": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"expert": 2}]
FOUR_RANKS = [{**TP2_SP, "pipeline": 2, "expert": 2}, {"context": 2}, {"context": 2, "pipeline": 2}]
TEMPERATURE, LENGTH = 0.7, 60


@pytest.fixture(scope="module")
def expected(weights):
    return run_ranks(updates_by_algorithm, 1, weights, [{"max_tokens_per_rank": 1024}], timeout_s=200)[0][0][1]


def updates_by_algorithm(rank, num_ranks, port, weights, layouts):
    """For each layout: whether trajectories are split, and the update of each algorithm at a learning rate of 0."""
    results = []
    packed, advantages_N = sequences(0)
    optimizer = OptimizerConfig(lr=0.0)
    for run in in_layouts(rank, num_ranks, port, [{**layout, "optimizer": optimizer} for layout in layouts], weights):
        parts = pack(
            [packed[index::4] for index in range(4)], advantages_N[:4],
            budget_tokens=run.trainer.max_tokens_per_rank * run.layout.context,
            alignment=run.layout.alignment, data_parallel=run.layout.data,
            micro_batch_multiple=run.layout.micro_batch_multiple,
        )  # fmt: skip
        counts = {
            "num_trajectories": 4,
            "num_tokens": sum(int(m.mask.sum()) for m in micro_batches([parts])),
            "length": LENGTH,
        }
        batches = parts[run.layout.data_rank]
        held = RankBatches(run.runner)
        held.put_batches([batches])
        near(batches, run.runner.compute_logprobs(batches, TEMPERATURE))
        found = {}
        for name, settings in CASES.items():
            for batch in batches:
                batch.added = {known: values for known, values in batch.added.items() if known != "advantages"}
                batch.remote = {}
            if has_token_advantages(settings):
                held.add_advantages(settings)
            if needs_sums(settings, 1):
                held.set_remote(0, settings, TEMPERATURE)
            loss = loss_function("policy", settings, 0.01)
            of_sequences = range(0, len(packed), 2)
            divisor = denominator(settings.aggregation, **counts)
            held.accumulate(0, loss, divisor, TEMPERATURE, recorded=of_sequences)
            recorded = held.recorded(0, of_sequences)
            assert (recorded is not None) == run.layout.is_output_rank
            found[name] = held.step(), {piece.sequence: piece.values for piece in recorded or ()}
        results.append((is_split(parts), found))
    return results


def near(batches, found) -> None:
    """Log-probs of the old policy, the engine, the reference and a teacher, around the current ones."""
    for batch, result in zip(batches, found or [], strict=bool(found)):
        position = batch.position_ids
        old = result.logprobs + 0.11 * ((position % 5) - 2)
        batch.added[OLD_LOGPROBS] = old.astype(np.float32)
        batch.rollout_logprobs = (old + 0.07 * ((position % 3) - 0.9)).astype(np.float32)
        batch.added[TEACHER_LOGPROBS] = (result.logprobs + 0.15 * ((position % 4) - 1.5)).astype(np.float32)
        batch.added[REFERENCE_LOGPROBS] = (result.logprobs + 0.2 * ((position % 7) - 3)).astype(np.float32)


def assert_equal_to_one_rank(weights, expected, num_ranks, layouts):
    of_ranks = run_ranks(updates_by_algorithm, num_ranks, weights, layouts, timeout_s=250)
    for number, layout in enumerate(layouts):
        for name, (_, wanted) in expected.items():
            values = {sequence: own for rank in of_ranks for sequence, own in rank[number][1][name][1].items()}
            assert values.keys() == wanted.keys(), f"{layout} {name}"
            for sequence, own in wanted.items():
                for term, wanted_S in own.items():
                    where = f"{layout} {name} {sequence} {term}"
                    np.testing.assert_allclose(values[sequence][term], wanted_S, rtol=1e-4, atol=1e-4, err_msg=where)
    for rank, of_rank in enumerate(of_ranks):
        for layout, (split, found) in zip(layouts, of_rank, strict=True):
            assert split
            for name, (update, _) in found.items():
                where, (wanted, _) = f"{layout} {name}", expected[name]
                loads = {layer: load.tolist() for layer, load in (wanted.expert_load if rank == 0 else {}).items()}
                assert {layer: load.tolist() for layer, load in update.expert_load.items()} == loads, where
                assert update.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-5), where
                for term, value in wanted.sums.items():
                    # Sums of about 200 tokens.
                    assert update.sums[term] == pytest.approx(value, rel=1e-5, abs=1e-3), f"{where} {term}"


def test_every_algorithm_learns_something_else_on_one_rank(expected):
    norms = [update.grad_norm for update, _ in expected.values()]
    assert min(norms) > 0
    # GSPO and GSPO-token, GRPO and DAPO's clips, or masks that leave out nothing, may agree; most differ.
    assert len({round(norm, 6) for norm in norms}) > 0.6 * len(norms)


def test_two_ranks_make_every_algorithms_update_of_one(weights, expected):
    assert_equal_to_one_rank(weights, expected, 2, TWO_RANKS)


def test_what_is_recorded_of_a_token_is_what_the_loss_makes_of_it(expected):
    # GRPO clips token by token: a ratio beyond the bound on the side of its advantage is clipped.
    settings = CASES["grpo"]
    update, by_sequence = expected["grpo"]
    assert len(by_sequence) == 6
    for values in by_sequence.values():
        ratios, advantages = values["ratios"], values["advantages"]
        beyond = np.where(advantages > 0, ratios > 1 + settings.clip_high, ratios < 1 - settings.clip_low)
        np.testing.assert_array_equal(values["clipped"], beyond & (advantages != 0))
        assert (values["trainer_logprobs"] < 0).all()
        assert (values["entropies"] > 0).all()
    assert {int(load.sum()) for load in update.expert_load.values()} == {update.num_tokens * 2}


@pytest.mark.full
def test_two_ranks_of_other_layouts_make_every_algorithms_update_of_one(weights, expected):
    assert_equal_to_one_rank(weights, expected, 2, TWO_RANKS_MORE)


@pytest.mark.full
def test_four_ranks_make_every_algorithms_update_of_one(weights, expected):
    assert_equal_to_one_rank(weights, expected, 4, FOUR_RANKS)
