"""Software repair by an agent's command (`agent.command_task`): its files, and what they earn."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from broken_package import BROKEN, HOOK, METADATA, PROMPT, REPAIR, SOUND, write_tasks
from gateway_agents import ScriptedEngine, runner_of
from sandboxes import needs_namespaces

from slimrl.agent.gateway.command_agent import CommandAgent
from slimrl.agent.sandbox.interface import FileChange
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import AgentConfig, CommandSandboxConfig, SandboxConfig
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status, Trajectory
from slimrl.environments.software_repair import working_copy
from slimrl.environments.software_repair.command_task import RepairTask
from slimrl.environments.software_repair.working_copy import changed_files, lost
from slimrl.rollout.task.environment import load_agent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PYTHON = os.path.realpath(sys.executable)
SHELL_AGENT = Path(__file__).parents[1] / "shell_agent.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("repair"))


@pytest.fixture
async def pool():
    made = SandboxPool(SandboxConfig(packages=["pytest"]))
    yield made
    await made.close()


async def played(pool: SandboxPool, folder: Path, *commands: str, turns: int = 9) -> tuple[Trajectory, ScriptedEngine]:
    config = AgentConfig(
        command=[PYTHON, str(SHELL_AGENT), "unread"],
        command_sandbox=CommandSandboxConfig(enabled=True),
        command_task="slimrl.environments.software_repair.command_task:RepairTask",
        command_task_args={"folder": str(folder), "reward": "partial"},
    )
    engine = ScriptedEngine([f"{command}<|im_end|>" for command in (*commands, "done")])
    agent = load_agent(config, pool)
    runner = runner_of(engine, agent, max_trajectory_tokens=100_000, max_turns=turns, trajectory_timeout_s=100.0)
    await runner.start()
    try:
        sampling = SamplingConfig(max_new_tokens=4096)
        return await runner.run(PROMPT, trajectory_id="t:1", sampling=sampling, seed=0), engine
    finally:
        await runner.stop()


@needs_namespaces
async def test_what_a_command_leaves_earns_what_it_would_in_the_environment(pool, folder):
    ways = {
        "repair": ([REPAIR, "rm -r tests"], 1.0),
        "nothing": ([], 0.0),
        "tests": ([f"cat > conftest.py <<'END'\n{HOOK}\nEND\ncp conftest.py tally; rm -r tests; mkdir tests"], 0.0),
        "other tests broken": (["printf 'def total(values):\\n    return 3\\n' > tally/__init__.py"], 0.5),
        "a link in place of the package": (["mv tally /tmp; ln -s /tmp/tally tally"], -0.5),
    }
    done = await asyncio.gather(*(played(pool, folder, *commands) for commands, _ in ways.values()))
    assert [one.status for one, _ in done] == [Status.completed] * len(ways)
    earned = {name: one.scratch["posted_reward"] for name, (one, _) in zip(ways, done, strict=True)}
    assert earned == {name: reward for name, (_, reward) in ways.items()}


@needs_namespaces
async def test_a_command_finds_neither_the_patch_nor_the_sound_package_nor_the_tests_that_catch_the_bug(pool, folder):
    secrets = "sum[(]values[)]|test_tota[l]"  # which this line does not hold itself
    look = f"ls . tests {folder}; grep -rlE '{secrets}' . /tmp /proc/*/cmdline /proc/*/environ 2> /dev/null"
    trajectory, _ = await played(pool, folder, look)
    told = trajectory.messages[-2]["content"]
    listed, _, rest = told.partition("tests:\ntest_mean.py\n")
    assert listed == "exit 1: .:\npytest.ini\ntally\ntests\n\n"
    assert rest == f"ls: cannot access '{folder}': No such file or directory\n"
    first = trajectory.messages[0]["content"]
    assert first.startswith("total([1, 2]) is 2\n\nThe current folder holds the package's code, without the tests")
    assert "submit" not in first


@needs_namespaces
async def test_a_repair_counts_though_the_turns_ran_out(pool, folder):
    trajectory, _ = await played(pool, folder, REPAIR, turns=1)
    assert (trajectory.status, trajectory.scratch) == (Status.truncated, {"posted_reward": 1.0})


async def test_what_a_task_raises_fails_its_trajectory(folder):
    class Broken:
        async def fill(self, line, work):
            raise LookupError("no such base")

        async def judge(self, work):
            return float("nan")

    class Unjudged(Broken):
        async def fill(self, line, work):
            return line

    for task, cause in ((Broken, "a:T raised LookupError('no such base')"), (Unjudged, "a:T raised ApiError")):
        agent = CommandAgent(words=["true"], host="127.0.0.1", make_task=task, task_path="a:T")
        runner = runner_of(ScriptedEngine([]), agent)
        await runner.start()
        try:
            failed = await runner.run(PROMPT, trajectory_id="t:1", sampling=SamplingConfig(), seed=0)
        finally:
            await runner.stop()
        assert failed.status is Status.failed
        assert failed.metadata["error"].startswith(cause)


@pytest.mark.parametrize("tests", ["hidden", "shown"])
async def test_the_command_s_folder_has_the_bug_and_its_line_nothing_that_tells_the_place(folder, tmp_path, tests):
    task = RepairTask(SandboxPool(SandboxConfig()), folder=str(folder), tests=tests)
    line = {"id": "tally-1", "messages": PROMPT.messages, "label": 3, "metadata": METADATA}
    given = await task.fill(line, tmp_path)
    assert given.keys() == {"id", "messages", "label", "metadata"}
    assert (given["label"], given["metadata"]) == (None, {})
    assert (tmp_path / "tally/__init__.py").read_text() == BROKEN
    assert (tmp_path / "tests/test_total.py").exists() == (tests == "shown")
    assert ("without the tests" in given["messages"][0]["content"]) == (tests == "hidden")


def test_of_a_copy_count_the_package_s_own_files_and_no_links_devices_or_too_much(folder, tmp_path, monkeypatch):
    base = folder / METADATA["base"]
    work = write_tasks(tmp_path) / METADATA["base"]
    package = work / "tally"
    (work / "sitecustomize.py").write_text("1")
    (work / "tests/test_mean.py").unlink()
    (package / "__init__.py").write_text(BROKEN)
    (package / "new.py").write_text("2")
    (package / "link.py").symlink_to("/etc/hostname")
    (package / "folder").symlink_to("/etc")
    (package / "folder.py").mkdir()
    os.mkfifo(package / "pipe.py")
    expected = {
        "tally/__init__.py": FileChange(before=SOUND.encode(), after=BROKEN.encode()),
        "tally/new.py": FileChange(before=None, after=b"2"),
    }
    assert changed_files(base, work, METADATA) == expected
    with (package / "huge.py").open("wb") as file:
        file.truncate(2**40)
    assert changed_files(base, work, METADATA) == lost(METADATA)
    (package / "huge.py").unlink()
    assert changed_files(base, work, METADATA) == expected
    monkeypatch.setattr(working_copy, "MAX_ENTRIES", 9)
    assert changed_files(base, work, METADATA) == lost(METADATA)


def test_a_task_s_arguments_are_those_of_the_environment():
    with pytest.raises(ValueError, match="make the tasks first"):
        RepairTask.check(folder="/none")
