"""Runs in which a role is an older version of the policy: killed and continued, and what its engine says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import RECIPES, CliRun, Workspace, make_workspace, steps_without_times, succeed
from engine_probes import KEY
from fleet import Fleet
from slow_talk import end_turns
from test_run_resume import deterministic, exported, kill_after_checkpoint
from venvs import environment_python

from slimrl.agent.roles.past_conversation import PastConversation
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.base.seeds import derive_seed
from slimrl.config.load import load_recipe
from slimrl.config.past_versions import past_recipe
from slimrl.engines.client import SglangEngine
from slimrl.engines.servers.control import SglangControl
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder
from slimrl.rollout.task.episodes import load_episode_code
from slimrl.runtime.past_versions import version_folder

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(2400)]

GSPO = str(RECIPES / "gspo_calculator.yaml")
RUN_S = 600.0
PAST = [
    "agent.environment=two_speakers_paid:PaidSpeakers", "agent.tools=[]", "agent.system_prompt=null",
    "reward.function=two_speakers:even_for_the_second", "rollout.max_trajectory_tokens=512",
    "agent.roles.second.player=past", "agent.past_versions.every_steps=1", "agent.past_versions.keep=2",
    "agent.past_versions.choice=win_rate", "checkpoint.keep=4", "trainer.optimizer.lr=3e-3",
    "tracking.trajectories_per_step=100",
]  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = make_workspace(tmp_path_factory.mktemp("run_past_versions"))
    end_turns(made.path / "model")
    return made


@pytest.fixture(scope="module")
def whole(workspace: Workspace) -> RunFolder:
    succeed("train", GSPO, *deterministic(workspace, "whole", *PAST), timeout_s=RUN_S)
    return workspace.run_folder("whole")


def rows_of(folder: RunFolder, step: int) -> list[dict[str, Any]]:
    return [json.loads(row) for row in folder.sample_file(step).read_text().splitlines()]


def folders(folder: RunFolder) -> dict[str, bytes]:
    return {
        path.name: b"".join(file.read_bytes() for file in sorted(path.glob("*.safetensors")))
        for path in sorted(folder.past_versions.iterdir())
    }


def test_a_killed_run_continues_with_the_same_versions_in_the_same_steps(workspace: Workspace, whole: RunFolder):
    killed = workspace.run_folder("killed")
    run = CliRun(["train", GSPO, *deterministic(workspace, "killed", *PAST)])
    try:
        kill_after_checkpoint(run, killed, 2)
    finally:
        run.close()
    succeed("train", GSPO, *deterministic(workspace, "killed", *PAST), "--resume", timeout_s=RUN_S)
    assert steps_without_times(killed) == steps_without_times(whole)
    assert exported(killed) == exported(whole)
    assert folders(killed) == folders(whole)
    # All checkpoints are kept, and each draws from the first version and its own.
    assert list(folders(whole)) == [f"step_{step:06d}" for step in range(5)]

    versions = set()
    for line in read_metrics(whole.metrics)[1:]:
        rows = rows_of(whole, line["step"])
        played = {row["metadata"]["roles"]["second"]["version"] for row in rows if row["metadata"]["num_turns"] > 1}
        assert played == {line["past/version"]}
        assert line["past/versions"] == min(line["step"], 2)
        versions |= played
        # What it says is not the policy's, whose log-probs the trainer computes again.
        assert {role for row in rows for role in row["role_rewards"]} == {"first"}
        assert line["mismatch/logprob_abs_mean"] < 1e-4
    assert len(versions) > 1


def test_what_an_older_version_says_is_what_an_engine_with_its_folder_says(
    workspace: Workspace, whole: RunFolder, tmp_path: Path
):
    loaded = load_recipe(GSPO, deterministic(workspace, "whole", *PAST))
    recipe = past_recipe(loaded.recipe)
    dialogue = load_episode_code(loaded, SandboxPool(recipe.agent.sandbox)).dialogues.of(())
    line = next(line for line in read_metrics(whole.metrics)[1:] if line["past/version"] > 0)
    rows = [row for row in rows_of(whole, line["step"]) if row["metadata"]["num_turns"] > 1]

    async def first_turns(engine: SglangEngine) -> list[str]:
        """What the engine says in place of the role's first turn, with the seeds of the run."""
        said = []
        for row in rows:
            conversation = PastConversation(
                [message for message in row["messages"] if message["conversation"] == "second"][:1],
                engine=engine,
                dialogue=dialogue,
                rollout=recipe.rollout,
                agent=recipe.agent,
                sampling=recipe.rollout.sampling,
                session_id=row["trajectory_id"],
                seed=derive_seed(recipe.seed, "trajectory", row["trajectory_id"]),
            )
            conversation.follow(1)
            await conversation.sample_turn()
            said.append(conversation.messages[-1]["content"])
        await engine.aclose()
        return said

    in_run = [[one for one in row["messages"] if one["conversation"] == "second"][1]["content"] for row in rows]
    folder = version_folder(whole.past_versions, int(line["past/version"]))
    with Fleet(recipe.rollout, folder, tmp_path, precision=recipe.trainer.precision) as fleet:
        assert asyncio.run(first_turns(SglangEngine(fleet.url, key=KEY))) == in_run
        control = SglangControl("engine 0", fleet.url, key=KEY, timeout_s=100)
        control.load_checkpoint(str(version_folder(whole.past_versions, 0)))
        assert asyncio.run(first_turns(SglangEngine(fleet.url, key=KEY))) != in_run
        control.close()


