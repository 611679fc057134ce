"""A curriculum over training files: when a level begins, what is drawn then, and a resumed run."""

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from instant_stage import InstantStage
from recipe_problems import recipe_problems

from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.data import CurriculumConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.data.curriculum import Curriculum
from slimrl.data.prompt import Prompt
from slimrl.rollout.group_ledger import GroupLedger
from slimrl.rollout.prompt_source import PromptSource
from slimrl.rollout.service import RolloutService
from slimrl.runtime import training
from slimrl.runtime.state import RunState

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
SIZES = {"train": 5, "sum_1": 7, "sum_2": 6, "gcd_0": 4, "gcd_1": 4, "words": 3}
FILES = {
    name: [Prompt(prompt_id=f"{name}:{i}", messages=[], label=None) for i in range(size)]
    for name, size in SIZES.items()
}
TWO_LEVELS = ["data.curriculum.levels={sum: [train, b]}"]
LEVELS = {"sum": ["train", "sum_1", "sum_2"], "gcd": ["gcd_0", "gcd_1"]}


def curriculum(weights=(), *, seed=0, **settings) -> Curriculum:
    given = CurriculumConfig(**{"levels": LEVELS, "window": 3, **settings})
    return Curriculum(FILES, dict(weights), given, pass_reward=1.0, seed=seed, shuffle=True)


def shares(data: Curriculum, count: int = 6000) -> dict[str, float]:
    """Fraction of the next prompts that is of each file."""
    given = Counter(prompt.prompt_id.partition(":")[0] for prompt in data.take(count))
    return {name: given[name] / count for name in FILES}


def expected(**weights: float) -> dict[str, float]:
    return {name: weights.get(name, 0) / sum(weights.values()) for name in FILES}


def test_the_first_levels_are_drawn_until_they_are_solved_then_the_next_and_a_part_of_the_passed_ones():
    data = curriculum(passed_weight=0.25)
    assert shares(data) == pytest.approx(expected(train=1, gcd_0=1, words=1), abs=1e-3)
    for _ in range(3):
        data.count("train:0", [1.0, 1.0])
    assert shares(data) == pytest.approx(expected(train=0.25, sum_1=1, gcd_0=1, words=1), abs=1e-3)
    for _ in range(3):
        data.count("sum_1:3", [1.0])
    given = expected(train=0.25, sum_1=0.25, sum_2=1, gcd_0=1, words=1)
    assert shares(data) == pytest.approx(given, abs=1e-3)
    for _ in range(30):  # there is no further one
        data.count("sum_2:3", [1.0])
    assert shares(data) == pytest.approx(given, abs=1e-3)
    assert data.metrics() == {"data/level/sum": 2, "data/level/gcd": 0, "data/level_success/sum": 1.0}


