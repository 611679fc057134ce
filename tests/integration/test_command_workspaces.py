"""Where the command of a trajectory runs: folders and an environment of its own, and a sandbox around it."""

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_agents import ANSWER, PROMPT, ScriptedEngine, play, runner_of

from slimrl.agent.gateway.command_agent import CommandAgent
from slimrl.agent.gateway.workspace import INHERITED
from slimrl.config.schema.agent import AgentConfig, CommandSandboxConfig
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status
from slimrl.rollout.task.sandbox import check_command_sandbox

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PYTHON = os.path.realpath(sys.executable)
PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
TELL = """
import json, os, socket, subprocess, sys, time, urllib.request
from pathlib import Path
def tell(value):
    body = {"model": "m", "messages": [{"role": "user", "content": json.dumps(value)}]}
    head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    opener.open(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=60).close()
"""


def python(code: str, *, env: dict[str, str] | None = None, **sandbox: Any) -> CommandAgent:
    return CommandAgent(
        words=[PYTHON, "-c", TELL + code], host="127.0.0.1", env=env or {}, sandbox=CommandSandboxConfig(**sandbox)
    )


async def told(agent: CommandAgent) -> Any:
    """What the command tells the policy."""
    trajectory = await play(ScriptedEngine([ANSWER]), agent, trajectory_timeout_s=60.0, max_trajectory_tokens=8192)
    assert trajectory.status is Status.completed, trajectory.metadata
    return json.loads(trajectory.messages[0]["content"])


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which holds nothing else."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("isolated", [False, True])
async def test_folders_are_empty_at_first_and_gone_afterwards(isolated: bool, tmp: Path, tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    (kept / "file").write_text("mine")
    code = (
        "places = [os.getcwd(), os.environ['HOME'], os.environ['TMPDIR']]\n"
        "found = [os.listdir(one) for one in places]\n"
        "for place in places:\n"
        "    os.makedirs(place + '/a/b')\n"
        "    Path(place, 'a/b/file').write_text('x')\n"
        f"    os.symlink({str(kept)!r}, place + '/link')\n"
        f"    os.symlink({str(kept / 'file')!r}, place + '/file')\n"
        "    os.chmod(place + '/a/b', 0)\n"
        "    os.chmod(place + '/a', 0o500)\n"
        "tell([places, found])\n"
    )
    before = set(os.listdir())
    places, found = await told(python(code, enabled=isolated))
    assert len(set(places)) == 3
    assert found == [[], [], []]
    assert isolated == (places[0] == "/workspace/work")
    assert os.listdir(tmp) == []
    assert set(os.listdir()) == before
    assert (kept / "file").read_text() == "mine"
    assert kept.stat().st_mode & 0o777 == 0o755


async def test_the_environment_is_what_the_page_lists_and_what_the_recipe_names(monkeypatch: pytest.MonkeyPatch):
    for name in (*INHERITED, "HF_TOKEN", "PYTHONPATH", "https_proxy", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, f"/of/{name}")
    monkeypatch.setenv("PATH", os.pathsep.join(["bin", "/usr/bin"]))
    found = await told(python("tell(dict(os.environ))", env={"LANG": "C.UTF-8", "MY_SETTING": "3"}))
    section = PAGE.read_text().partition("## The agent")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([A-Za-z_]+)`", section))
    assert found.pop("MY_SETTING") == "3"
    assert set(found) <= listed, set(found) - listed
    assert set(INHERITED) <= listed
    assert found["PATH"] == f"{os.getcwd()}/bin:/usr/bin"
    assert (found["LANG"], found["TZ"]) == ("C.UTF-8", "/of/TZ")
    assert not {"HF_TOKEN", "PYTHONPATH", "https_proxy", "CUDA_VISIBLE_DEVICES"} & set(found)


async def test_so_many_commands_run_at_once_and_a_deadline_begins_with_its_command(tmp_path: Path):
    code = f"name = {str(tmp_path)!r} + '/' + str(os.getpid())\nbegun = time.time()\ntell(1)\ntime.sleep(1.5)\n"
    code += "Path(name).write_text(f'{begun} {time.time()}')\n"
    runner = runner_of(ScriptedEngine([ANSWER] * 4), python(code), trajectory_timeout_s=30.0)
    runner.config.command, runner.config.max_commands = "x", 2
    runner.__post_init__()
    await runner.start()
    sampling = SamplingConfig(max_new_tokens=64)
    start = time.monotonic()
    done = await asyncio.gather(
        *(runner.run(PROMPT, trajectory_id=f"t{i}", sampling=sampling, seed=i) for i in range(4))
    )
    await runner.stop()
    assert {one.status for one in done} == {Status.completed}
    assert time.monotonic() - start >= 3.0
    spans = [tuple(map(float, file.read_text().split())) for file in tmp_path.iterdir()]
    assert len(spans) == 4
    assert max(sum(begun <= other[0] < ended for begun, ended in spans) for other in spans) == 2


@pytest.fixture
def neighbour() -> Iterator[int]:
    """The port of another server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: [server.accept() for _ in range(2)], daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.parametrize("network", [False, True])
async def test_a_sandbox_has_the_gateway_and_nothing_else_of_the_network(network: bool, neighbour: int):
    code = (
        "try:\n"
        f"    socket.create_connection(('127.0.0.1', {neighbour}), timeout=5).close()\n"
        "    found = 'reached'\n"
        "except OSError as error:\n"
        "    found = str(error)\n"
        "tell(found)\n"
    )
    found = await told(python(code, enabled=True, network=network))
    assert found == ("reached" if network else "[Errno 111] Connection refused")


async def test_a_sandbox_shows_the_named_paths_alone_and_lets_no_one_write_there(tmp: Path, tmp_path: Path):
    for name in ("shown", "hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    code = (
        "def attempt(call):\n"
        "    try: return call()\n"
        "    except OSError as error: return type(error).__name__ + ' ' + str(error.errno)\n"
        f"shown, hidden = Path({str(tmp_path / 'shown/file')!r}), Path({str(tmp_path / 'hidden/file')!r})\n"
        "tell([attempt(shown.read_text), attempt(lambda: shown.write_text('x')), attempt(hidden.read_text),\n"
        "      attempt(lambda: Path('/usr/x').write_text('x')), attempt(lambda: Path('/x').write_text('x')),\n"
        f"      os.path.exists({__file__!r}), os.getuid(), os.path.expanduser('~'),\n"
        "      sum(name.isdigit() for name in os.listdir('/proc')) < 6])\n"
    )
    found = await told(python(code, enabled=True, paths=[str(tmp_path / "shown")]))
    assert found == [
        "shown", "OSError 30", "FileNotFoundError 2", "OSError 30", "OSError 30", False, 1000, "/workspace/home", True,
    ]  # fmt: skip


@pytest.mark.parametrize("ends", [True, False])
async def test_nothing_in_a_sandbox_outlives_it(ends: bool, tmp: Path):
    code = (
        "subprocess.Popen(['setsid', 'sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "tell(1)\n" + ("" if ends else "time.sleep(600)\n")
    )
    engine = ScriptedEngine([ANSWER])
    trajectory = await play(engine, python(code, enabled=True), trajectory_timeout_s=60.0 if ends else 5.0)
    assert trajectory.status is (Status.completed if ends else Status.aborted), trajectory.metadata
    await asyncio.sleep(0.3)
    sleeping = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "600"]]
    assert sleeping == []
    assert os.listdir(tmp) == []


async def test_a_program_that_the_sandbox_does_not_show_is_named(tmp_path: Path):
    agent = CommandAgent(words=[str(tmp_path / "agent")], host="127.0.0.1", sandbox=CommandSandboxConfig(enabled=True))
    trajectory = await play(ScriptedEngine([]), agent)
    assert trajectory.status is Status.failed
    assert f"{tmp_path}/agent cannot be started in the sandbox: [Errno 2]" in trajectory.metadata["error"]


def test_the_sandbox_of_a_command_is_tried_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_command_sandbox(AgentConfig(command=["/no/such/program"]))
    enabled = CommandSandboxConfig(enabled=True)
    check_command_sandbox(AgentConfig(command=["env"], command_sandbox=enabled))
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(ValueError, match=f"needs {program}, which the sandbox does not show"):
        check_command_sandbox(AgentConfig(command=[str(program)], command_sandbox=enabled))
    enabled.paths.append(str(tmp_path))
    check_command_sandbox(AgentConfig(command=[str(program)], command_sandbox=enabled))
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho no namespaces >&2; exit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ValueError, match="bwrap does not run here: no namespaces"):
        check_command_sandbox(AgentConfig(command=["env"], command_sandbox=enabled))
