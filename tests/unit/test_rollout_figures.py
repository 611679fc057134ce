"""Figures of a rollout batch, counted by hand."""

import math
from contextlib import closing

import numpy as np
import pytest

from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.observability.metrics import MetricsWriter, is_metric, read_metrics
from slimrl.rollout.environment_metrics import environment_metrics
from slimrl.rollout.statistics import rollout_metrics, source_metrics


def trajectory(reward, status, sampled, turns, calls=0, errors=0, retries=0, **rewards) -> Trajectory:
    mask = np.array([False, *[True] * sampled])
    length = len(mask)
    return Trajectory(
        group_id="g",
        trajectory_id="t",
        segments=[
            Segment(
                tokens=np.arange(length, dtype=np.int32),
                loss_mask=mask,
                rollout_logprobs=np.zeros(length, np.float32),
                weight_versions=np.zeros(length, np.int32),
                turn_ids=np.zeros(length, np.int16),
            )
        ],
        status=status,
        reward=reward,
        rewards=rewards,
        metadata={
            "num_turns": turns,
            "num_tool_calls": calls,
            "num_tool_errors": errors,
            "num_malformed_calls": 2 * errors,
            "num_retries": retries,
        },
    )


BATCH = [
    trajectory(1.5, Status.completed, 10, 2, 3, 1, 2, answer=1.0, style=0.5),
    trajectory(0.5, Status.truncated, 20, 4, 1, 0, 1, answer=0.0, style=0.5),
    trajectory(math.nan, Status.failed, 5, 1),
    trajectory(1.0, Status.completed, 5, 1, answer=1.0),
]


def test_figures_of_a_rollout_batch():
    metrics = rollout_metrics(BATCH, seconds=4.0)
    assert metrics == {
        "reward/mean": pytest.approx(1.0),
        "reward/parts/answer": pytest.approx(2 / 3),
        "reward/parts/style": pytest.approx(1 / 3),
        "reward/timeouts": 0,
        "rollout/trajectories": 4,
        "rollout/tokens": 40,
        "rollout/tokens_per_s": 10.0,
        "rollout/turns_mean": 2.0,
        "rollout/truncated_fraction": 0.25,
        "rollout/aborted_fraction": 0.0,
        "rollout/failed_fraction": 0.25,
        "rollout/tool_error_fraction": 0.25,
        "rollout/malformed_call_fraction": 0.5,
        "rollout/retries": 3,
    }


def test_a_part_of_any_name_has_a_metric_of_its_own(tmp_path):
    parts = {"format/think": 1.0, "mean": 2.0, "reward": 4.0, "parts": 8.0, "timeouts": 16.0}
    scored = trajectory(31.0, Status.completed, 1, 1)
    scored.rewards = parts
    metrics = rollout_metrics([scored], seconds=1.0)
    assert metrics["reward/mean"] == 31.0
    assert metrics["reward/timeouts"] == 0
    assert {name: metrics[f"reward/parts/{name}"] for name in parts} == parts
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer:
        writer.log(1, metrics)
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["reward/parts/format/think"] == 1.0


def test_answers_that_ran_out_of_cpu_time_are_counted():
    batch = [trajectory(float(i), Status.completed, 1, 1) for i in range(3)]
    for timed_out in batch[:2]:
        timed_out.metadata["reward_timed_out"] = True
    assert rollout_metrics(batch, seconds=1.0)["reward/timeouts"] == 2


def test_each_training_file_has_the_mean_of_its_own_trajectories(tmp_path):
    batch = [trajectory(*given) for given in [(1.5, Status.completed, 1, 1), (0.5, Status.truncated, 1, 1)] * 2]
    batch += [trajectory(math.nan, Status.failed, 1, 1), trajectory(math.nan, Status.failed, 1, 1)]
    for one, group in zip(batch, ("t:1", "gsm8k/t:1", "t:2", "t:2", "t:3", "more/t:1"), strict=True):
        one.group_id = group
    sources = {"t:1": "train", "t:2": "train", "t:3": "train", "gsm8k/t:1": "gsm8k", "more/t:1": "more"}
    metrics = source_metrics(batch, sources)
    # Of `more` no trajectory has a reward.
    assert metrics == {"reward/source/gsm8k": 0.5, "reward/source/train": pytest.approx(3.5 / 3)}
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as writer:
        writer.log(1, metrics)


def test_environments_are_timed_and_their_metrics_are_means_over_those_that_have_them(tmp_path):
    def of(measured, **report):
        given = trajectory(1.0, Status.completed, sampled=2, turns=1)
        given.measured, given.metadata["environment"] = measured, report
        return given

    batch = [
        of({"start_s": 1.0, "step_s": 4.0, "close_s": 0.5}, start_retries=2, metrics={"won": 1.0, "a/b": 3.0}),
        of({"start_s": 3.0, "step_s": 0.0, "close_s": 0.5, "tool_cache_hit_fraction": 0.25}, metrics={"won": 0.0}),
    ]
    metrics = environment_metrics(batch)
    assert metrics == {
        "time/env_start_s": 2.0, "time/env_step_s": 2.0, "time/env_close_s": 0.5, "rollout/env_start_retries": 2,
        "env/won": 0.5, "env/a/b": 3.0, "env/tool_cache_hit_fraction": 0.25,
    }  # fmt: skip
    assert all(map(is_metric, metrics))
    for number, given in enumerate(batch):
        counts = {"requests": 5, "refused": number, "abandoned": 1, "repeated": 0, "skipped": 2}
        given.metadata["gateway"] = {"segments": 1 + number, **counts}
    asked = environment_metrics(batch)
    assert {name: value for name, value in asked.items() if name not in metrics} == {
        "gateway/segments_mean": 1.5, "gateway/requests": 10, "gateway/refused": 1, "gateway/abandoned": 2,
        "gateway/repeated": 0, "gateway/skipped": 4,
    }  # fmt: skip
    assert all(map(is_metric, asked))
    assert environment_metrics([trajectory(1.0, Status.completed, sampled=2, turns=1)]) == {}
