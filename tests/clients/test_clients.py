"""Agents and frameworks as people use them, unchanged, before a scripted policy: `make test-clients`.

Each is the command of a trajectory. It has to be accepted with all its requests, to hand what the policy says to its
tools and back, and to leave the number of segments that the page's table has. The table is printed at the end.
"""

import json
import os
from importlib.metadata import distributions
from pathlib import Path

import pytest
from clients import AGENTS, CLIENTS, INSTALLED, Client
from gateway_agents import ScriptedEngine, assert_every_sample_is_trained_once, encode, play, trained

from slimrl.agent.gateway.command_agent import CommandAgent
from slimrl.config.schema.agent import CommandSandboxConfig, SkipConfig
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status, Trajectory

pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).parents[2] / "docs" / "gateway.md"
CONTEXT = 1_000_000
"""Tokens, of a tokenizer that makes many of them"""
VERSIONS = {
    **{one.name: one.version for one in distributions(path=[*map(str, INSTALLED.glob("python/lib/*/site-packages"))])},
    **json.loads((INSTALLED / "package.json").read_text())["dependencies"],
}
ROWS: dict[str, str] = {}


def policy(client: Client, asked: list[str]) -> ScriptedEngine:
    """Says the client's turns, and something else to its side requests."""
    turns = list(client.script)

    def answer(text: str) -> str:
        if any(one in text for one in client.aside):
            return "A title<|im_end|>"
        asked.append(text)
        return turns.pop(0) + "<|im_end|>" if turns else "There is no more to say.<|im_end|>"

    return ScriptedEngine(answer)


async def played(client: Client, engine: ScriptedEngine, sandbox: CommandSandboxConfig) -> Trajectory:
    path = [INSTALLED / "node_modules" / ".bin", INSTALLED / "python" / "bin", "/usr/local/bin", "/usr/bin", "/bin"]
    env = {"PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": str(AGENTS), **client.env}
    trajectory = await play(
        engine,
        CommandAgent(words=client.words, host="127.0.0.1", env=env, sandbox=sandbox),
        gateway={"skip": SkipConfig(system=list(client.aside))},
        sampling=SamplingConfig(max_new_tokens=4096),
        max_trajectory_tokens=CONTEXT,
        trajectory_timeout_s=240.0,
    )
    assert trajectory.status is Status.completed, trajectory.metadata
    assert "error" not in trajectory.metadata
    return trajectory


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_is_accepted_as_it_is(name: str):
    client, asked = CLIENTS[name], list[str]()
    engine = policy(client, asked)
    trajectory = await played(client, engine, CommandSandboxConfig())
    assert_turns(client, trajectory, asked)
    if not client.aside:
        assert_every_sample_is_trained_once(trajectory, engine)
    counts = trajectory.metadata["gateway"]
    ROWS[name] = (
        f"| {name} | {VERSIONS[client.package]} | {client.told} | {counts['requests']} | {counts['segments']} "
        f"| {counts['skipped'] or ''} |"
    )


@pytest.mark.parametrize("name", ["qwen-code", "Claude Code", "Codex", "opencode", "mini-swe-agent"])
async def test_a_coding_agent_runs_in_the_sandbox_as_well(name: str):
    client, asked = CLIENTS[name], list[str]()
    sandbox = CommandSandboxConfig(enabled=True, paths=[str(INSTALLED)])
    assert_turns(client, await played(client, policy(client, asked), sandbox), asked)


def assert_turns(client: Client, trajectory: Trajectory, asked: list[str]) -> None:
    """What is trained is what the policy said, in its order, and the client's tool has answered in between."""
    said = [token for turn in client.script for token in encode(turn + "<|im_end|>")]
    assert [token for tokens, _ in trained(trajectory) for token in tokens] == said
    assert len(trajectory.segments) == client.segments
    assert client.result in asked[-1].rpartition("<|im_start|>user")[2]


def test_the_page_has_the_table(capsys: pytest.CaptureFixture[str]):
    """It has the clients that ran: run all of them to see the whole of it."""
    head = ["| client | version | told | requests | segments | left out |", "|---|---|---|---|---|---|"]
    table = "\n".join([*head, *(ROWS[name] for name in CLIENTS if name in ROWS)])
    with capsys.disabled():
        print(f"\n{table}")
    assert set(ROWS) == set(CLIENTS)
    assert table in PAGE.read_text()
