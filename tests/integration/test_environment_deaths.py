"""A killed process of an environment that others made costs one trajectory of a training run, which goes on.

The engine is stopped while it is asked for the first turns. Then no episode that has begun can end, so the process that
is killed is in the middle of one.
"""

import json
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from broken_package import PROMPT, write_tasks
from cli_runs import RECIPES, SIZE, CliRun, num_logged_steps
from sandboxes import needs_namespaces
from slimrl_tools.environment.check import write_data
from slimrl_tools.toy.toy import write_toy
from slow_talk import end_turns
from venvs import environment_python

from slimrl.base.processes import send_all
from slimrl.environments.catalogue import entry_of
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

RUN_S = 400.0
PROMPTS, SAMPLES = 2, 3
EPISODES = PROMPTS * SAMPLES


def forked(run: CliRun) -> list[psutil.Process]:
    """Environments in processes of their own: children of the process that forks, which is the child of one that
    watches it, all with the same command line."""
    programs = run.members("isolation/bootstrap.py")
    pids = {program.pid for program in programs}
    forking = {program.pid for program in programs if program.ppid() in pids}
    return [program for program in programs if program.ppid() in forking]


def shells(run: CliRun) -> list[psutil.Process]:
    """Shell sessions of the sandbox."""
    return run.members("read -r -d '' code")


@dataclass(frozen=True, kw_only=True)
class Case:
    recipe: str
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the environment's data"""
    settings: tuple[str, ...] = ()
    processes: Callable[[CliRun], list[psutil.Process]] = forked
    """One of each episode, the oldest first"""


CASES = {
    "bfcl": Case(recipe="gspo_bfcl", options={"tasks": "generated"}),
    "textworld": Case(recipe="gspo_textworld", options={"theme": "basic"}),
    "textarena": Case(recipe="gspo_textarena", options={"games": "Nim-v0"}),
    "miniwob": Case(recipe="gspo_miniwob", options={"tasks": "click-test-2"}),
    "alfworld": Case(
        recipe="gspo_textworld",
        settings=(
            "agent.environment=slimrl.environments.alfworld.environment:AlfWorld",
            "agent.environment_venv=alfworld",
            "agent.environment_args={}",
        ),
    ),
    "software_repair": Case(
        recipe="gspo_textworld",
        settings=(
            "agent.environment=slimrl.environments.software_repair.environment:SoftwareRepair",
            "agent.environment_isolation=loop",
            "agent.environment_venv=''",
            "agent.sandbox.packages=[pytest]",
        ),
        processes=shells,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that ends its turns."""
    path = tmp_path_factory.mktemp("deaths") / "model"
    write_toy("qwen3_moe", path, replace(SIZE, max_position=2048), 0)
    end_turns(path)
    return path


@pytest.fixture
def temporary_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of the run's processes; short, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def make_data(name: str, folder: Path) -> list[str]:
    """Write the prompts, and skip the test where the environment is not installed; settings that name them."""
    if name != "software_repair":
        environment_python(name)
        write_data(entry_of(name), folder, num=PROMPTS, heldout=1, seed=0, options=CASES[name].options)
        return [f"data.train={folder / 'train.jsonl'}"]
    write_tasks(folder)
    task = {"messages": PROMPT.messages, "label": None, "metadata": PROMPT.metadata}
    lines = [{"id": str(number), **task} for number in range(PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"data.train={folder / 'train.jsonl'}", f"agent.environment_args={{folder: {folder}}}"]


def settings_of(name: str, model: Path, runs: Path) -> list[str]:
    return [
        f"run.dir={runs}",
        f"run.name={name}",
        f"model.path={model}",
        "steps=2",
        "data.eval.heldout=null",
        "eval.every_steps=0",
        "eval.at_start=false",
        "eval.at_end=false",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_failed_fraction={1 / EPISODES}",
        # One after another, so that some are left when the engine has stopped.
        "rollout.max_concurrency_per_engine=2",
        "rollout.max_trajectory_tokens=1536",
        "rollout.sampling.max_new_tokens=64",
        # The task's own reward is beyond a random model.
        "reward.function=toy_reward:low_tokens",
        "tracking.wandb=disabled",
        *CASES[name].settings,
    ]


def train_with_a_death(
    arguments: list[str], folder: RunFolder, processes: Callable[[CliRun], list[psutil.Process]]
) -> int:
    """Run to the end, and kill the process of one episode of the first step; its pid."""
    run, servers = CliRun(arguments), list[psutil.Process]()

    def has_begun() -> bool:
        """Whether the first step has. To look for the engine's processes takes as long as some episodes."""
        if num_logged_steps(folder) == 0:
            with suppress(AssertionError, psutil.NoSuchProcess):
                servers[:] = run.server_processes(0)
        return num_logged_steps(folder) == 1

    try:
        run.wait_until(has_begun, RUN_S, poll_s=0.005)
        send_all(servers, signal.SIGSTOP)
        run.wait_until(lambda: bool(processes(run)), 60.0)
        # What came back before the engine stopped may still end an episode.
        time.sleep(2.0)
        killed = processes(run)[0]
        killed.kill()
        run.signal_server(0, signal.SIGCONT)
        assert run.wait(RUN_S) == 0, run.stderr
        assert run.left() == []
    finally:
        run.close()
    return killed.pid


@pytest.mark.parametrize(
    "name",
    ["bfcl", *(pytest.param(name, marks=[pytest.mark.full, needs_namespaces]) for name in CASES if name != "bfcl")],
)
def test_a_killed_environment_costs_its_own_trajectory(name: str, model: Path, temporary_files: Path, tmp_path: Path):
    settings = [*settings_of(name, model, tmp_path / "runs"), *make_data(name, tmp_path / "data")]
    folder = RunFolder(tmp_path / "runs" / name)
    recipe = str(RECIPES / f"{CASES[name].recipe}.yaml")
    pid = train_with_a_death(["train", recipe, *settings], folder, CASES[name].processes)
    fractions = [
        (line["rollout/failed_fraction"], line["rollout/aborted_fraction"])
        for line in read_metrics(folder.metrics)
        if line["step"] > 0
    ]
    assert fractions == [(pytest.approx(1 / EPISODES), 0), (0, 0)]
    said = re.findall(
        r"WARNING slimrl.agent.episode_runner: step_000001/\S+: (.*)", folder.log_file("driver").read_text()
    )
    who = "the session was ended" if name == "software_repair" else f"its process {pid} was ended"
    assert len(said) == 1
    assert f"{who} by SIGKILL" in said[0]
    assert list(temporary_files.glob("slimrl-*")) == []
