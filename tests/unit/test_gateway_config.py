"""What a recipe may say of agents behind the gateway, and what is refused before anything starts."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_agents import ANSWER, CALL, PROMPT, ScriptedEngine, runner_of

from slimrl.agent.calculator import calculator
from slimrl.agent.episode_runner import EpisodeRunner
from slimrl.agent.gateway import calculator_agent
from slimrl.agent.gateway.agents import FunctionAgent
from slimrl.agent.gateway.command_agent import CommandAgent
from slimrl.agent.gateway.command_sandbox import hidden_program
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tool_environment import ToolEnvironment
from slimrl.agent.tools import ToolBox, make_tool
from slimrl.config.agent_rules import agent_violations, command_words, gateway_file_violations, gateway_violations
from slimrl.config.check import check_loaded
from slimrl.config.functions import function_violations
from slimrl.config.load import load_recipe
from slimrl.config.problems import Problem, RecipeError
from slimrl.config.schema.agent import AgentConfig, CommandSandboxConfig, GatewayConfig, SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.models.offline_recipe import read_offline
from slimrl.rollout.task.environment import load_agent

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator_gateway.yaml"
POOL = SandboxPool(SandboxConfig())
HERE = "test_gateway_config"
SYSTEM = "Put the answer in \\boxed{}."


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which nothing has run, so that no model or data set is there."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("agent", "key"),
    [
        ({"command": "python a.py", "function": "a:f"}, "agent.function"),
        ({"function": "a:f", "tools": ["a:g"]}, "agent.tools"),
        ({"function": "a:f", "max_tool_calls": 3}, "agent.max_tool_calls"),
        ({"function": "a:f", "environment": "a:E"}, "agent.environment"),
        ({"command": ["sh"], "episode": "a:play"}, "agent.episode"),
        ({"command": "   "}, "agent.command"),
        ({"command": "sh 'x"}, "agent.command"),
        ({"command": ["sh", 3]}, "agent.command"),
        ({"command": {"a": 1}}, "agent.command"),
        ({"command": ["   "]}, "agent.command"),
        ({"function": "a:f", "command_env": {"A": "b"}}, "agent.command_env"),
        ({"function": "a:f", "command_sandbox": CommandSandboxConfig(enabled=True)}, "agent.command_sandbox.enabled"),
        ({"command": ["sh"], "command_sandbox": CommandSandboxConfig(network=True)}, "agent.command_sandbox.network"),
        ({"function": "a:f", "gateway": GatewayConfig(host="localhost")}, "agent.gateway.host"),
        ({"function": "a:f", "gateway": GatewayConfig(host="0.0.0.0")}, "agent.gateway.host"),
    ],
)
def test_a_contradiction_is_named(agent: dict[str, Any], key: str):
    assert [one for one, _ in gateway_violations(AgentConfig(**agent))] == [key]


@pytest.mark.parametrize("agent", [{"function": "a:f"}, {"command": "sh -c 'exit 1'"}])
def test_what_fits_together_is_not(agent: dict[str, Any]):
    assert list(gateway_violations(AgentConfig(**agent))) == []
    assert list(gateway_file_violations(AgentConfig(**agent))) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["agent.command=no-such-program x"], "agent.command"),
        (["agent.command=[sh]", "agent.command_env={PATH: /no/such}"], "agent.command"),
        (
            ["agent.command=[sh]", "agent.command_sandbox={enabled: true, paths: [/no/such/folder]}"],
            "agent.command_sandbox.paths",
        ),
    ],
)
def test_what_an_agent_needs_may_be_missing_where_a_run_is_prepared_but_not_where_it_starts(
    overrides: list[str], key: str
):
    overrides = [*overrides, "agent.function=''"]

    def refused(problems: Sequence[Problem]) -> list[str]:
        return [one.key for one in problems if one.key.startswith("agent.") and not one.warning]

    noted = read_offline(RECIPE, overrides, "train", model_needed=False).notes
    assert [one.key for one in noted if one.key.startswith("agent.")] == [key]
    with pytest.raises(RecipeError) as submitted:
        read_offline(RECIPE, overrides, "train", files=True)
    assert refused(submitted.value.problems) == [key]
    with pytest.raises(RecipeError) as in_image:
        read_offline(RECIPE, overrides, "train", files=True, in_image=True)
    assert refused(in_image.value.problems) == []
    assert refused(check_loaded(load_recipe(RECIPE, overrides, "train"))) == [key]
    assert refused(check_loaded(load_recipe(RECIPE, [*overrides, "sft.max_tokens=64"], "sft"))) == []


def test_an_agent_of_one_request_is_warned_about():
    def warned(*overrides: str) -> list[str]:
        notes = read_offline(RECIPE, overrides, "train", model_needed=False).notes
        return [one.message for one in notes if one.key == "rollout.max_turns"]

    assert warned() == []
    assert ["the agent gets one request" in said for said in warned("rollout.max_turns=1")] == [True]
    assert warned("rollout.max_turns=1", "agent.function=''") == []


@pytest.mark.parametrize("agent", [{}, {"tools": ["a:g"], "episode": "a:p"}])
def test_without_an_agent_its_rules_say_nothing(agent: dict[str, Any]):
    assert list(agent_violations(Recipe(agent=AgentConfig(**agent)))) == []


def test_a_command_is_words_or_a_text(tmp_path: Path):
    assert command_words("sh -c 'a b'") == command_words(["sh", "-c", "a b"]) == ["sh", "-c", "a b"]
    for given in ("sh -c 'a b'", ["sh", "-c", "a b"]):
        loaded = load_recipe(RECIPE, [f"agent.command={given!r}", "agent.function=''"], "train")
        agent = load_agent(loaded.recipe.agent, POOL)
        assert isinstance(agent, CommandAgent)
        assert list(agent.words) == ["sh", "-c", "a b"]


def test_files_among_the_words_are_found_from_the_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/agent.py", "python"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    words = ["python", "scripts/agent.py", "scripts", "--task=scripts/agent.py", "word " * 1000]
    agent = load_agent(AgentConfig(command=words, command_env={"A": "b"}), POOL)
    assert isinstance(agent, CommandAgent)
    assert agent.words == ["python", str(tmp_path / "scripts/agent.py"), *words[2:]]
    assert agent.env == {"A": "b"}
    own = load_agent(AgentConfig(command=["./python"]), POOL)
    assert isinstance(own, CommandAgent)
    assert own.words == [str(tmp_path / "python")]


def test_a_program_outside_of_what_a_sandbox_shows_is_found(tmp_path: Path):
    program, link = tmp_path / "real" / "agent", tmp_path / "bin" / "agent"
    for path in (program, link):
        path.parent.mkdir()
    program.write_text("")
    link.symlink_to(program)
    assert hidden_program("/usr/bin/env", []) is None
    assert hidden_program(str(link), []) == str(link)
    assert hidden_program(str(link), [str(link.parent)]) == str(program)
    assert hidden_program(str(link), [str(tmp_path)]) is None


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("agent.function=calculator", "agent.function"),
        ("agent.gateway.max_body_bytes=0", "agent.gateway.max_body_bytes"),
        ("agent.gateway.max_requests_per_s=-1", "agent.gateway.max_requests_per_s"),
        ("agent.gateway.port=3", "agent.gateway.port"),
        ("agent.tools=[slimrl.agent.calculator:calculator]", "agent.tools"),
    ],
)
def test_the_check_of_a_recipe_knows_these_rules(override: str, key: str):
    with pytest.raises(RecipeError) as refused:
        read_offline(RECIPE, [override], "train", model_needed=False)
    assert [problem.key for problem in refused.value.problems if not problem.warning] == [key]


def test_a_function_that_is_not_there_or_takes_something_else_is_refused():
    wrong = load_recipe(RECIPE, ["agent.function=slimrl.agent.gateway.calculator_agent:solv"], "train").recipe
    ((key, said),) = function_violations(wrong, "train")
    assert key == "agent.function"
    assert said.endswith("Did you mean solve?")
    with pytest.raises(ValueError, match="cannot be called as calculator"):
        load_agent(AgentConfig(function="slimrl.agent.calculator:calculator"), POOL)


class Files:
    def __init__(self, sandbox: SandboxPool, *, folder: str) -> None:
        self.given = sandbox, folder

    @classmethod
    def check(cls, *, folder: str) -> None:
        if folder == "none":
            raise ValueError("folder: none is there")

    async def fill(self, line: Any, work: Path) -> Any:
        return line

    async def judge(self, work: Path) -> float:
        return 1.0


class Unjudged:
    async def fill(self, line: Any, work: Path) -> Any:
        return line

    def judge(self, work: Path) -> float:
        return 1.0


def test_the_task_of_a_command_is_made_with_the_sandbox_and_the_recipe_s_arguments():
    def loaded(name: str, **arguments: str) -> Any:
        agent = AgentConfig(command=["sh"], command_task=f"{HERE}:{name}", command_task_args=arguments)
        return load_agent(agent, POOL)

    agent = loaded("Files", folder="a")
    first, second = agent.make_task(), agent.make_task()
    assert first.given == second.given == (POOL, "a")
    assert first is not second
    recipe = Recipe(
        agent=AgentConfig(command=["sh"], command_task="slimrl.environments.software_repair.command_task:Task")
    )
    ((key, absent),) = function_violations(recipe, "train")
    assert key == "agent.command_task"
    assert "has no Task" in absent
    for name, arguments, said in (
        ("Files", {"folder": "none"}, "Files: folder: none is there"),
        ("Files", {"folders": "a"}, "Files: cannot be made with folders: .*folder"),
        ("Unjudged", {}, "Unjudged: has no `async def judge`, which the task of a command has"),
        ("Filed", {}, "Did you mean Files"),
    ):
        with pytest.raises(ValueError, match=said):
            loaded(name, **arguments)


@pytest.mark.parametrize(
    ("agent", "key"),
    [
        ({"function": "a:f", "command_task": "a:T"}, "agent.command_task"),
        ({"command_task": "a:T"}, "agent.command_task"),
        ({"command": ["sh"], "command_task_args": {"a": 1}}, "agent.command_task_args"),
    ],
)
def test_a_task_without_its_command_and_arguments_without_their_task_are_named(agent: dict[str, Any], key: str):
    assert [one for one, _ in agent_violations(Recipe(agent=AgentConfig(**agent)))] == [key]


async def test_the_calculators_agent_acts_as_the_built_in_loop_does():
    """The same tokens, masks, log-probs and messages, from the prompt to the answer."""
    sampling = SamplingConfig(max_new_tokens=64)
    wrong = CALL.replace("34*17+2", "1/0")
    ours, theirs = ScriptedEngine([wrong, CALL, ANSWER]), ScriptedEngine([wrong, CALL, ANSWER])
    agent = FunctionAgent(function=calculator_agent.solve, path="solve")
    gateway = runner_of(ours, agent)
    gateway.config.system_prompt = SYSTEM
    await gateway.start()
    through = await gateway.run(PROMPT, trajectory_id="t", sampling=sampling, seed=3)
    await gateway.stop()
    config = AgentConfig(system_prompt=SYSTEM)
    tools = ToolBox([make_tool(calculator)])
    loop = EpisodeRunner(
        engine=theirs,
        dialogues=gateway.dialogues,
        environment=lambda: ToolEnvironment(tools, config, 5.0),
        rollout=gateway.rollout,
        agent=config,
    )
    built_in = await loop.run(PROMPT, trajectory_id="t", sampling=sampling, seed=3)
    ((a,), (b,)) = through.segments, built_in.segments
    for name in ("tokens", "loss_mask", "rollout_logprobs", "weight_versions", "turn_ids"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert (through.status, through.messages) == (built_in.status, built_in.messages)
    same = ("num_turns", "num_tool_calls", "num_malformed_calls", "num_prompt_messages", "num_cached_tokens")
    assert {name: through.metadata[name] for name in same} == {name: built_in.metadata[name] for name in same}


async def test_trajectories_at_once_do_not_see_each_other():
    engine = ScriptedEngine(lambda text: ANSWER if "<tool_response>" in text or "words" in text else CALL)
    runner = runner_of(engine, FunctionAgent(function=calculator_agent.solve, path="solve"))
    prompts = [replace(PROMPT, messages=[{"role": "user", "content": text}]) for text in ("34*17+2?", "words")] * 4
    await runner.start()
    sampling = SamplingConfig(max_new_tokens=64)
    done = await asyncio.gather(
        *(runner.run(one, trajectory_id=f"t{i}", sampling=sampling, seed=i) for i, one in enumerate(prompts))
    )
    await runner.stop()
    assert [one.metadata["num_turns"] for one in done] == [2, 1] * 4
    assert [one.messages[0] for one in done] == [one.messages[0] for one in prompts]
    assert engine.most_under_way > 1
