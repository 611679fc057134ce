"""Agents that are commands: what they are given, how they fail, and that nothing of them is left."""

import asyncio
import errno
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from gateway_agents import (
    ANSWER,
    CALL,
    PROMPT,
    ScriptedEngine,
    assert_every_sample_is_trained_once,
    encode,
    play,
    runner_of,
    trained,
)

from slimrl.agent.gateway import workspace
from slimrl.agent.gateway.command_agent import CommandAgent
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status, Trajectory

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SCRIPT = EXAMPLES / "calculator_agent.py"


def python(code: str) -> CommandAgent:
    return CommandAgent(words=[sys.executable, "-c", code], host="127.0.0.1")


async def run(agent: CommandAgent, *script: object, timeout_s: float = 60.0) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(list(script))
    return await play(engine, agent, trajectory_timeout_s=timeout_s), engine


async def test_an_unmodified_script_acts_and_the_proxy_of_the_environment_is_passed_by(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    agent = CommandAgent(words=[sys.executable, str(SCRIPT)], host="127.0.0.1")
    trajectory, engine = await run(agent, CALL, ANSWER)
    assert trajectory.status is Status.completed, trajectory.metadata
    assert [tokens for tokens, _ in trained(trajectory)] == [encode(CALL) + encode(ANSWER)]
    assert [one["role"] for one in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2]["content"] == "580"
    assert_every_sample_is_trained_once(trajectory, engine)


ASK = """
import json, os, sys, urllib.request
def post(url, body, key=os.environ["OPENAI_API_KEY"]):
    head = {"authorization": "Bearer " + key}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(urllib.request.Request(url, json.dumps(body).encode(), head)))
def ask(text):
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                {"model": "m", "messages": [{"role": "user", "content": text}]})
"""


async def test_the_data_line_comes_on_stdin_and_the_environment_has_addresses_and_keys():
    code = ASK + (
        "line = json.loads(sys.stdin.read())\n"
        "env = {name: value for name, value in os.environ.items() if name.startswith(('OPENAI', 'ANTHROPIC'))}\n"
        "assert env['OPENAI_BASE_URL'] == env['ANTHROPIC_BASE_URL'] + '/v1'\n"
        "assert env['OPENAI_API_KEY'] == env['ANTHROPIC_API_KEY']\n"
        "key = os.read(int(os.environ['SLIMRL_REWARD_FD']), 100).decode().strip()\n"
        "assert key != env['OPENAI_API_KEY']\n"
        "ask(json.dumps([line['id'], line['label'], line['metadata'], line['messages']]))\n"
        "print('x' * 10_000_000)\n"
        "post(os.environ['SLIMRL_REWARD_URL'], {'reward': 0.5}, key)\n"
    )
    trajectory, _ = await run(python(code), ANSWER)
    assert trajectory.status is Status.completed, trajectory.metadata
    said = '["p:1", 580, {"level": 2}, [{"role": "user", "content": "Compute 34*17+2."}]]'
    assert trajectory.messages[0]["content"] == said
    assert trajectory.scratch == {"posted_reward": 0.5}


async def test_a_data_line_may_be_long_and_need_not_be_read(monkeypatch: pytest.MonkeyPatch):
    long = {"text": "x" * 1_000_000}
    monkeypatch.setattr("gateway_agents.PROMPT", replace(PROMPT, metadata=long))
    whole = "line = json.load(sys.stdin); ask(str(len(line['metadata']['text'])) + sys.stdin.read())"
    for code, said in ((whole, "1000000"), ("ask('unread')", "unread"), ("sys.stdin.read(9); ask('some')", "some")):
        trajectory, _ = await run(python(ASK + code), ANSWER)
        assert trajectory.status is Status.completed, trajectory.metadata
        assert trajectory.messages[0]["content"] == said


async def test_another_exit_code_fails_the_trajectory_with_the_end_of_stderr_and_stdout(
    caplog: pytest.LogCaptureFixture,
):
    code = ASK + "ask('x'); sys.stderr.write('y' * 100_000 + 'the cause'); print('z' * 100_000 + 'more'); sys.exit(3)"
    trajectory, _ = await run(python(code), ANSWER)
    assert trajectory.status is Status.failed
    error = trajectory.metadata["error"]
    assert error.startswith(f"{sys.executable} ended with exit code 3; its stderr ends: yyy")
    assert "yyythe cause; its stdout ends: zzz" in error
    assert error.endswith("zzzmore")
    assert len(error) < 5000
    assert len(trajectory.segments) == 1
    assert (caplog.text.count("the cause"), caplog.text.count("zzzmore")) == (1, 1)
    silent, _ = await run(python("import os; os.kill(os.getpid(), 9)"))
    assert "exit code -9, and wrote nothing to stderr or stdout" in silent.metadata["error"]
    absent, _ = await run(CommandAgent(words=["/no/such/program"], host="127.0.0.1"))
    assert "cannot be started" in absent.metadata["error"]
    assert "Traceback" not in caplog.text


async def test_what_an_agent_said_that_asked_nothing_stands_in_the_cause():
    trajectory, _ = await run(python("print('please log in first')"))
    assert trajectory.status is Status.failed
    assert "asked the policy nothing" in trajectory.metadata["error"]
    assert trajectory.metadata["error"].endswith("its stdout ends: please log in first")


async def test_a_refusal_that_ends_an_agent_stands_before_its_last_words():
    code = ASK.replace('"messages"', '"top_logprobs": 3, "messages"') + "ask('x')"
    trajectory, _ = await run(python(code))
    assert trajectory.status is Status.failed
    assert "exit code 1; its stderr ends: Traceback" in trajectory.metadata["error"]
    assert "POST /v1/chat/completions was refused with 400: " in trajectory.metadata["error"]


def children() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("ends", [True, False])
async def test_nothing_of_a_command_is_left(ends: bool, tmp_path: Path):
    pids, before = tmp_path / "pids", children()
    code = ASK + (
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "ask('x')\n" + ("" if ends else "ask('y')\n")
    )
    start = time.monotonic()
    trajectory, engine = await run(python(code), *([ANSWER] if ends else [ANSWER, 600.0]), timeout_s=30 if ends else 6)
    assert trajectory.status is (Status.completed if ends else Status.aborted), trajectory.metadata
    assert engine.cancelled == (0 if ends else 1)
    assert len(trajectory.segments) == 1
    assert time.monotonic() - start < 29
    parent, child = map(int, pids.read_text().split())
    await asyncio.sleep(0.2)
    assert children() == before
    assert not any(alive(pid) for pid in (parent, child))


async def test_the_removal_of_a_workspace_is_no_part_of_the_trajectory_s_time(monkeypatch: pytest.MonkeyPatch):
    def remove(root: Path) -> None:
        sessions.append(len(runner.server._sessions))
        time.sleep(4)
        shutil.rmtree(root)

    sessions = list[int]()
    monkeypatch.setattr(workspace, "_remove", remove)
    agent = CommandAgent(words=["sh", "-c", "exit 0"], host="127.0.0.1")
    runner = runner_of(ScriptedEngine([]), agent, trajectory_timeout_s=4)
    await runner.start()
    trajectory = await runner.run(PROMPT, trajectory_id="t:1", sampling=SamplingConfig(), seed=1)
    await runner.stop()
    assert trajectory.metadata["error"].startswith("the agent asked the policy nothing; sh ended with exit code 0")
    assert sessions == [0]
    assert trajectory.measured["step_s"] < 4


async def test_a_group_is_killed_while_its_number_is_still_its_own(monkeypatch: pytest.MonkeyPatch):
    def kill(group: int, number: int) -> None:
        states.append(psutil.Process(group).status())
        killed(group, number)

    states, killed = list[str](), os.killpg
    monkeypatch.setattr(os, "killpg", kill)
    trajectory, _ = await run(python(ASK + "ask('x')"), ANSWER)
    assert trajectory.status is Status.completed, trajectory.metadata
    assert states == [psutil.STATUS_ZOMBIE]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_command_that_reads_nothing_and_keeps_its_stderr_open_ends():
    code = ASK + "ask('x'); os.setpgrp() if os.fork() == 0 and __import__('time').sleep(1) else None"
    trajectory, _ = await run(python(code), ANSWER)
    assert trajectory.status is Status.completed, trajectory.metadata


async def test_files_of_the_gateway_are_closed():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await run(python(ASK + "ask('x')"), ANSWER)
    await asyncio.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


async def test_a_command_for_which_no_file_is_left_fails_alone(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("slimrl.agent.gateway.output_tail.os.pipe", refuse)
    trajectory, _ = await run(python(""))
    assert trajectory.status is Status.failed
    assert "Too many open files" in trajectory.metadata["error"]


@pytest.mark.parametrize(("sign", "reward"), [("+", 1.0), ("*", 0.0)])
async def test_the_example_of_a_repository_writes_it_and_posts_whether_it_passes(sign: str, reward: float):
    code = ASK + (
        "assert sys.stdin.read() == ''\n"
        "assert sorted(os.listdir()) == ['calc.py', 'tests'] and os.listdir('tests') == ['note.txt']\n"
        "said = ask(sys.argv[1] + open('calc.py').read())['choices'][0]['message']['content']\n"
        "open('calc.py', 'w').write(said)\n"
    )
    files = {"calc.py": "def add(a, b):\n    return a - b\n", "tests/note.txt": "None yet.\n"}
    task = {"files": files, "check": "from calc import add\nassert add(2, 3) == 5\n"}
    prompt = replace(PROMPT, metadata=task)
    words = [sys.executable, str(EXAMPLES / "repository_agent.py"), sys.executable, "-c", code, "PROMPT"]
    engine = ScriptedEngine([f"def add(a, b): return a {sign} b<|im_end|>"])
    runner = runner_of(engine, CommandAgent(words=words, host="127.0.0.1"), trajectory_timeout_s=60.0)
    await runner.start()
    try:
        sampling = SamplingConfig(max_new_tokens=64)
        trajectory = await runner.run(prompt, trajectory_id="t:1", sampling=sampling, seed=11)
    finally:
        await runner.stop()
    assert trajectory.status is Status.completed, trajectory.metadata
    assert trajectory.scratch["posted_reward"] == reward
    assert trajectory.messages[0]["content"] == PROMPT.messages[0]["content"] + files["calc.py"]
