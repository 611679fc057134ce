"""Older versions of the policy: which are kept, which plays, and what a resumed run finds."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from saved_checkpoints import save

from slimrl.base.errors import RunError
from slimrl.config.past_versions import past_recipe, past_violations
from slimrl.config.schema.agent import PastVersionsConfig, VersionChoice
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.data.engine import GenerateRequest, GenerateResult
from slimrl.data.trajectory import Status, Trajectory
from slimrl.engines.one_by_one import OneByOne
from slimrl.runtime.past_versions import DECAY, PastVersions, against_past, chosen, kept
from slimrl.runtime.state import CheckpointFolder, RunState


def game(paid: dict[str, float], *, status: Status = Status.completed, left: str = "policy") -> Trajectory:
    roles = {"left": {"player": left, "train": True}, "right": {"player": "past", "train": False, "version": 0}}
    return Trajectory(
        group_id="g", trajectory_id="t", segments=[], status=status,
        metadata={"roles": roles, "environment": {"role_rewards": paid}},
    )  # fmt: skip


def test_a_game_is_won_by_who_is_paid_more():
    assert against_past(game({"left": 2.0, "right": -2.0})) == 1
    assert against_past(game({"left": -1.0})) == 0
    assert against_past(game({"left": 0.5, "right": 0.5})) == 0.5
    assert against_past(game({}, status=Status.truncated)) == 0.5
    assert against_past(game({"left": 1.0}, status=Status.failed)) is None
    assert against_past(game({"left": 1.0}, left="frozen")) is None


def test_the_first_version_and_the_newest_are_kept():
    assert kept([0], 3) == [0]
    assert kept([0, 2, 4], 3) == [0, 2, 4]
    assert kept([0, 2, 4, 6, 8], 3) == [0, 6, 8]
    assert kept([0, 2, 4], 2) == [0, 4]


def shares(choice: VersionChoice, results: dict[str, list[float]]) -> dict[int, float]:
    drawn = Counter(chosen(results, choice, 3, step) for step in range(5000))
    return {version: count / 5000 for version, count in sorted(drawn.items())}


def test_a_version_is_drawn_as_the_rule_says_and_by_seed_and_step_alone():
    results = {"0": [98.0, 98.0], "4": [18.0, 9.0], "8": [0.0, 0.0]}
    assert shares(VersionChoice.uniform, results) == pytest.approx({0: 1 / 3, 4: 1 / 3, 8: 1 / 3}, abs=0.03)
    # 1/3, 1/2 and 1 of 11/6.
    assert shares(VersionChoice.recency, results) == pytest.approx({0: 2 / 11, 4: 3 / 11, 8: 6 / 11}, abs=0.03)
    # Win rates 0.99, 0.5 and, of no games, 0.5.
    hard = shares(VersionChoice.win_rate, results)
    assert hard.get(0, 0.0) < 0.005
    assert hard[4] == pytest.approx(0.5, abs=0.03)
    picks = [chosen(results, VersionChoice.uniform, 3, step) for step in range(20)]
    assert picks == [chosen(results, VersionChoice.uniform, 3, step) for step in range(20)]
    assert picks != [chosen(results, VersionChoice.uniform, 4, step) for step in range(20)]


class Parts:
    """Trainer and engines at once, and a run's folders."""

    def __init__(self, path: Path, state: RunState, **settings) -> None:
        self.path, self.state, self.loaded = path, state, []
        recipe = Recipe()
        recipe.agent.past_versions = PastVersionsConfig(every_steps=2, keep=2, **settings)
        self.past = PastVersions(recipe, state, self, self, path / "past_versions", [path / "checkpoints"])

    def export_hf(self, folder: Path) -> None:
        assert not folder.exists()
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.state.step))

    def load_checkpoint(self, folder: Path, version: int) -> None:
        self.loaded.append((folder.name, version, (folder / "weights").read_text()))

    def end_step(self, step: int, *, saves: bool = False) -> None:
        self.state.step = step
        self.past.keep(step)
        if saves:
            save(CheckpointFolder(self.path / "checkpoints"), self.state, 1, {})
            self.past.clean()

    @property
    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.path / "past_versions").iterdir())


def test_folders_are_kept_as_long_as_the_run_or_a_checkpoint_needs_them(tmp_path: Path):
    parts = Parts(tmp_path, RunState())
    parts.past.keep(0)
    for step in range(1, 5):
        parts.end_step(step, saves=step == 3)
    assert list(parts.state.past_versions) == ["0", "4"]
    # The checkpoint of step 3, at which the run may have to go on, draws from version 2.
    assert parts.folders == ["step_000000", "step_000002", "step_000004"]
    (tmp_path / "past_versions" / ".step_000006.77.partial").mkdir()
    parts.end_step(5, saves=True)
    assert parts.folders == ["step_000000", "step_000004"]