def test_weights_of_files_count_beside_the_levels_and_a_passed_one_may_be_left():
    weights = {"train": 2, "sum_1": 4, "sum_2": 1, "gcd_0": 1, "gcd_1": 1, "words": 3}
    data = curriculum(weights, passed_weight=0.0)
    assert shares(data) == pytest.approx(expected(train=2, gcd_0=1, words=3), abs=1e-3)
    data.take(1)  # credits are within an item of each other
    for _ in range(3):
        data.count("train:0", [1.0])
    assert shares(data) == pytest.approx(expected(sum_1=4, gcd_0=1, words=3), abs=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_a_level_begins_when_the_last_window_of_its_own_groups_is_solved_often_enough(seed):
    rng = random.Random(seed)
    data = curriculum(window=4, raise_at=0.75)
    level, rates = 0, []
    for _ in range(200):
        name = rng.choice(["train", "sum_1", "sum_2", "words"])
        rewards = rng.choices([0.0, 0.99, 1.0, 1.5], [1, 1, 4, 4], k=rng.randint(0, 4))
        data.count(f"{name}:0", rewards)
        if rewards and name == LEVELS["sum"][level]:
            rates.append(sum(reward >= 1 for reward in rewards) / len(rewards))
            if level < 2 and len(rates) >= 4 and sum(rates[-4:]) / 4 >= 0.75:
                level, rates = level + 1, []
        assert data.metrics()["data/level/sum"] == level
        if rates:
            assert data.metrics()["data/level_success/sum"] == pytest.approx(sum(rates[-4:]) / len(rates[-4:]))
    assert level == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_level_ends_when_the_last_window_of_its_own_groups_is_hardly_solved(seed):
    rng = random.Random(seed)
    data = curriculum(window=3, raise_at=0.7, lower_at=0.3)
    level, rates, falls = 0, [], 0
    for _ in range(300):
        # The second file is solved half as often as the first, the third never.
        name = LEVELS["sum"][level]
        chance = {"train": 1.0, "sum_1": 0.5, "sum_2": 0.0}[name]
        rewards = [float(rng.random() < chance) for _ in range(4)]
        data.count(f"{name}:0", rewards)
        rates = [*rates, sum(rewards) / 4][-3:]
        step = 0
        if len(rates) == 3 and level < 2 and sum(rates) / 3 >= 0.7:
            step = 1
        elif len(rates) == 3 and level and sum(rates) / 3 <= 0.3:
            step = -1
        if step:
            level, rates, falls = level + step, [], falls + (step < 0)
            weights = {name: 1 if place == level else 0.2 for place, name in enumerate(LEVELS["sum"][: level + 1])}
            assert shares(data) == pytest.approx(expected(**weights, gcd_0=1, words=1), abs=1e-3)
        assert data.metrics()["data/level/sum"] == level
    assert falls > 3


@pytest.mark.parametrize("stop", [0, 3, 17, 60])
def test_a_resumed_curriculum_goes_on_with_what_would_have_come_next(stop):
    def step(data: Curriculum) -> list[str]:
        taken = [prompt.prompt_id for prompt in data.take(3)]
        for prompt_id in taken:
            data.count(prompt_id, [1.0, float(len(prompt_id) % 2)])
        return taken

    def begun() -> Curriculum:
        return curriculum(raise_at=0.5, seed=4)

    assert_goes_on(begun, step, stop)


@pytest.mark.parametrize("stop", [1, 8, 21, 60])
def test_a_resumed_curriculum_whose_levels_fall_goes_on_with_what_would_have_come_next(stop):
    def step(data: Curriculum) -> list[str]:
        taken = [prompt.prompt_id for prompt in data.take(3)]
        for prompt_id in taken:
            data.count(prompt_id, [float(not prompt_id.startswith(("sum_2", "gcd_1")))])
        return [*taken, str(data.metrics()["data/level/sum"])]

    def begun() -> Curriculum:
        return curriculum(raise_at=0.9, lower_at=0.1, seed=4)

    assert_goes_on(begun, step, stop)
    data = begun()
    levels = [float(step(data)[-1]) for _ in range(60)]
    assert {later - before for before, later in pairwise(levels)} == {-1, 0, 1}


def assert_goes_on(begun: Callable[[], Curriculum], step: Callable[[Curriculum], list[str]], stop: int) -> None:
    """A curriculum that is saved and restored after some steps does in further ones what one without a stop does."""
    whole, stopped, resumed = begun(), begun(), begun()
    before = [step(whole) for _ in range(stop)]
    assert [step(stopped) for _ in range(stop)] == before
    resumed.restore(json.loads(json.dumps(stopped.state())))
    assert resumed.metrics() == whole.metrics()
    assert [step(resumed) for _ in range(60)] == [step(whole) for _ in range(60)]
    assert resumed.metrics() == whole.metrics()
    assert whole.metrics()["data/level/sum"] > 0


def test_a_state_of_other_levels_is_refused():
    data = curriculum()
    for name in ("train:0", "sum_1:0"):
        for _ in range(3):
            data.count(name, [1.0])
    state = data.state()
    with pytest.raises(ValueError, match=r"levels\.sum must begin with the levels .* begun: train, sum_1, sum_2\. It"):
        curriculum(levels={**LEVELS, "sum": ["train", "sum_1"]}).restore(state)
    with pytest.raises(ValueError, match=r"It has train, sum_2, sum_1; only later ones may change"):
        curriculum(levels={**LEVELS, "sum": ["train", "sum_2", "sum_1"]}).restore(state)
    with pytest.raises(ValueError, match="the saved levels are of sum, gcd"):
        curriculum(levels={"sum": LEVELS["sum"]}).restore(state)
    with pytest.raises(ValueError, match=r"the saved levels are of a run without data\.curriculum"):
        data.restore({"files": state["files"]})


def test_levels_that_have_not_begun_may_change_their_order():
    data = curriculum()
    state = json.loads(json.dumps(data.state()))
    other = curriculum(levels={**LEVELS, "sum": ["train", "sum_2", "sum_1"]})
    other.restore(state)
    for _ in range(3):
        other.count("train:0", [1.0])
    assert shares(other)["sum_2"] > 0
    assert shares(other)["sum_1"] == 0


def recipe_of(**rollout) -> Recipe:
    recipe = Recipe(steps=20)
    recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt = 3, 2
    recipe.rollout.max_concurrency_per_engine = 64
    for name, value in rollout.items():
        setattr(recipe.rollout, name, value)
    recipe.data.curriculum = CurriculumConfig(levels={"sum": ["train", "sum_1", "sum_2"]}, window=4)
    return recipe


FEW = {name: FILES[name] for name in ("train", "sum_1", "sum_2")}


def service_of(folder: Path, recipe: Recipe, stage: InstantStage, state: RunState) -> RolloutService:
    data = training.sampler(FEW, recipe, state)
    prompts = [prompt for prompts in FEW.values() for prompt in prompts]
    source = PromptSource(recipe, data, prompts, {})
    service = RolloutService(recipe, source, prompts, stage, lambda group: True, GroupLedger(folder / "groups.jsonl"))  # type: ignore[arg-type]
    service.start(state.step, 0, None)
    return service


def is_solved(prompt: Prompt, name: str) -> float:
    """Groups of the first prompts of each file are not solved, those of `train` but for one."""
    return float(not prompt.prompt_id.endswith(":0") or name.endswith("/000"))


def test_in_sync_levels_depend_on_the_groups_in_the_order_in_which_they_began(tmp_path):
    recipe, reference = recipe_of(), Curriculum(
        FEW, {}, recipe_of().data.curriculum, pass_reward=1.0, seed=0, shuffle=True
    )  # fmt: skip
    with InstantStage(is_solved) as stage:
        service = service_of(tmp_path, recipe, stage, RunState())
        for _ in range(8):
            metrics = service.take(stage.check).metrics
            asked = [prompt.prompt_id for prompt in reference.take(3)]
            assert stage.asked[-1][1] == asked
            for prompt_id in asked:
                reference.count(prompt_id, [1.0, float(not prompt_id.endswith(":0"))])
            assert {name: value for name, value in metrics.items() if name.startswith("data/")} == reference.metrics()
            service.advance(0)  # the stage samples with version 0
        assert metrics["data/level/sum"] == 2


def test_a_run_that_goes_on_after_a_step_asks_for_the_same_prompts(tmp_path):
    asked = []
    for stops in ([], [2, 5]):
        state, recipe = RunState(), recipe_of()
        of_run = []
        with InstantStage(is_solved) as stage:
            service = service_of(tmp_path, recipe, stage, state)
            for step in range(1, 9):
                service.take(stage.check)
                of_run.append(stage.asked[-1][1])
                service.advance(0)  # the stage samples with version 0
                if step in stops:
                    state.step, state.cursor = step, json.loads(json.dumps(service.position()))
                    service = service_of(tmp_path, recipe, stage, state)
        asked.append(of_run)
    assert asked[0] == asked[1]


@pytest.mark.parametrize("penalty", [0.014, 0.3, 0.7])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_right_answer_solves_a_level_however_long_it_is(tmp_path, mode, penalty):
    recipe = recipe_of(mode=RolloutMode(mode))
    recipe.algorithm.overlong.max_tokens, recipe.algorithm.overlong.buffer_tokens = 1, 1
    recipe.algorithm.overlong.penalty = penalty
    with InstantStage(lambda prompt, name: 1.0) as stage:
        service = service_of(tmp_path, recipe, stage, RunState())
        batches = [service.take(stage.check)]
        service.advance(0)  # the stage samples with version 0
        batches.append(service.take(stage.check))
        assert all(t.reward == pytest.approx(1 - penalty) for batch in batches for t in batch.sampled)
        assert batches[-1].metrics["data/level/sum"] >= 1


def test_groups_that_are_solved_whole_count_though_they_are_replaced(tmp_path):
    recipe = recipe_of(mode=RolloutMode("async"))
    recipe.algorithm.dynamic_sampling.refill = RefillMode.order
    recipe.algorithm.dynamic_sampling.max_refills = 50
    solved = lambda prompt, name: float(prompt.prompt_id.startswith("train") or name.endswith("/000"))  # noqa: E731
    with InstantStage(solved) as stage:
        service = service_of(tmp_path, recipe, stage, RunState())
        batch = service.take(stage.check)
        # The first file has no group to train on, and yet the second one has begun.
        assert {t.group_id.partition(":")[0] for t in batch.sampled} == {"sum_1"}
        assert batch.metrics["data/level/sum"] == 1
        assert batch.metrics["data/level_success/sum"] == 0.5


@pytest.mark.parametrize(
    ("settings", "command", "said"),
    [
        (["data.curriculum.levels={sum: [train, b]}"], "train", []),
        (["data.curriculum.levels={sum: [train]}"], "train", ["levels.sum: needs two files or more"]),
        (["data.curriculum.levels={sum: [train, c]}"], "train", ["levels.sum: c is no training file; there are train"]),
        (
            ["data.curriculum.levels={sum: [train, b], x: [b, train]}"], "train",
            ["levels.x: b is in sum already.", "levels.x: train is in"],
        ),
        (
            ["data.curriculum.levels={sum: [train, b]}", "algorithm.dynamic_sampling.refill=value"], "train",
            ["levels: algorithm.dynamic_sampling.refill"],
        ),
        (["data.curriculum.raise_at=1.5"], "train", ["raise_at: "]),
        ([*TWO_LEVELS, "data.curriculum.lower_at=0.8"], "train", ["lower_at: 0.8 is not less than raise_at"]),
        ([*TWO_LEVELS, "data.curriculum.lower_at=0"], "train", []),
        (["data.curriculum.window=0"], "train", ["window: "]),
        (["data.curriculum.passed_weight=-1"], "train", ["passed_weight: "]),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(settings, command, said):
    problems = recipe_problems(RECIPE, ["data.more.b=b.jsonl", *settings], command=command)
    found = [f"{p.key}: {p.message}" for p in problems if p.key.startswith("data.curriculum")]
    assert len(found) == len(said), found
    for text, problem in zip(said, found, strict=True):
        assert problem.startswith(f"data.curriculum.{text}")


def test_supervised_training_has_no_success_rate():
    problems = recipe_problems(
        RECIPE.with_name("sft.yaml"), ["data.more.b=b.jsonl", "data.curriculum.levels={x: [train, b]}"], command="sft"
    )
    assert [p.key for p in problems if p.key.startswith("data.curriculum")] == ["data.curriculum.levels"]
