"""Routing compared between engine and trainer: planted flips, and a search through the graph of what feeds what."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.algorithms.mismatch import LogProbReport, mismatch_metrics, report_logprobs
from slimrl.algorithms.routing import compare_routing, routing_metrics
from slimrl.algorithms.selection import select
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import micro_batches
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.runtime.learner import make_updates

LAYERS, TOPK, EXPERTS = 3, 2, 8


def routing(tokens: int, seed: int = 0) -> np.ndarray:
    """int16 [tokens, LAYERS, TOPK] of distinct experts."""
    rng = np.random.default_rng(seed)
    return rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)


def flipped(experts_TLK: np.ndarray, places) -> np.ndarray:
    """A copy in which one expert is another at each (position, layer)."""
    changed = experts_TLK.copy()
    for t, layer in places:
        changed[t, layer, 0] = next(e for e in range(EXPERTS) if e not in experts_TLK[t, layer])
    return changed


def compare(engine, trainer, bounds, margin=None):
    margin = np.ones(trainer.shape[:2], np.float32) if margin is None else margin
    sampled = np.ones(len(trainer), np.bool_)
    return compare_routing(engine, trainer, margin, np.array(bounds, np.int32), sampled)


def test_the_order_within_a_set_of_experts_does_not_matter():
    experts = routing(10)
    result = compare(experts[..., ::-1], experts, [0, 4, 10])
    assert result.num_flips == 0
    assert not result.reached_S.any()


def test_a_flip_reaches_its_own_position_and_the_later_ones_of_its_sequence():
    experts = routing(10)
    result = compare(flipped(experts, [(2, 0)]), experts, [0, 6, 10])
    assert result.num_flips == 1
    assert result.reached_S.tolist() == [False] * 2 + [True] * 4 + [False] * 4


def test_a_flip_in_the_last_layer_reaches_its_own_position_alone():
    experts = routing(6)
    result = compare(flipped(experts, [(2, LAYERS - 1)]), experts, [0, 6])
    assert np.flatnonzero(result.reached_S).tolist() == [2]


def reachable(start, tokens, layers):
    """Nodes (t, l) are a layer's experts at a position, (t, layers) is the log-prob; by depth-first search."""
    seen, stack = set(), [start]
    while stack:
        t, layer = stack.pop()
        # A layer's output goes into the next layer of its own position, and by attention into that of later ones; only
        # its own log-prob reads the output of the last layer.
        later = range(t, tokens) if layer + 1 < layers else [t]
        for nxt in ((u, layer + 1) for u in later if layer < layers):
            if nxt not in seen:
                seen.add(nxt)
                stack.append(nxt)
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_reach_and_first_flips_equal_a_search_through_the_graph_of_dependencies(seed):
    rng = np.random.default_rng(seed)
    bounds = [0, 7, 7 + int(rng.integers(1, 8)), 18]
    experts = routing(18, seed)
    places = [(t, k) for t, k in itertools.product(range(18), range(LAYERS)) if rng.random() < 0.08]
    margin = rng.random((18, LAYERS)).astype(np.float32)
    result = compare(flipped(experts, places), experts, bounds, margin)
    reached, first = set(), []
    for start, end in itertools.pairwise(bounds):
        here = [(t - start, k) for t, k in places if start <= t < end]
        influenced = {node for place in here for node in reachable(place, end - start, LAYERS)}
        reached |= {start + t for t, k in influenced if k == LAYERS}
        first += [margin[start + t, k] for t, k in here if (t, k) not in influenced]
    assert set(np.flatnonzero(result.reached_S).tolist()) == reached
    assert sorted(result.first_margins.tolist()) == sorted(float(m) for m in first)
    assert result.num_flips == len({t for t, _ in places})


def test_layers_without_experts_are_left_out_and_what_the_engine_did_not_report_is_unsure():
    engine, trainer = routing(6, 0), routing(6, 0)
    trainer[:, 1] = -1
    assert compare(engine, trainer, [0, 6]).num_flips == 0
    engine[3] = -1
    result = compare(engine, trainer, [0, 6])
    assert result.num_flips == 0
    assert result.reached_S.tolist() == [False] * 3 + [True] * 3


def test_reports_of_two_different_models_are_refused():
    with pytest.raises(ValueError, match="reports experts of shape"):
        compare(routing(4)[:, :2], routing(4), [0, 4])


