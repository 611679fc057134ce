"""Copies of environments: in the same state as the first, independent of it, in every isolation."""

import asyncio
import importlib
import sys
import threading
from pathlib import Path

import psutil
import pytest
from integration import isolated_environments
from integration.isolated_environments import CopyingCounter
from slimrl_tools.environment.check import write_data
from venvs import environment_python

from slimrl.agent.environment import EnvironmentFailure, MakeEnvironment, Turn
from slimrl.agent.environment_host import EnvironmentHost
from slimrl.agent.isolation.server import EnvironmentServer
from slimrl.agent.isolation.thread_environment import ThreadEnvironment
from slimrl.config.schema.agent import AgentConfig
from slimrl.data.prompt import Prompt
from slimrl.data.prompts import read_prompts
from slimrl.environments.catalogue import entry_of

PROMPT = Prompt(prompt_id="p:1", messages=[{"role": "user", "content": "Count."}], label=None)
HERE = Path(sys.executable)
MODULE = "integration.isolated_environments"


def turn(text: str, index: int = 0) -> Turn:
    return Turn(index=index, text=text)


async def count_in_two_branches(make: MakeEnvironment) -> None:
    """The seed is 5; each turn adds 2, of both branches apart."""
    first = EnvironmentHost(make, AgentConfig(environment="the counter"))
    scratch: dict = {"begun": True}
    await first.start(PROMPT, seed=5, scratch=scratch)
    await first.step(turn("go on"))
    second = await first.branch()
    its_scratch = second.scratch
    assert its_scratch == {"begun": True, "count": 7}
    assert (await first.step(turn("go on"))).state_id == "9"
    assert (await first.step(turn("go on"))).state_id == "11"
    third = await second.branch()
    assert (await second.step(turn("go on"))).state_id == "9"
    assert (scratch["count"], its_scratch["count"]) == (11, 9)
    await first.close()
    both = await asyncio.gather(second.step(turn("go on")), third.step(turn("go on")))
    assert [observation.state_id for observation in both] == ["11", "9"]
    assert second.finished_report(3).states == ["5", "7", "9"]
    assert second.finished_report(3).rewards == [0.5, 0.5, 0.5]
    for host in (second, third):
        await host.close()


@pytest.mark.parametrize("name", ["CopyingCounter", "AsyncCopyingCounter", "Counter"])
async def test_a_copy_goes_on_by_itself_from_the_same_state(name):
    made: list = []

    def make():
        made.append(getattr(isolated_environments, name)(step_by=2))
        return made[-1]

    await count_in_two_branches(lambda: ThreadEnvironment(make))
    # One without `copy` was made again for each branch.
    assert len(made) == (3 if name == "Counter" else 1)
    server = EnvironmentServer(HERE, f"{MODULE}:{name}", {"step_by": 2}, 1.0)
    try:
        await count_in_two_branches(server)
    finally:
        server.close()


async def test_an_environment_in_the_event_loop_copies_itself():
    made: list = []

    def make():
        made.append(isolated_environments.AsyncCopyingCounter(step_by=2))
        return made[-1]

    await count_in_two_branches(make)
    assert len(made) == 1


async def test_copies_share_a_process_and_end_with_the_last_of_them():
    server = EnvironmentServer(HERE, f"{MODULE}:CopyingCounter", {}, 1.0)
    try:
        host = EnvironmentHost(server, AgentConfig())
        await host.start(PROMPT, seed=0, scratch={})
        other = await host.branch()
        pid = int(host.report.metrics["pid"])
        await host.close()
        assert (await other.step(turn("go on"))).state_id == "1"
        assert psutil.pid_exists(pid)
        third = await other.branch()
        with pytest.raises(EnvironmentFailure, match="was ended by SIGKILL"):
            await other.step(turn("die"))
        with pytest.raises(EnvironmentFailure, match="did not answer the request before"):
            await third.step(turn("go on"))
        for one in (other, third):
            await one.close()
        assert not psutil.pid_exists(pid)
    finally:
        server.close()


async def test_a_scratch_of_which_there_is_no_copy_is_no_hindrance_until_one_is_made():
    """A sub-agent begins with the scratch of its caller, in which a tool may keep a connection."""
    host = EnvironmentHost(isolated_environments.AsyncCopyingCounter, AgentConfig())
    await host.start(PROMPT, seed=0, scratch={"connection": threading.Lock()})
    await host.step(turn("1"))
    with pytest.raises(EnvironmentFailure, match="copy of its scratch raised TypeError"):
        await host.branch()
    await host.close()


