"""Environments in threads, processes and virtual environments: the same answers, and what a dead one costs."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
import venv
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from scripted_episode import END, runner_of
from scripted_episode import played as played_by_script

from slimrl.agent.environment import EnvironmentFailure, Turn
from slimrl.agent.isolation.interpreter import call_elsewhere
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.agent.isolation.thread_environment import ThreadEnvironment
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_call import MalformedCall, ToolCall
from slimrl.agent.tools import ToolBox
from slimrl.config.schema.agent import AgentConfig, IsolationMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status
from slimrl.rollout.task.environment import load_environment
from slimrl.rollout.task.sandbox import check_sandbox

PROMPT = Prompt(prompt_id="p:1", messages=[{"role": "user", "content": "Count."}], label=None, metadata={"a": [1]})
COUNTER = "integration.isolated_environments:Counter"
CALLS = (ToolCall(name="f", arguments={"x": 1}, id="1"), MalformedCall(problem="no JSON", name="g"))


def server(
    path: str = COUNTER, python: Path = Path(sys.executable), close_s: float = 1.0, **arguments
) -> EnvironmentServer:
    return EnvironmentServer(python, path, arguments, close_s)


@asynccontextmanager
async def running(made: EnvironmentServer):
    try:
        yield made
    finally:
        made.close()


def turn(text: str, calls=()) -> Turn:
    return Turn(index=0, text=text, calls=calls)


def serving(pid: int) -> psutil.Process:
    """The process that forks, below the small one that watches it."""
    (child,) = psutil.Process(pid).children()
    return child


def children(pid: int) -> list[int]:
    """What the process that forks has started, in whatever generation."""
    return [child.pid for child in serving(pid).children(recursive=True)]


async def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


async def played(environment) -> list:
    scratch: dict = {}
    first = await environment.start(PROMPT, seed=5, scratch=scratch)
    second = await environment.step(turn("go on", CALLS))
    third = await environment.step(turn("end"))
    await environment.close()
    return [first.messages, first.state_id, second.messages, second.reward, second.state_id, third.done, scratch]


@pytest.mark.parametrize("name", ["Counter", "AsyncCounter"])
async def test_an_environment_does_the_same_in_a_thread_a_process_and_a_virtual_environment(name, tmp_path):
    from integration import isolated_environments

    make = getattr(isolated_environments, name)
    expected = [PROMPT.messages, "5", [{"role": "user", "content": f"7 {CALLS}"}], 0.5, "7", True, {"count": 9}]
    assert await played(ThreadEnvironment(lambda: make(step_by=2))) == expected
    async with running(server(f"integration.isolated_environments:{name}", step_by=2)) as process:
        assert await played(process()) == expected
    python = venv_with_websockets(tmp_path)
    async with running(server(f"integration.isolated_environments:{name}", python, step_by=2)) as process:
        assert await played(process()) == expected


def venv_with_websockets(folder: Path) -> Path:
    """A virtual environment that has what the server needs and nothing else."""
    import websockets

    venv.create(folder / "venv", symlinks=True)
    packages = folder / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "websockets").symlink_to(Path(websockets.__file__).parent)
    return folder / "venv" / "bin" / "python"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("die", "was ended by SIGKILL"),
        ("exit", "ended with exit code 3"),
        ("raise", "raised RuntimeError('as told')"),
    ],
)
async def test_an_environment_that_dies_costs_its_own_trajectory(text, said):
    async with running(server()) as process:
        lost, other = process(), process()
        for environment in (lost, other):
            await environment.start(PROMPT, seed=0, scratch={})
        with pytest.raises(EnvironmentFailure, match=said.replace("(", r"\(").replace(")", r"\)")):
            await lost.step(turn(text))
        await lost.close()
        assert (await other.step(turn("go on"))).state_id == "1"
        await other.close()


async def test_an_environment_that_is_killed_between_two_turns_says_so_at_the_next_one():
    async with running(server()) as process:
        environment = process()
        await environment.start(PROMPT, seed=0, scratch={})
        (child,) = children(process._process.pid)
        os.kill(child, signal.SIGKILL)
        await until(lambda: environment._process._socket._writer.transport.is_closing())
        with pytest.raises(EnvironmentFailure, match=f"step: its process {child} was ended by SIGKILL"):
            await environment.step(turn("go on"))
        await environment.close()


async def test_the_server_is_started_anew_when_it_has_ended():
    async with running(server()) as process:
        assert len(await played(process())) == 7
        first = process._process
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: first.exit_code is not None)
        assert len(await played(process())) == 7
        assert process._process.pid != first.pid


async def test_what_is_left_ends_when_the_process_that_forks_is_killed():
    async with running(server()) as process:
        environment = process()
        await environment.start(PROMPT, seed=0, scratch={})
        await environment.step(turn("spawn"))
        left = children(process._process.pid)
        assert len(left) == 2
        serving(process._process.pid).kill()
        await until(lambda: not any(map(psutil.pid_exists, left)) and process._process.exit_code is not None)
        with pytest.raises(EnvironmentFailure):
            await environment.step(turn("go on"))
        await environment.close()
        assert len(await played(process())) == 7


async def test_a_trajectory_that_gives_up_waiting_for_the_start_does_not_end_it_for_the_others():
    async with running(server("integration.isolated_environments:SlowCounter")) as process:
        first = asyncio.ensure_future(process().start(PROMPT, seed=0, scratch={}))
        await asyncio.sleep(0.3)
        others = [asyncio.ensure_future(played(process())) for _ in range(3)]
        await asyncio.sleep(0.1)
        first.cancel()
        assert all(len(one) == 7 for one in await asyncio.gather(*others))
        await process.aclose()


async def test_a_server_without_files_left_fails_the_next_trajectory_and_no_other():
    async with running(server()) as process:
        kept = process()
        await kept.start(PROMPT, seed=0, scratch={})
        pid = serving(process._process.pid).pid
        _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), most))
        late = asyncio.ensure_future(process().start(PROMPT, seed=0, scratch={}))
        await asyncio.sleep(0.5)
        assert (await kept.step(turn("go on"))).state_id == "1"
        assert not late.done()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        assert (await late).state_id == "0"
        await kept.close()


async def test_an_environment_that_hangs_is_killed_when_its_trajectory_is_over():
    async with running(server(close_s=0.5)) as process:
        environment = process()
        await environment.start(PROMPT, seed=0, scratch={})
        (child,) = children(process._process.pid)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.step(turn("hang")), 0.3)
        await environment.close()
        await until(lambda: not psutil.pid_exists(child), 5.0)


async def test_what_an_environment_started_ends_with_it_in_whatever_session_it_is():
    async with running(server()) as process:
        first, second = process(), process()
        for environment in (first, second):
            await environment.start(PROMPT, seed=0, scratch={})
            await environment.step(turn("spawn"))
        assert len(children(process._process.pid)) == 4
        await first.close()
        await until(lambda: len(children(process._process.pid)) == 2)
        assert (await second.step(turn("go on"))).state_id == "2"
        last = children(process._process.pid)
    await until(lambda: not any(map(psutil.pid_exists, last)))


async def test_what_a_class_shares_outlives_its_instances_and_ends_with_the_server():
    async with running(server("integration.isolated_environments:Sharing")) as process:
        pids = set()
        for _ in range(2):
            environment = process()
            pids.add((await environment.start(PROMPT, seed=0, scratch={})).metrics["pid"])
            own = children(process._process.pid)
            await environment.close()
            await until(lambda own=own: len(children(process._process.pid)) < len(own))
        (shared,) = pids
        assert children(process._process.pid) == [shared]
    await until(lambda: not psutil.pid_exists(int(shared)))


async def test_when_what_a_class_shares_ends_it_is_started_anew_with_the_server():
    async with running(server("integration.isolated_environments:Sharing")) as process:
        environment = process()
        shared = int((await environment.start(PROMPT, seed=0, scratch={})).metrics["pid"])
        first = process._process
        os.kill(shared, signal.SIGKILL)
        await until(lambda: first.exit_code is not None)
        with pytest.raises(EnvironmentFailure):
            await environment.step(turn("go on"))
        await environment.close()
        again = process()
        assert psutil.pid_exists(int((await again.start(PROMPT, seed=0, scratch={})).metrics["pid"]))
        await again.close()


async def test_environments_are_closed_and_end_with_their_server(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIMRL_TEST_CLOSED", str(tmp_path))
    async with running(server()) as process:
        environments = [process() for _ in range(40)]
        firsts = await asyncio.gather(*(one.start(PROMPT, seed=0, scratch={}) for one in environments))
        pids = {str(int(first.metrics["pid"])) for first in firsts}
        assert len(pids) == 40
        await asyncio.gather(*(one.close() for one in environments))
        assert set(os.listdir(tmp_path)) == pids
        pid = process._process.pid
        await until(lambda: not children(pid))
        folder = Path(process._folder.name)
    assert not psutil.pid_exists(pid)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("path", "arguments", "said"),
    [
        (COUNTER, {"step_by": 0}, "step_by is 0, not a positive number"),
        (COUNTER, {"steps": 1}, "cannot be made with steps"),
        ("integration.isolated_environments:Nothing", {}, "has no attribute 'Nothing'"),
        ("no_such_module:Nothing", {}, "No module named 'no_such_module'"),
        ("integration.isolated_environments:Turn", {}, "has no method start"),
    ],
)
def test_a_class_is_checked_where_it_will_run(path, arguments, said):
    with pytest.raises(ValueError, match=said):
        server(path, **arguments).check()
    server(step_by=1).check()


def recipe_with(**agent):
    return Recipe(agent=AgentConfig(environment=COUNTER, **agent))


async def test_a_recipe_says_where_its_environment_runs(tmp_path):
    python = venv_with_websockets(tmp_path)
    for settings in (
        {"environment_isolation": IsolationMode.thread},
        {"environment_isolation": IsolationMode.process},
        {"environment_isolation": IsolationMode.venv, "environment_venv": str(python.parents[1])},
    ):
        recipe = recipe_with(environment_args={"step_by": 3}, **settings)
        make = load_environment(recipe, ToolBox([]), SandboxPool(recipe.agent.sandbox))
        assert (await played(make()))[-1] == {"count": 11}
        if isinstance(make, EnvironmentServer):
            make.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "one with plain methods needs agent.environment_isolation"),
        ({"environment_isolation": IsolationMode.thread, "environment_args": {"step_by": 0}}, "not a positive number"),
        ({"environment_isolation": IsolationMode.process, "environment_args": {"step_by": 0}}, "not a positive number"),
        ({"environment_isolation": IsolationMode.venv, "environment_venv": "nowhere"}, "nor a folder with bin/python"),
    ],
)
def test_an_environment_that_cannot_run_where_it_should_is_refused(settings, said):
    recipe = recipe_with(**settings)
    with pytest.raises(ValueError, match=f"(?i){said}"):
        load_environment(recipe, ToolBox([]), SandboxPool(recipe.agent.sandbox))


def test_the_check_of_the_sandbox_imports_no_environment_of_another_interpreter():
    absent = AgentConfig(
        environment="slimrl.environments.bfcl.environment:BfclEnvironment",
        environment_isolation=IsolationMode.venv,
        environment_venv="bfcl",
    )
    check_sandbox(Recipe(agent=absent))
    assert "slimrl.environments.bfcl.environment" not in sys.modules


async def test_a_trajectory_whose_environment_dies_fails_with_its_cause_and_the_next_one_goes_on():
    agent = AgentConfig(environment=COUNTER, environment_isolation=IsolationMode.process)
    async with running(server()) as process:
        lost = await played_by_script(runner_of(f"go on{END}", f"die{END}", environment=process, agent=agent), PROMPT)
        kept = await played_by_script(runner_of(f"go on{END}", f"end{END}", environment=process, agent=agent), PROMPT)
    assert lost.status is Status.failed
    assert "was ended by SIGKILL" in lost.metadata["error"]
    assert kept.status is Status.completed
    assert kept.metadata["environment"]["rewards"] == [0.5, 0.5]
    assert len(set(kept.metadata["environment"]["states"])) == 2
    assert kept.scratch["count"] == int(kept.metadata["environment"]["states"][0]) + 2


def test_nothing_is_left_of_a_driver_that_is_killed(tmp_path):
    code = f"""
import asyncio, os, signal, sys
from pathlib import Path
from slimrl.agent.environment import Turn
from slimrl.agent.isolation.interpreter import call_elsewhere
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.data.prompt import Prompt

async def main():
    made = EnvironmentServer(Path(sys.executable), {COUNTER!r}, {{}}, 1.0)
    one = made()
    prompt = Prompt(prompt_id="p", messages=[{{"role": "user", "content": "x"}}], label=None)
    await one.start(prompt, seed=0, scratch={{}})
    await one.step(Turn(index=0, text="spawn"))
    print(made._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, timeout=60, check=False)
    supervisor = int(done.stdout)
    deadline = time.monotonic() + 15
    while psutil.pid_exists(supervisor) and psutil.Process(supervisor).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
    assert not [one for one in psutil.process_iter(["environ"]) if str(tmp_path) in str(one.info["environ"])]


def test_no_module_of_the_program_takes_the_place_of_a_package():
    call_elsewhere(Path(sys.executable), "integration.isolated_environments:find_neighbours", {}, 60.0)
