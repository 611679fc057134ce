"""Episodes in processes of their own: what comes back, what one does to another, and that nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from slimrl_tools.toy.toy import ToySize, write_toy
from slimrl_tools.toy.toy_tokenizer import build_tokenizer
from worker_cases import NumberedEngine, SeededEngine, total

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.base.errors import RunError, StageError, StepDropped
from slimrl.config.load import LoadedRecipe
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutMode
from slimrl.data.engine import Engine
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory, to_json
from slimrl.engines.routing import RoutedEngines
from slimrl.engines.turn_logs import LoggedTurn
from slimrl.observability.progress import Progress
from slimrl.rewards.loading import Rewards
from slimrl.rollout.groups import Group
from slimrl.rollout.slots import Slots
from slimrl.rollout.stage import RolloutStage
from slimrl.rollout.task.episodes import load_episode_code
from slimrl.runtime.cluster.episode_workers import EpisodeWorkers
from slimrl.runtime.cluster.ray_cluster import ray_cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(None, num_slots=1):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("workers") / "toy"
    write_toy("qwen3_moe", path, ToySize(hidden=32, layers=1), seed=0)
    return path


def recipe_of(model: Path, folder: Path, workers: int, **rollout) -> Recipe:
    recipe = Recipe(steps=1)
    recipe.model.path = str(model)
    recipe.agent.workers = workers
    recipe.agent.environment, recipe.agent.environment_args = "worker_cases:Played", {"folder": str(folder)}
    recipe.rollout.max_turns, recipe.rollout.samples_per_prompt = 5, 1
    recipe.rollout.num_engines, recipe.rollout.max_trajectory_tokens = 1, 512
    recipe.rollout.max_failed_fraction = 1.0
    for name, value in rollout.items():
        setattr(recipe.rollout, name, value)
    return recipe


@contextmanager
def stage_of(recipe: Recipe, logs: Path, engine: Engine | None = None) -> Iterator[RolloutStage]:
    before = worker_processes()
    engine = engine or SeededEngine(build_tokenizer().eos_token_id)
    loaded = LoadedRecipe(recipe=recipe, provenance={"agent.environment": "made.yaml:7"}, path="", command="rollout")
    workers = EpisodeWorkers(loaded, engine, logs) if recipe.agent.workers > 1 else None
    sandbox = SandboxPool(recipe.agent.sandbox)
    task = SimpleNamespace(
        sandbox=sandbox,
        episode_runner=lambda *of: load_episode_code(loaded, sandbox).episode_runner(*of),
        rewards=Rewards(function=total),
        roles=(),
    )
    with (
        Progress(1) as progress,
        RolloutStage(
            recipe, task, engine, progress, watch=lambda: None, flush_caches=lambda: None, workers=workers
        ) as stage,
    ):
        yield stage
    assert psutil.wait_procs(worker_processes() - before, timeout=10)[1] == []


def worker_processes(parent: int | None = None) -> set[psutil.Process]:
    """Those of all stages that a process has."""
    found = set()
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):  # one that ends just now
            if "EpisodeWorker" in " ".join(child.cmdline()):
                found.add(child)
    return found


def prompts(*labels: str) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{number}", messages=[], label=label) for number, label in enumerate(labels)]


def play(stage: RolloutStage, *labels: str, step: int = 1) -> list[Trajectory]:
    return stage.rollout(prompts(*labels), label=f"step_{step:06d}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Has a file for each open environment of the stage."""
    return tmp_path_factory.mktemp("open")


@pytest.fixture(scope="module")
def recipe(model, folder) -> Recipe:
    return recipe_of(model, folder, 2, max_concurrency_per_engine=12)


@pytest.fixture(scope="module")
def stage(recipe, tmp_path_factory) -> Iterator[RolloutStage]:
    with stage_of(recipe, tmp_path_factory.mktemp("logs")) as stage:
        yield stage


