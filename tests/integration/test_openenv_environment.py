"""Environments of a real server of OpenEnv, which runs in an environment of its own."""

import asyncio
import subprocess
from functools import partial
from pathlib import Path

import pytest
from listening import wait_for_port
from own_venv import own_venv
from scripted_episode import END, PROMPT, call_text, played, runner_of, told

from slimrl.agent.adapters.openenv import OpenEnvEnvironment
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolBox
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status
from slimrl.engines.servers.ports import free_port
from slimrl.rewards.environment import environment_return
from slimrl.rollout.task.environment import load_environment

pytestmark = pytest.mark.integration

ENVIRONMENT = "slimrl.agent.adapters.openenv:OpenEnvEnvironment"
TWO_SESSIONS = "2"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):
    python = own_venv(tmp_path_factory.mktemp("openenv"), "openenv-core==0.3.0")
    port = free_port()
    server = Path(__file__).parents[1] / "openenv_word_server.py"
    process = subprocess.Popen([python, server, str(port), TWO_SESSIONS])
    try:
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def prompt_of(**metadata) -> Prompt:
    return Prompt(prompt_id="p", messages=PROMPT.messages, label=None, metadata=metadata)


def runner(arguments: dict, *texts: str):
    agent = AgentConfig(environment=ENVIRONMENT, environment_args=arguments, start_retries=0)
    return runner_of(*texts, environment=partial(OpenEnvEnvironment, **arguments), agent=agent)


@pytest.mark.full
def test_texts_are_actions_and_the_last_one_ends_the_episode(url):
    arguments = {"url": url, "action_field": "letter", "observation_field": "shown"}
    texts = [f"{letters}{END}" for letters in ("x", "c", "ch", "e", "r", "y", "h")]
    trajectory = asyncio.run(played(runner(arguments, *texts), prompt_of(seed=2)))
    assert trajectory.status is Status.completed
    said = told(trajectory, "user")
    assert said == [
        "Begin.\n\n______", "______", "c_____",
        "Invalid action: letter: String should have at most 1 character",
        "c_e___", "c_err_", "c_erry",
    ]  # fmt: skip
    assert trajectory.metadata["environment"]["rewards"] == [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert trajectory.metadata["environment"]["metrics"] == {"invalid_actions": 1.0}
    assert environment_return(trajectory, PROMPT) == 5.0
    assert trajectory.metadata["environment"]["states"][:3] == ["______", "______", "c_____"]


@pytest.mark.full
def test_calls_of_a_tool_are_actions_and_wrong_ones_are_answered(url):
    texts = [
        call_text("act", letter="a"), call_text("act", lettre="a"), call_text("eat", letter="a"),
        call_text("act", letter="b"),
    ]  # fmt: skip
    trajectory = asyncio.run(played(runner({"url": url}, *texts), prompt_of(reset_options={"word": "ab"})))
    assert trajectory.status is Status.completed
    assert told(trajectory, "user") == ['Begin.\n\n{"shown": "__", "left": 5}']
    assert told(trajectory, "tool") == [
        '{"shown": "a_", "left": 5}',
        "error: malformed tool call: arguments: Additional properties are not allowed ('lettre' was unexpected)",
        "error: unknown tool eat; known: act",
    ]
    assert trajectory.metadata["environment"]["rewards"] == [1.0, 0.0, 0.0, 1.0]
    assert trajectory.metadata["tool_calls"]["act"] == {"calls": 3, "errors": 1, "malformed": 1}


@pytest.mark.full
def test_an_environment_that_raises_fails_the_trajectory_with_its_words(url):
    arguments = {"url": url, "action_field": "letter", "observation_field": "shown"}
    trajectory = asyncio.run(played(runner(arguments, f"!{END}"), prompt_of(seed=2)))
    assert trajectory.status is Status.failed
    assert "the dictionary burns" in trajectory.metadata["error"]


@pytest.mark.full
def test_a_start_waits_for_a_session_of_a_full_server(url):
    arguments = {"url": url, "action_field": "letter"}

    async def five():
        async def one():
            return await played(runner(arguments, *[f"{letter}{END}" for letter in "zzwvu"]), prompt_of(seed=0))

        return await asyncio.gather(*(one() for _ in range(5)))

    trajectories = asyncio.run(five())
    assert [trajectory.status for trajectory in trajectories] == [Status.completed] * 5


def refusal(**arguments) -> str:
    recipe = Recipe()
    recipe.agent = AgentConfig(environment=ENVIRONMENT, environment_args=arguments)
    with pytest.raises(ValueError, match=ENVIRONMENT) as refused:
        load_environment(recipe, ToolBox([]), SandboxPool(recipe.agent.sandbox))
    return str(refused.value)


@pytest.mark.full
def test_a_field_that_actions_do_not_have_is_refused_before_the_start(url):
    assert f"an action of {url} has no field lettre; it has letter" in refusal(url=url, action_field="lettre")


def test_without_a_server_the_start_is_refused():
    assert "no server of OpenEnv answers: ConnectError" in refusal(url="http://127.0.0.1:9")
    assert "no server of OpenEnv answers: UnsupportedProtocol" in refusal(url="localhost")