def test_a_resumed_run_writes_a_version_again_that_it_has_not_counted_yet(tmp_path: Path):
    first = Parts(tmp_path, RunState())
    first.past.keep(0)
    first.end_step(2)
    resumed = Parts(tmp_path, RunState(step=1, past_versions={"0": [4.0, 1.0]}))
    resumed.past.keep(0)  # with the first resync of any attempt
    assert resumed.state.past_versions == {"0": [4.0, 1.0]}
    resumed.end_step(2)
    assert resumed.state.past_versions == {"0": [4.0, 1.0], "2": [0.0, 0.0]}
    # A run that begins to keep versions later has the weights of its step as the first.
    other = Parts(tmp_path / "other", RunState(step=7))
    other.past.keep(0)
    assert other.folders == ["step_000007"]


def test_engines_load_a_version_when_another_one_plays_and_the_first_in_evaluations(tmp_path: Path):
    state = RunState()
    parts = Parts(tmp_path, state, choice=VersionChoice.win_rate)
    parts.past.keep(0)
    parts.end_step(2)
    state.past_versions = {"0": [1e6, 1e6], "2": [0.0, 0.0]}
    for step in (3, 4):
        parts.past.load_for(step)
    parts.past.load_first()
    parts.past.load_for(5)
    assert parts.loaded == [("step_000002", 2, "2"), ("step_000000", 0, "0"), ("step_000002", 2, "2")]
    metrics = parts.past.count([game({"left": 1.0}), game({"right": 1.0}), game({"left": 1.0}), game({}, left="bot")])
    assert metrics == {"past/version": 2.0, "past/versions": 2.0, "past/win_rate": 2 / 3}
    assert state.past_versions == {"0": [DECAY * 1e6, DECAY * 1e6], "2": [3.0, 2.0]}
    assert "past/win_rate" not in parts.past.count([])
    (tmp_path / "past_versions" / "step_000000").rename(tmp_path / "gone")
    with pytest.raises(RunError, match="step_000000: the version that is to play now is gone"):
        parts.past.load_first()


def test_the_engines_are_those_of_the_policy_without_what_training_needs():
    recipe = Recipe()
    recipe.rollout.engine_tp, recipe.rollout.num_engines, recipe.rollout.colocated = 4, 3, True
    recipe.rollout.routed_experts, recipe.rollout.sglang = True, {"mem_fraction_static": 0.7}
    made = past_recipe(recipe).rollout
    assert (made.engine_tp, made.num_engines, made.colocated, made.routed_experts) == (4, 1, False, False)
    assert made.sglang == {"mem_fraction_static": 0.7}
    recipe.deterministic = True
    assert past_recipe(recipe).rollout.sglang == {"mem_fraction_static": 0.7, "disable_radix_cache": True}


@pytest.mark.parametrize(
    ("settings", "hf_config", "said"),
    [
        (
            {"mode": RolloutMode.async_},
            None,
            "with rollout.mode async episodes go on while the next step draws another",
        ),
        ({"oversample": 1.5}, None, "Use rollout.oversample 1."),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "engines of a quantized model do not load"),
    ],
)
def test_runs_in_which_a_version_cannot_be_another_s_opponent_are_refused(settings, hf_config, said):
    recipe = Recipe()
    recipe.agent.environment, recipe.agent.past_versions.every_steps = "a:B", 5
    assert list(past_violations(recipe, {})) == []
    for name, value in settings.items():
        setattr(recipe.rollout, name, value)
    [(key, message)] = past_violations(recipe, hf_config)
    assert key == "agent.past_versions.every_steps"
    assert said in message
    recipe.agent.environment = ""
    assert "no agent.environment with roles" in next(past_violations(recipe, None))[1]
    recipe.agent.past_versions.every_steps = 0
    assert list(past_violations(recipe, hf_config)) == []


def test_an_engine_of_a_run_that_must_repeat_has_one_request_at_a_time():
    running, most, served = Counter(), Counter(), []

    def engine(name: str) -> SimpleNamespace:
        async def generate_batch(requests):
            [request] = requests
            running[name] += 1
            most[name] = max(most[name], running[name])
            await asyncio.sleep(0.001)
            running[name] -= 1
            served.append(request.session_id)
            return [
                GenerateResult(
                    tokens=[1], logprobs=[0.0], weight_versions=np.zeros(1, np.int32), finish_reason="stop",
                    routed_experts=None, cached_tokens=0,
                )
            ]  # fmt: skip

        return SimpleNamespace(generate_batch=generate_batch)

    async def ask() -> None:
        engines = OneByOne([engine("a"), engine("b")])
        requests = [
            GenerateRequest(
                session_id=str(number), input_ids=[1], temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=1,
                stop_token_ids=(), timeout_s=5.0, seed=number,
            )
            for number in range(9)
        ]  # fmt: skip
        await asyncio.gather(*map(engines.generate, requests))

    asyncio.run(ask())
    assert sorted(served) == sorted(map(str, range(9)))
    assert most == {"a": 1, "b": 1}