def test_a_step_without_flips_has_no_margin_and_one_that_is_all_flips_has_no_unflipped_mean():
    experts = routing(4)
    none, all_of_it = compare(experts, experts, [0, 4]), compare(flipped(experts, [(0, 0)]), experts, [0, 4])
    difference, own = np.array([1e-7, 2e-7, 3e-7, 4e-7]), np.ones(4, np.bool_)
    assert routing_metrics([none], difference, own) == {
        "mismatch/routing_flips": 0,
        "mismatch/flip_reached_fraction": 0,
        "routing/differs_fraction": 0,
        "mismatch/logprob_abs_mean_unflipped": pytest.approx(2.5e-7),
    }
    assert routing_metrics([all_of_it], difference, own) == {
        "mismatch/routing_flips": 1,
        "mismatch/flip_reached_fraction": 1,
        "mismatch/flip_margin_max": 1,
        "routing/differs_fraction": 1 / all_of_it.num_compared,
    }


def trajectory(number: int) -> Trajectory:
    """Twelve tokens, a prompt of three; the engine reports no experts for the last token, which it never read."""
    sampled = np.arange(12) >= 3
    experts = routing(12, number)
    experts[-1] = -1
    segment = Segment(
        tokens=np.arange(12, dtype=np.int32), loss_mask=sampled, rollout_logprobs=np.full(12, -1, np.float32),
        weight_versions=np.zeros(12, np.int32), turn_ids=np.zeros(12, np.int16), routed_experts=experts,
    )  # fmt: skip
    return Trajectory(
        group_id="a", trajectory_id=f"a/{number}", segments=[segment], status=Status.completed, reward=float(number)
    )


def trainer_answer(micro_batch, flips):
    """The engine's routing but for planted flips, and log-probs that are off by 1 from a flip on, by 1e-6 before."""
    experts = micro_batch.routed_experts.copy()
    experts[micro_batch.padding] = 0
    margin = np.full(experts.shape[:2], 0.5, np.float32)
    error = np.full(len(experts), 1e-6)
    for local, trajectory_index in enumerate(micro_batch.trajectories):
        start = np.flatnonzero((micro_batch.trajectory_ids == local) & ~micro_batch.padding)[0]
        for t, layer in flips.get(int(trajectory_index), []):
            experts[start + t, layer] = flipped(experts[start + t][None], [(0, layer)])[0, layer]
            margin[start + t, layer] = 1e-7 * (1 + t)
            error[start + t : start + 11] = 1.0
    logprobs = np.where(micro_batch.mask, micro_batch.rollout_logprobs + error, np.nan)
    return SimpleNamespace(
        logprobs=logprobs, entropy=np.zeros(len(experts)), routed_experts=experts, routing_margin=margin
    )


def test_planted_flips_explain_the_whole_mismatch_of_a_step():
    recipe = Recipe()
    recipe.trainer.max_tokens_per_rank = 24
    layout = SimpleNamespace(alignment=4, data=2, micro_batch_multiple=1)
    chosen = select([trajectory(i) for i in range(5)], recipe.algorithm, lambda group: True, step=1)
    (update,) = make_updates(chosen, recipe, layout)
    # One in the prompt of the second trajectory, one at the eighth token of the fourth.
    flips = {1: [(1, 0)], 3: [(7, 1)]}
    batches = micro_batches([update.batch])
    metrics = mismatch_metrics([report_logprobs(m, trainer_answer(m, flips)) for m in batches], batches)
    assert metrics["mismatch/routing_flips"] == 2
    # Positions 2 to 10 predict the nine sampled tokens: all of them are reached in one, those of 7 to 10 in the other.
    assert metrics["mismatch/flip_reached_fraction"] == pytest.approx(13 / 45)
    assert metrics["mismatch/flip_margin_max"] == pytest.approx(8e-7)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(13 / 45, rel=1e-4)
    assert metrics["mismatch/logprob_abs_mean_unflipped"] == pytest.approx(1e-6, rel=0.1)


def test_tokens_of_older_weights_do_not_count_as_unflipped_ones_that_differ():
    experts = routing(6)
    report = LogProbReport(
        logprobs_S=np.array([-1, -1, -1, -1, -1, -1], np.float32),
        entropy_sum=0.0, routing=compare(flipped(experts, [(5, 1)]), experts, [0, 6]),
    )  # fmt: skip
    batches = [
        SimpleNamespace(
            rollout_logprobs=np.array([-3, -3, -3, -1.25, -1.25, -1.25], np.float32),
            weight_versions=np.array([4, 4, 4, 5, 5, 5], np.int32), mask=np.full(6, True),
        )
    ]  # fmt: skip
    assert mismatch_metrics([report], batches, 5)["mismatch/logprob_abs_mean_unflipped"] == 0.25
    everywhere = mismatch_metrics([report], batches)
    assert everywhere["mismatch/logprob_abs_mean_unflipped"] == pytest.approx((3 * 2 + 2 * 0.25) / 5)
    assert "mismatch/logprob_abs_mean_unflipped" not in mismatch_metrics([report], batches, 6)
