"""When the gap without replay is measured, and what a step's metrics say of its updates' routing."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.algorithms.mismatch import LogProbReport
from slimrl.algorithms.replay_gap import replay_gap_is_due, replay_gap_metrics
from slimrl.algorithms.routing import compare_routing
from slimrl.config.schema.algorithm import AlgorithmConfig, RoutingReplay
from slimrl.data.training import UpdateResult
from slimrl.runtime.step_metrics import update_metrics


def due(every: int, mode: RoutingReplay = RoutingReplay.rollout) -> list[int]:
    algorithm = AlgorithmConfig(routing_replay=mode, replay_gap_every_steps=every)
    return [step for step in range(1, 10) if replay_gap_is_due(algorithm, step)]


def test_the_gap_is_measured_at_the_first_step_and_every_so_many_after_it():
    assert due(4) == [1, 5, 9]
    assert due(1) == list(range(1, 10))
    assert due(0) == due(4, RoutingReplay.train) == due(4, RoutingReplay.off) == []


def gap(engine: float, trainer: float, routing=None) -> dict[str, float]:
    """The metrics of two sampled tokens."""
    report = LogProbReport(logprobs_S=np.float32([trainer] * 2), entropy_sum=0.0, routing=routing)
    said = {"rollout_logprobs": np.float32([engine] * 2), "weight_versions": np.int32([0] * 2)}
    return replay_gap_metrics([report], [SimpleNamespace(**said, mask=np.full(2, True))])


def test_the_gap_is_the_mismatch_and_the_share_of_token_layers_that_differ():
    engine, trainer = np.zeros((5, 4, 1), np.int16), np.zeros((5, 4, 1), np.int16)
    # The second layer is dense, the last token was not reported, and one token differs in two of its three layers.
    trainer[:, 1], engine[4], trainer[2, 2:] = -1, -1, 3
    routing = compare_routing(engine, trainer, np.ones((5, 4), np.float32), np.array([0, 5]), np.arange(5) < 2)
    assert gap(-1.0, -1.5, routing) == {
        "routing/unreplayed_logprob_abs_mean": pytest.approx(0.5),
        "routing/unreplayed_differs_fraction": pytest.approx(2 / (4 * 3)),
    }
    assert gap(-1.0, -1.5) == {"routing/unreplayed_logprob_abs_mean": pytest.approx(0.5)}


def result(**figures: float) -> UpdateResult:
    return UpdateResult(sums={}, denominator=1.0, grad_norm=1.0, skipped=False, lr=0.1, num_tokens=10, **figures)


def test_the_worst_layer_is_that_of_the_worst_update_and_an_expert_is_dead_in_all_of_them():
    common = {"expert_load_max_over_mean": 1.5, "router_entropy": 1.0}
    metrics = update_metrics(
        [
            result(**common, expert_load_worst=2.0, expert_load_worst_layer=7, dead_experts=5, replayed_fraction=1.0),
            result(**common, expert_load_worst=3.0, expert_load_worst_layer=2, dead_experts=4, replayed_fraction=0.5),
        ]
    )
    assert {name: value for name, value in metrics.items() if name.startswith(("moe/", "routing/"))} == {
        "moe/expert_load_max_over_mean": 1.5,
        "moe/expert_load_worst": 3.0,
        "moe/expert_load_worst_layer": 2,
        "moe/dead_experts": 4,
        "moe/router_entropy": 1.0,
        "routing/replayed_fraction": 0.75,
    }


def test_a_dense_model_has_no_figures_of_routers():
    assert math.isnan(result().dead_experts)
    assert set(update_metrics([result()])) == {"train/lr", "policy/grad_norm"}
