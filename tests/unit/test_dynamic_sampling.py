"""The rollouts of a step with a stage that only answers: what is asked for, what is kept, and what is saved."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.algorithms.prompt_values import PromptValues
from slimrl.base.errors import StepDropped
from slimrl.config.schema.credit import DynamicSamplingConfig, RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompts import Sampler
from slimrl.data.trajectory import Prompt, Segment, Status, Trajectory
from slimrl.rollout.dynamic_sampling import StepSampler

PROMPTS = [Prompt(prompt_id=f"p{i}", messages=[], label=None) for i in range(12)]


class Stage:
    """Two trajectories of each prompt; their rewards differ for the prompts of `useful`, else they are 0."""

    def __init__(self, useful=()) -> None:
        self.useful = set(useful)
        self.asked: list[tuple[str, list[str], int]] = []
        self.dropped_in = ""

    def rollout(self, prompts, *, label, check_cancelled, earlier=()):
        self.asked.append((label, [prompt.prompt_id for prompt in prompts], len(earlier)))
        if label == self.dropped_in:
            raise StepDropped
        return [
            Trajectory(
                group_id=prompt.prompt_id,
                trajectory_id=f"{label}/{prompt.prompt_id}/{sample}",
                segments=[
                    Segment(
                        tokens=np.zeros(2, np.int32),
                        loss_mask=np.array([False, True]),
                        rollout_logprobs=np.zeros(2, np.float32),
                        weight_versions=np.zeros(2, np.int32),
                        turn_ids=np.array([-1, 0], np.int16),
                    )
                ],
                status=Status.completed,
                reward=float(sample == 0 and prompt.prompt_id in self.useful),
            )
            for prompt in prompts
            for sample in range(2)
        ]


def sampler_of(stage: Stage, *, keeps=lambda group: True, tried=None, **settings) -> SimpleNamespace:
    recipe = Recipe()
    recipe.rollout.prompts_per_step = 3
    recipe.algorithm.dynamic_sampling = DynamicSamplingConfig(**settings)
    data = Sampler(PROMPTS, seed=0, shuffle=False)
    tried = {} if tried is None else tried
    made = StepSampler(recipe, data, PROMPTS, stage, keeps, tried)
    return SimpleNamespace(rollout=lambda step=1: made.rollout(step, lambda: None), data=data, tried=tried)


def test_off_asks_once_and_keeps_everything():
    stage = Stage(["p1"])
    batch = sampler_of(stage).rollout()
    assert stage.asked == [("step_000001", ["p0", "p1", "p2"], 0)]
    assert batch.kept is batch.sampled
    assert (len(batch.kept), batch.metrics) == (6, {})


def test_zero_variance_groups_are_replaced_by_the_next_prompts_until_enough_are_useful():
    stage = Stage(["p1", "p4", "p6", "p7"])
    sampler = sampler_of(stage, refill=RefillMode.order)
    batch = sampler.rollout(5)
    assert stage.asked == [
        ("step_000005", ["p0", "p1", "p2"], 0),
        ("step_000005/refill_1", ["p3", "p4"], 6),
        ("step_000005/refill_2", ["p5"], 10),
        ("step_000005/refill_3", ["p6"], 12),
    ]
    assert [t.group_id for t in batch.kept] == ["p1", "p1", "p4", "p4", "p6", "p6"]
    assert len(batch.sampled) == 14
    assert batch.metrics == {
        "rollout/refills": 3, "rollout/groups_sampled": 7, "rollout/groups_useful": 3, "rollout/groups_kept": 3,
    }  # fmt: skip
    assert sampler.data.state()["index"] == 7
    assert sampler.tried == {}


def test_a_step_has_fewer_groups_after_the_last_refill():
    stage = Stage(["p4"])
    batch = sampler_of(stage, refill=RefillMode.order, max_refills=1).rollout()
    assert [len(prompts) for _, prompts, _ in stage.asked] == [3, 3]
    assert [t.group_id for t in batch.kept] == ["p4", "p4"]
    assert batch.metrics["rollout/groups_kept"] == 1


def test_oversampling_asks_for_more_and_the_first_groups_in_order_are_kept():
    stage = Stage(["p0", "p2", "p3", "p4"])
    batch = sampler_of(stage, refill=RefillMode.order, oversampling=1.5).rollout()
    assert [prompts for _, prompts, _ in stage.asked] == [["p0", "p1", "p2", "p3", "p4"]]
    assert [t.group_id for t in batch.kept] == ["p0", "p0", "p2", "p2", "p3", "p3"]
    assert (batch.metrics["rollout/groups_useful"], batch.metrics["rollout/groups_kept"]) == (4, 3)


def test_a_group_that_the_tasks_filter_refuses_is_replaced_too():
    stage = Stage([prompt.prompt_id for prompt in PROMPTS])
    sampler = sampler_of(stage, refill=RefillMode.order, keeps=lambda group: group[0].group_id != "p1")
    assert [t.group_id for t in sampler.rollout().kept] == ["p0", "p0", "p2", "p2", "p3", "p3"]


def test_replacements_by_value_are_new_prompts_of_the_step_and_results_are_counted_at_its_end():
    stage = Stage(["p1"])
    sampler = sampler_of(stage, refill=RefillMode.value, max_refills=20)
    batch = sampler.rollout()
    asked = [name for _, prompts, _ in stage.asked for name in prompts]
    # Every prompt once, and then none is left.
    assert sorted(asked) == sorted(prompt.prompt_id for prompt in PROMPTS)
    assert sampler.data.state()["index"] == 3
    assert sampler.tried == {name: [1.0, 0.5 if name == "p1" else 0.0] for name in asked}
    assert batch.metrics["rollout/refills"] == len(stage.asked) - 1


def test_a_dropped_step_leaves_no_results_and_the_next_attempt_draws_the_same():
    stage = Stage(["p1"])
    tried = {"p3": [1.0, 0.5]}
    before = copy.deepcopy(tried)
    sampler = sampler_of(stage, refill=RefillMode.value, tried=tried)
    stage.dropped_in = "step_000002/refill_2"
    with pytest.raises(StepDropped):
        sampler.rollout(2)
    assert tried == before
    again = Stage(["p1"])
    sampler_of(again, refill=RefillMode.value, tried=copy.deepcopy(before)).rollout(2)
    assert again.asked[:3] == stage.asked


def values_of(tried: dict[str, list[float]], **settings) -> PromptValues:
    return PromptValues(DynamicSamplingConfig(**settings), tried)


def test_values_are_the_formulas_of_the_docs():
    values = values_of({}, value_decay=0.5, uncertainty_weight=0.25)
    assert values.value("new") == 4 * 0.5 * 0.5 + 0.25
    tried: dict[str, list[float]] = {}
    values = values_of(tried, value_decay=0.5, uncertainty_weight=0.25)
    values.update({"a": [1.0, 0.0, 1.0, 1.0], "b": [7.0, -3.0]})
    assert tried == {"a": [1.0, 0.75], "b": [1.0, 0.5]}
    values.update({"a": [0.0, 0.0]})
    assert tried["a"] == [1.5, 0.375]
    rate = 0.875 / 2.5
    assert values.value("a") == pytest.approx(4 * rate * (1 - rate) + 0.25 / math.sqrt(2.5), rel=1e-15)


def test_prompts_are_drawn_in_proportion_to_their_capped_weights():
    tried = {"easy": [4.0, 4.0], "hard": [4.0, 0.0], "medium": [4.0, 2.0]}
    names = ["easy", "medium", "hard", "new"]
    values = values_of(tried, uncertainty_weight=0.5, max_weight=4.0)
    weights = values.weights(names)
    assert weights == pytest.approx([values.value(name) for name in names])
    assert weights[0] == pytest.approx(weights[2])
    assert weights[0] < weights[1] < weights[3]
    drawn = np.bincount([values.draw(names, 1, seed)[0] for seed in range(4000)], minlength=4) / 4000
    # Three standard deviations of a frequency near a half.
    assert drawn == pytest.approx(weights / weights.sum(), abs=0.024)
    mean = np.mean([values.value(name) for name in names])
    assert values_of(tried, max_weight=1.0).weights(names).max() == pytest.approx(mean)
    assert sorted(values.draw(names, 9, 1)) == [0, 1, 2, 3]
    assert values.draw(names, 2, 7) == values.draw(names, 2, 7)
    assert values.draw([], 2, 7) == []