async def test_one_that_cannot_copy_itself_now_takes_its_turns_again():
    made: list = []

    def make():
        made.append(CopyingCounter())
        return made[-1]

    host = EnvironmentHost(lambda: ThreadEnvironment(make), AgentConfig())
    await host.start(PROMPT, seed=0, scratch={})
    await host.step(turn("99"))
    other = await host.branch()
    assert len(made) == 2
    assert (await other.step(turn("go on"))).state_id == "100"
    for one in (host, other):
        await one.close()


async def test_an_image_crosses_the_socket_and_is_kept_and_no_other_bytes():
    server = EnvironmentServer(HERE, f"{MODULE}:Drawing", {}, 1.0)
    host = EnvironmentHost(server, AgentConfig(environment="my:Drawing"))
    try:
        await host.start(PROMPT, seed=0, scratch={})
        await host.step(turn("go on"))
        other = await host.branch()
        with pytest.raises(EnvironmentFailure, match="image must be the bytes of a PNG"):
            await host.step(turn("a photograph"))
        assert host.images == other.images == {1: b"\x89PNG\r\n\x1a\n..."}
        for one in (host, other):
            await one.close()
    finally:
        server.close()


async def test_a_copy_that_comes_too_late_is_closed_and_its_thread_ends():
    before = set(threading.enumerate())
    host = EnvironmentHost(
        lambda: ThreadEnvironment(isolated_environments.SlowCopies), AgentConfig(start_timeout_s=0.2)
    )
    await host.start(PROMPT, seed=0, scratch={})
    with pytest.raises(EnvironmentFailure, match=r"copy took longer than 0\.2 s"):
        await host.branch()
    await host.close()
    for _ in range(200):
        if isolated_environments.SlowCopies.closed == 2 and set(threading.enumerate()) <= before:
            break
        await asyncio.sleep(0.05)
    assert isolated_environments.SlowCopies.closed == 2
    assert set(threading.enumerate()) <= before


async def test_one_whose_turns_lead_elsewhere_cannot_be_copied():
    host = EnvironmentHost(lambda: ThreadEnvironment(isolated_environments.Clock), AgentConfig(environment="my:Clock"))
    await host.start(PROMPT, seed=0, scratch={})
    with pytest.raises(EnvironmentFailure, match=r"my:Clock cannot be copied: .* the same 0 turns"):
        await host.branch()
    await host.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bfcl", {}),
        ("textworld", {"rooms": 3, "objects": 6, "min_quest": 4, "quest": 5}),
        ("alfworld", {}),
        ("miniwob", {"tasks": "login-user"}),
    ],
)
async def test_a_solution_can_go_on_from_a_copy_of_an_environment_that_others_made(name, options, tmp_path):
    """Half of the solution is played once, the other half twice: with the same observations, and full reward."""
    python, entry = environment_python(name), entry_of(name)
    write_data(entry, tmp_path / "data", num=1, heldout=1, seed=0, options=options)
    (prompt,) = read_prompts(tmp_path / "data" / "train.jsonl")
    player = importlib.import_module(f"{entry.module}.players").Solver(prompt, 0)
    server = EnvironmentServer(python, entry.environment, {}, 5.0)
    try:
        host = EnvironmentHost(server, AgentConfig(environment=name))
        seen = [await host.start(prompt, seed=0, scratch={})]
        turns: list[Turn] = []
        branch, at = None, -1
        while not (seen[-1].done or seen[-1].truncated):
            turns.append(Turn(**vars(player.turn(seen[-1])) | {"index": len(turns)}))
            if len(turns) == 2:
                branch, at = await host.branch(), len(seen)
            seen.append(await host.step(turns[-1]))
        assert branch is not None
        again = [await branch.step(one) for one in turns[at - 1 :]]
        assert [(one.state_id, one.reward, list(one.messages)) for one in again] == [
            (one.state_id, one.reward, list(one.messages)) for one in seen[at:]
        ]
        assert sum(one.reward or 0.0 for one in seen) == pytest.approx(1.0)
        assert all(one.state_id is not None for one in seen)
        for one in (host, branch):
            await one.close()
    finally:
        server.close()
