"""The rollouts of synchronous steps whose episodes take no time: what is asked for, what is kept, what is saved."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from instant_stage import InstantStage

from slimrl.algorithms.prompt_values import PromptValues
from slimrl.base.errors import RunError, StepDropped
from slimrl.config.schema.credit import DynamicSamplingConfig, RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import Sampler
from slimrl.rollout import service as service_module
from slimrl.rollout.group_filters import GroupFilters
from slimrl.rollout.group_ledger import GroupLedger
from slimrl.rollout.prompt_source import PromptSource
from slimrl.rollout.service import RolloutService
from slimrl.rollout.step_rollout import StepRollout

PROMPTS = [Prompt(prompt_id=f"p{i}", messages=[], label=None) for i in range(12)]


class Steps:
    """A service that has taken no step yet, and what it works with."""

    def __init__(self, folder: Path, useful=(), *, step=1, keeps=lambda group: True, tried=None, **settings) -> None:
        """
        Args:
            useful: ids of the prompts whose two trajectories have different rewards.
            step: the first one.
        """
        self.stage = InstantStage(lambda prompt, name: float(name.endswith("/000") and prompt.prompt_id in useful))
        recipe = Recipe()
        recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt = 3, 2
        recipe.algorithm.dynamic_sampling = DynamicSamplingConfig(**settings)
        self.data = Sampler(PROMPTS, seed=0, shuffle=False)
        self.tried: dict[str, list[float]] = {} if tried is None else tried
        self.ledger = folder / "groups.jsonl"
        source = PromptSource(recipe, self.data, PROMPTS, self.tried)
        self.stage.__enter__()
        self.service = RolloutService(recipe, source, PROMPTS, self.stage, keeps, GroupLedger(self.ledger))  # type: ignore[arg-type]
        self.service.start(step - 1, 0, None)

    def rollout(self) -> StepRollout:
        return self.service.take(self.stage.check)

    def lines(self) -> list[tuple[int, int, str, str]]:
        """Step, number, prompt and end of each line of the ledger."""
        lines = map(json.loads, self.ledger.read_text().splitlines())
        return [(line["step"], line["group"], line["prompt_id"], line["end"]) for line in lines]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Steps]]:
    monkeypatch.setattr(service_module, "POLL_S", 0.05)
    made: list[Steps] = []

    def make(*useful, **how) -> Steps:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Steps(folder, useful, **how))
        return made[-1]

    yield make
    for steps in made:
        steps.stage.__exit__()


def kept(batch: StepRollout) -> list[str]:
    return [t.group_id for t in batch.selection.trajectories]


def test_off_asks_once_and_keeps_everything(begin):
    steps = begin("p1")
    batch = steps.rollout()
    assert steps.stage.asked == [("step_000001", ["p0", "p1", "p2"])]
    assert batch.selection.trajectories == batch.sampled
    assert (len(batch.sampled), batch.metrics, batch.selection.zero_variance_fraction) == (6, {}, 2 / 3)
    assert [t.trajectory_id for t in batch.sampled][:3] == [
        "step_000001/00000/000", "step_000001/00000/001", "step_000001/00001/000",
    ]  # fmt: skip


def test_nothing_begins_between_two_steps_and_the_next_one_has_numbers_of_its_own(begin):
    steps = begin("p1", "p4")
    steps.rollout()
    steps.service.advance(0)
    assert len(steps.stage.asked) == 1
    assert kept(steps.rollout()) == ["p3", "p3", "p4", "p4", "p5", "p5"]
    assert steps.stage.asked[1:] == [("step_000002", ["p3", "p4", "p5"])]
    assert steps.stage.flushed == [0, 1]
    assert steps.lines() == [
        (step, number, f"p{3 * step - 3 + number}", "taken") for step in (1, 2) for number in range(3)
    ]


def test_zero_variance_groups_are_replaced_by_the_next_prompts_until_enough_are_useful(begin):
    steps = begin("p1", "p4", "p6", "p7", step=5, refill=RefillMode.order)
    batch = steps.rollout()
    assert steps.stage.asked == [
        ("step_000005", ["p0", "p1", "p2"]),
        ("step_000005/refill_1", ["p3", "p4"]),
        ("step_000005/refill_2", ["p5"]),
        ("step_000005/refill_3", ["p6"]),
    ]
    assert steps.stage.flushed == [0, 1, 2, 3], "before each of them"
    assert kept(batch) == ["p1", "p1", "p4", "p4", "p6", "p6"]
    assert [t.group_id for t in batch.sampled] == [f"p{n}" for n in range(7) for _ in range(2)]
    assert batch.sampled[-2].trajectory_id == "step_000005/refill_3/00000/000"
    assert batch.metrics == {
        "rollout/refills": 3, "rollout/groups_sampled": 7, "rollout/groups_useful": 3, "rollout/groups_kept": 3,
    }  # fmt: skip
    assert steps.data.state()["index"] == 7
    assert steps.tried == {}
    ends = ["filtered", "taken", "filtered", "filtered", "taken", "filtered", "taken"]
    assert steps.lines() == [(5, number, f"p{number}", end) for number, end in enumerate(ends)]


def test_a_step_and_its_refills_do_not_wait_for_the_next_check(begin, monkeypatch):
    monkeypatch.setattr(service_module, "POLL_S", 600)
    batch = begin("p1", "p4", "p6", "p7", refill=RefillMode.order).rollout()
    assert batch.metrics["rollout/refills"] == 3
    # Also where the last refill has not enough of them.
    batch = begin("p4", refill=RefillMode.order, max_refills=1).rollout()
    assert batch.metrics["rollout/groups_kept"] == 1
    assert batch.seconds < 60


def test_a_step_has_fewer_groups_after_the_last_refill(begin):
    steps = begin("p4", refill=RefillMode.order, max_refills=1)
    batch = steps.rollout()
    assert [len(prompts) for _, prompts in steps.stage.asked] == [3, 3]
    assert kept(batch) == ["p4", "p4"]
    assert batch.metrics["rollout/groups_kept"] == 1


def test_oversampling_asks_for_more_and_the_first_groups_in_order_are_kept(begin):
    steps = begin("p0", "p2", "p3", "p4", refill=RefillMode.order, oversampling=1.5)
    batch = steps.rollout()
    assert [prompts for _, prompts in steps.stage.asked] == [["p0", "p1", "p2", "p3", "p4"]]
    assert kept(batch) == ["p0", "p0", "p2", "p2", "p3", "p3"]
    assert (batch.metrics["rollout/groups_useful"], batch.metrics["rollout/groups_kept"]) == (4, 3)
    assert [end for *_, end in steps.lines()] == ["taken", "filtered", "taken", "taken", "filtered"]
    steps.service.advance(1)
    assert not steps.service._groups, "they would be of an older policy"


def test_a_group_that_the_tasks_filter_refuses_is_replaced_too_and_each_is_asked_about_once(begin):
    asked: list[str] = []

    def keeps(group) -> bool:
        asked.append(group[0].group_id)
        return group[0].group_id != "p1"

    steps = begin(*(prompt.prompt_id for prompt in PROMPTS), refill=RefillMode.order, keeps=keeps)
    assert kept(steps.rollout()) == ["p0", "p0", "p2", "p2", "p3", "p3"]
    assert sorted(asked) == ["p0", "p1", "p2", "p3"]


def test_a_filter_that_fails_ends_the_step_and_is_named(begin):
    steps = begin(keeps=GroupFilters(["task:keep"], [lambda group: 1 / 0]))
    with pytest.raises(RunError, match="task:keep failed on p2: ZeroDivisionError"):
        steps.rollout()


def test_replacements_by_value_are_new_prompts_of_the_step_and_results_are_counted_at_its_end(begin):
    steps = begin("p1", refill=RefillMode.value, max_refills=20)
    batch = steps.rollout()
    asked = [name for _, prompts in steps.stage.asked for name in prompts]
    # Every prompt once, and then none is left.
    assert sorted(asked) == sorted(prompt.prompt_id for prompt in PROMPTS)
    assert steps.data.state()["index"] == 3
    assert steps.tried == {name: [1.0, 0.5 if name == "p1" else 0.0] for name in asked}
    assert batch.metrics["rollout/refills"] == len(steps.stage.asked) - 1


def test_a_prompt_that_comes_twice_in_a_step_makes_two_groups(begin):
    steps = begin("p0", "p1", refill=RefillMode.order, max_refills=20)
    batch = steps.rollout()
    assert kept(batch) == ["p0", "p0", "p1", "p1", "p0", "p0"]
    assert (batch.selection.num_groups, batch.metrics["rollout/groups_sampled"]) == (3, 13)
    assert np.abs(batch.selection.advantages) == pytest.approx([2**-0.5] * 6, rel=1e-5)


def test_a_dropped_step_leaves_no_results_and_nothing_that_runs_and_the_next_attempt_draws_the_same(begin):
    tried = {"p3": [1.0, 0.5]}
    steps = begin("p1", step=2, refill=RefillMode.value, tried=copy.deepcopy(tried))
    steps.stage.dropped_in = "step_000002/refill_2"
    with pytest.raises(StepDropped):
        steps.rollout()
    assert steps.stage.cancelled == ["step_000002/refill_2"]
    assert steps.tried == tried
    again = begin("p1", step=2, refill=RefillMode.value, tried=tried)
    again.rollout()
    assert again.stage.asked[:3] == steps.stage.asked


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