def wait_until_closed(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while list(folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_workers_give_the_trajectories_of_the_driver_itself(model, stage, folder, tmp_path):
    together = play(stage, *["plays"] * 12)
    with stage_of(recipe_of(model, tmp_path, 1, max_concurrency_per_engine=5), tmp_path) as alone_stage:
        alone = play(alone_stage, *["plays"] * 12)
    assert [to_json(one) for one in together] == [to_json(one) for one in alone]
    assert {one.status for one in alone} == {Status.completed}
    assert all(one.reward == one.scratch["total"] > 0 for one in together)
    assert {one.scratch["pid"] for one in alone} == {os.getpid()}
    assert {one.scratch["pid"] for one in together} == {worker.pid for worker in worker_processes()}
    assert list(folder.iterdir()) == list(tmp_path.iterdir()) == [], "each environment was closed"


@pytest.mark.full
def test_workers_ask_the_engines_that_may_serve_now_also_after_a_worker_was_started_again(model, folder, tmp_path):
    def numbers(trajectories: list[Trajectory]) -> set[int]:
        """Numbers of the engines that served the turns."""
        turns = [(s.tokens, s.loss_mask) for t in trajectories for s in t.segments]
        return {int(tokens[i]) for tokens, mask in turns for i in range(1, len(tokens)) if mask[i] and not mask[i - 1]}

    engines = RoutedEngines(partial(NumberedEngine, build_tokenizer().eos_token_id), ["301"])
    with stage_of(recipe_of(model, folder, 2, max_concurrency_per_engine=12), tmp_path, engines) as stage:
        assert numbers(play(stage, *["plays"] * 6)) == {301}
        engines.use(["302"])
        assert numbers(play(stage, *["plays"] * 6)) == {302}
        for worker in worker_processes():
            worker.kill()
            worker.wait(10)
        engines.use(["303"])
        assert numbers(play(stage, *["plays"] * 6)) == {303}
    engines.use(["304"])


async def cut_off(stage: RolloutStage, names: list[str]) -> dict[str, list[LoggedTurn]]:
    """The turns of episodes that wait after their second one, once they do; then they are cancelled."""
    waiting = Group(number=0, prompt=prompts("waits")[0], ids=names)
    group = asyncio.create_task(stage.run_groups([waiting], Slots(4)))
    logs: dict[str, list[LoggedTurn]] = {}
    async with asyncio.timeout(60):
        while {len(turns) for turns in logs.values()} != {2}:
            await asyncio.sleep(0.05)
            logs = await stage.turns()
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)
    assert await stage.turns() == {}
    return logs


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_episodes_that_were_cut_off_go_on_with_their_turns_wherever_they_run(model, tmp_path, workers):
    recipe = recipe_of(model, tmp_path, workers, mode=RolloutMode.async_)
    names = ["group_00000000/000", "group_00000000/001"]
    with stage_of(recipe, tmp_path / "logs") as stage:
        logs = stage.run(cut_off(stage, names))
    group = Group(number=0, prompt=prompts("plays")[0], ids=names)

    async def go_on() -> None:
        await stage.run_groups([group], Slots(4), saved=logs)
        assert await stage.turns() == {}

    engine = SeededEngine(build_tokenizer().eos_token_id, version=2)
    with stage_of(recipe, tmp_path / "logs", engine) as stage:
        stage.run(go_on())
    for name in names:
        [segment] = group.done[name].segments
        known = [token for turn in logs[name] for answer in turn.answers for token in answer.tokens]
        sampled, versions = segment.tokens[segment.loss_mask], segment.weight_versions[segment.loss_mask]
        assert sampled[: len(known)].tolist() == known
        assert versions.tolist() == [1] * len(known) + [2] * (len(sampled) - len(known))
        assert len(sampled) > len(known)
        assert group.done[name].metadata["num_replayed_tokens"] == len(known)


@pytest.mark.full
def test_an_environment_that_blocks_holds_up_the_episodes_of_its_own_worker_alone(stage):
    stage.take_lags()
    blocked, awake = play(stage, "blocks", "is awake", step=2)
    assert blocked.status is awake.status is Status.completed
    assert blocked.scratch["pid"] != awake.scratch["pid"]
    assert awake.scratch["latest_s"] < 1.0
    assert 1.5 < max(stage.take_lags()) < 10
    play(stage, "is awake", step=3)
    assert max(stage.take_lags()) < 1.5, "of the last rollout alone"


def test_a_killed_worker_fails_its_episodes_and_is_started_again(stage, folder):
    killed, other, beside, third = play(stage, "is killed", "plays", "waits", "plays", step=4)
    assert [one.status for one in (killed, beside)] == [Status.failed] * 2
    assert killed.metadata["error"] == beside.metadata["error"]
    assert (
        "episode worker 0 has ended, without an error in its log; it may have been killed" in killed.metadata["error"]
    )
    assert [one.status for one in (other, third)] == [Status.completed] * 2
    for file in folder.iterdir():
        file.unlink()  # a killed environment closes nothing
    again = play(stage, "plays", "plays", step=5)
    assert [one.status for one in again] == [Status.completed] * 2
    assert other.scratch["pid"] == again[1].scratch["pid"] != again[0].scratch["pid"]


def test_a_scratch_that_cannot_be_sent_fails_its_trajectory(stage):
    function, unreadable, plain = play(stage, "keeps a function", "keeps what cannot be read", "plays", step=6)
    assert "scratch cannot be sent to the driver" in function.metadata["error"]
    assert "scratch cannot be read in the driver" in unreadable.metadata["error"]
    assert plain.status is Status.completed


def test_a_cancelled_rollout_closes_the_environments(stage, folder, monkeypatch):
    def cancel_once_open() -> None:
        if len(list(folder.iterdir())) == 3:
            raise StepDropped("enough")

    monkeypatch.setattr(stage, "check", cancel_once_open)
    with pytest.raises(StepDropped):
        play(stage, *["waits"] * 3, step=7)
    wait_until_closed(folder)


def test_lost_episodes_count_for_the_fraction_that_may_fail(stage, recipe, folder, monkeypatch):
    monkeypatch.setattr(recipe.rollout, "max_failed_fraction", 0.4)
    with pytest.raises(RunError, match=r"1 of 2 .*episode worker . has ended"):
        play(stage, "is killed", "plays", step=8)


@pytest.mark.full
def test_a_worker_that_is_blocked_for_good_is_ended(model, tmp_path, monkeypatch):
    monkeypatch.setattr("slimrl.runtime.cluster.episode_workers.GRACE_S", 0.5)
    recipe = recipe_of(model, tmp_path, 2, trajectory_timeout_s=2.0)
    recipe.agent.start_timeout_s, recipe.agent.start_retries, recipe.agent.close_timeout_s = 1.0, 0, 0.5
    with stage_of(recipe, tmp_path / "logs") as stage:
        blocked, other = play(stage, "blocks for good", "plays")
        assert "did not answer within 4.5 s, so code that does not await blocks it" in blocked.metadata["error"]
        assert other.status is Status.completed
        assert play(stage, "plays", step=2)[0].status is Status.completed


@pytest.mark.full
def test_an_episode_that_waits_for_a_place_goes_to_the_new_worker_and_not_to_the_one_that_was_ended(
    model, tmp_path, monkeypatch
):
    monkeypatch.setattr("slimrl.runtime.cluster.episode_workers.GRACE_S", 0.5)
    recipe = recipe_of(model, tmp_path, 2, trajectory_timeout_s=2.0, max_concurrency_per_engine=1)
    recipe.agent.start_timeout_s, recipe.agent.start_retries, recipe.agent.close_timeout_s = 1.0, 0, 0.5
    with stage_of(recipe, tmp_path / "logs") as stage:
        blocked, other = play(stage, "blocks for good", "plays")
    assert blocked.status is Status.failed
    assert other.status is Status.completed, other.metadata


@pytest.mark.parametrize(
    ("name", "said"),
    [("Gone", "made.yaml:7: agent.environment: worker_cases:Gone"), ("Broken", "KeyError: 'no such table'")],
)
def test_a_worker_that_cannot_load_the_task_stops_the_start_with_its_cause(model, tmp_path, name: str, said: str):
    recipe = recipe_of(model, tmp_path, 2)
    recipe.agent.environment = f"worker_cases:{name}"
    recipe.rollout.startup_timeout_s = 60.0
    before = worker_processes()
    with pytest.raises(StageError, match=rf"episode worker [01]: .*{said}"), stage_of(recipe, tmp_path / "logs"):
        pass
    assert psutil.wait_procs(worker_processes() - before, timeout=10)[1] == []


DRIVER = """
import sys
from pathlib import Path
from test_episode_workers import play, ray_cluster, recipe_of, stage_of
model, folder = map(Path, sys.argv[1:])
with ray_cluster(None, num_slots=1), stage_of(recipe_of(model, folder, 2), folder / "logs") as stage:
    play(stage, "blocks for good", "waits")
"""


@pytest.mark.full
def test_workers_end_with_a_driver_that_is_killed(model, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(model), str(folder)], env=env)
    try:
        deadline = time.monotonic() + 120
        while len([file for file in folder.iterdir() if file.is_file()]) < 2:
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = worker_processes(driver.pid)
        assert len(workers) == 2
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait(10)
    assert psutil.wait_procs(workers, timeout=20)[1] == []