def test_a_tournament_plays_the_versions_of_a_run_against_each_other(whole: RunFolder):
    sampling = "rollout.eval_sampling.temperature=1"
    succeed("eval", "tournament", str(whole.path), "--games", "8", sampling, timeout_s=RUN_S)
    report = json.loads((whole.path / "tournament.json").read_text())
    assert report["anchor"] == "step_000000"
    assert {player["name"] for player in report["players"]} == set(folders(whole))
    assert len(report["pairs"]) == 10
    assert all(pair["wins"] + pair["draws"] + pair["losses"] == 8 for pair in report["pairs"])
    assert any(pair["wins"] or pair["losses"] for pair in report["pairs"])


def test_a_seat_of_kuhn_poker_is_an_older_version_s(workspace: Workspace):
    environment_python("open_spiel")  # skips where it is not installed
    data = workspace.path / "kuhn.jsonl"
    lines = [
        {
            "id": f"kuhn:{number}", "prompt": "Play the game.", "label": None,
            "metadata": {
                "game": "kuhn_poker", "seed": f"kuhn:{number}", "players": {f"player_{number % 2}": "past"},
            },
        }
        for number in range(8)
    ]  # fmt: skip
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = workspace.overrides(
        "run.name=kuhn", "steps=2", "reward.function=slimrl.rewards.environment:role_returns",
        f"data.train={data}", f"data.eval.heldout={data}", "agent.past_versions.every_steps=1",
        "agent.environment_args={illegal_moves: 1}", "eval.at_end=true",
    )  # fmt: skip
    succeed("train", str(RECIPES / "gspo_kuhn_poker.yaml"), *arguments, timeout_s=RUN_S)
    folder = workspace.run_folder("kuhn")
    steps = read_metrics(folder.metrics)[1:]
    assert [line["past/versions"] for line in steps] == [1, 2]
    assert all(line["rollout/failed_fraction"] == 0 for line in steps)
    asked = 0
    for line in steps:
        for row in rows_of(folder, line["step"]):
            older, own = (f"player_{(int(row['group_id'].partition(':')[2]) + place) % 2}" for place in range(2))
            roles = row["metadata"]["roles"]
            assert older not in row.get("role_rewards", {})
            assert roles.get(own, {"player": "policy"})["player"] == "policy"
            if older in roles:
                asked += 1
                assert (roles[older]["player"], roles[older]["version"]) == ("past", line["past/version"])
    assert asked
