"""What each rule of algorithm.truncated makes of trajectories that did not come to an end."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from instant_stage import InstantStage

from slimrl.algorithms.selection import select
from slimrl.algorithms.shaping import apply_truncation_rule
from slimrl.config.schema.data import TruncationMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import ENDED_AT, STARTED_AT, Segment, Status, Trajectory
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step
from slimrl.runtime.train_run import TrainRun

NAN = math.nan


def trajectory(name: str, reward: float, status: Status) -> Trajectory:
    segment = Segment(
        tokens=np.array([1, 2], np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.array([0, -1], np.float32),
        weight_versions=np.array([-1, 0], np.int32),
        turn_ids=np.array([-1, 0], np.int16),
    )
    metadata = {"num_turns": 1, "num_tool_calls": 0, "num_tool_errors": 0, "num_malformed_calls": 0, "num_retries": 0}
    return Trajectory(
        group_id="g",
        trajectory_id=name,
        segments=[segment],
        status=status,
        reward=reward,
        metadata=metadata,
        measured={STARTED_AT: 0.0, ENDED_AT: 1.0},
    )


@pytest.mark.parametrize(
    ("rule", "status", "reward", "becomes", "trained"),
    [
        ("score", "completed", 1.0, 1.0, True),
        ("score", "truncated", 1.0, 1.0, True),
        ("score", "truncated", -1.0, -1.0, True),
        ("score", "aborted", 1.0, 1.0, True),
        ("score", "aborted", -1.0, -1.0, True),
        ("score", "failed", NAN, NAN, False),
        ("zero", "completed", 1.0, 1.0, True),
        ("zero", "completed", -1.0, -1.0, True),
        ("zero", "truncated", 1.0, 0.0, True),
        ("zero", "truncated", -1.0, -1.0, True),
        ("zero", "aborted", 1.0, 0.0, True),
        ("zero", "aborted", -1.0, -1.0, True),
        # A file of trajectories may have some that nobody scored.
        ("zero", "truncated", NAN, 0.0, True),
        ("zero", "failed", NAN, NAN, False),
        ("mask", "completed", 1.0, 1.0, True),
        ("mask", "truncated", 1.0, 1.0, False),
        ("mask", "truncated", -1.0, -1.0, False),
        ("mask", "aborted", 1.0, 1.0, False),
        ("mask", "aborted", -1.0, -1.0, False),
        ("mask", "failed", NAN, NAN, False),
    ],
)
def test_each_rule_treats_truncated_and_aborted_trajectories_alike(rule, status, reward, becomes, trained):
    recipe = Recipe()
    recipe.algorithm.truncated = TruncationMode(rule)
    others = [trajectory("best", 3.0, Status.completed), trajectory("worst", -3.0, Status.completed)]
    batch = [*others, trajectory("this", reward, Status(status))]
    apply_truncation_rule(batch, recipe.algorithm.truncated)
    np.testing.assert_equal([t.reward for t in batch], [3.0, -3.0, becomes])
    selection = select(batch, recipe.algorithm, lambda group: True, step=1)
    chosen = dict(zip([t.trajectory_id for t in selection.trajectories], selection.advantages.tolist(), strict=True))
    assert ("this" in chosen) == trained
    # Advantages within the group, in float64: what is not trained on counts in the baseline, unless it failed.
    rewards = [3.0, -3.0] + ([becomes] if status != "failed" else [])
    expected = (3.0 - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
    assert chosen["best"] == pytest.approx(expected, rel=1e-6)


def test_the_rollout_of_a_run_applies_the_rule_before_its_metrics_are_taken(tmp_path: Path):
    batch = [
        trajectory("a", 1.0, Status.completed),
        trajectory("b", 1.0, Status.truncated),
        trajectory("c", 1.0, Status.aborted),
        trajectory("d", -1.0, Status.truncated),
    ]

    class Ended(InstantStage):
        def _answer(self, prompt, name):
            made = batch[int(name[-3:])]
            made.trajectory_id = name
            return made

    recipe = Recipe()
    recipe.algorithm.truncated = TruncationMode.zero
    recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt = 1, 4
    recipe.rollout.max_failed_fraction = 0.25
    folder = RunFolder(tmp_path)
    prompt = Prompt(prompt_id="g", messages=[], label=None)
    with Ended(lambda prompt, name: 0.0) as stage:
        run = TrainRun(
            recipe=recipe,
            folder=folder,
            task=SimpleNamespace(
                group_filters=[], train={"t": [prompt]}, eval_sets={}, rewards=SimpleNamespace(parts=())
            ),
            trainers=SimpleNamespace(),
            engines=SimpleNamespace(need_weights=False),
            stage=stage,
            trackers=SimpleNamespace(),
            progress=SimpleNamespace(say=print),
            state=RunState(),
            data=Sampler([prompt], seed=0, shuffle=False),
            preemption=SimpleNamespace(check=lambda: None),
        )
        run._service.start(6, 0, None)
        step = Step(7)
        selection = run.rollout(step)
    assert selection.trajectories == batch
    assert stage.asked == [("step_000007", ["g"])]
    assert [t.reward for t in batch] == [1.0, 0.0, 0.0, -1.0]
    expected = np.array([1.0, 0.0, 0.0, -1.0]) / (np.std([1.0, 0.0, 0.0, -1.0], ddof=1) + 1e-6)
    assert selection.advantages == pytest.approx(expected, rel=1e-5)
    assert step.metrics["reward/mean"] == 0.0
    samples = [json.loads(line) for line in folder.sample_file(7).read_text().splitlines()]
    assert [(sample["trajectory_id"], sample["reward"]) for sample in samples] == [("step_000007/00000/000", 1.0)]
