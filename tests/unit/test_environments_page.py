"""The environment and the episode of docs/agents.md, made of the page's own blocks."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from recipe_problems import recipe_problems
from test_episode import CHAT, PROMPT, ScriptedEngine, encode, runner_of

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolBox
from slimrl.base.seeds import derive_seed
from slimrl.config.check import check_loaded
from slimrl.config.functions import function_violations
from slimrl.config.load import load_recipe
from slimrl.config.problem_collector import ProblemCollector
from slimrl.config.schema.agent import AgentConfig, SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status
from slimrl.rollout.task.environment import load_environment, load_episode_loop, load_summary_rule
from slimrl.rollout.task.tools import load_tools

ROOT = Path(__file__).parents[2]
POOL = SandboxPool(SandboxConfig())


def blocks_of(title: str) -> list[str]:
    """Python and YAML in a section of the page."""
    section = (ROOT / "docs/agents.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```(?:python|yaml)\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The working directory of the page's reader."""
    game, recipe = blocks_of("Environments")
    (rule,) = blocks_of("Long contexts")
    (subagents,) = blocks_of("Sub-agents")
    (episode,) = blocks_of("An episode of one's own")
    (tmp_path / "guess.py").write_text(game)
    (tmp_path / "guess.yaml").write_text(recipe)
    (tmp_path / "own_loop.py").write_text(episode)
    (tmp_path / "own_rule.py").write_text(rule)
    (tmp_path / "subagents.yaml").write_text(f"extends: recipes/tiny_moe/gspo_calculator.yaml\n{subagents}")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("guess", "own_loop", "own_rule"):
        sys.modules.pop(name, None)


def episode_of(recipe: Recipe, *turns: str | list[int], loop: str = "", chat=CHAT):
    runner = runner_of(
        ScriptedEngine(*turns), ToolBox([]), agent=recipe.agent,
        environment=load_environment(recipe, ToolBox([]), POOL),
        episode_loop=load_episode_loop(loop), chat=chat, max_turns=6,
    )  # fmt: skip
    return asyncio.run(runner.run(PROMPT, trajectory_id="t", sampling=SamplingConfig(), seed=5))


def guesses(recipe: Recipe) -> list[str]:
    """Two wrong guesses and the right one."""
    game = load_environment(recipe, ToolBox([]), POOL)()
    asyncio.run(game.start(PROMPT, seed=derive_seed(5, "environment"), scratch={}))
    return [f"I say {number}<|im_end|>" for number in (game.number - 1, game.number + 1, game.number)]


def test_its_recipe_is_accepted_and_its_game_is_played_and_rewarded(page):
    import guess

    loaded = load_recipe("guess.yaml", ["model.path=absent"], "train")
    keys = {problem.key for problem in check_loaded(loaded) if not problem.warning}
    assert keys <= {"model.path", "data.train", "data.eval.heldout"}
    trajectory = episode_of(loaded.recipe, *guesses(loaded.recipe))
    assert trajectory.status is Status.completed
    told = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert told == ["Guess my number, 1 to 20.", "Higher.", "Lower."]
    assert trajectory.metadata["environment"]["rewards"] == [0.0, 0.0, 1.0]
    assert guess.reward(trajectory, PROMPT) == pytest.approx(1 / 3)


def test_its_episode_of_two_turns_ends_before_the_third(page):
    recipe = load_recipe("guess.yaml", ["model.path=absent"], "train").recipe
    trajectory = episode_of(recipe, *guesses(recipe), loop="own_loop:best_of_two")
    assert trajectory.status is Status.truncated
    assert trajectory.metadata["num_turns"] == 2


def test_its_episode_is_complete_when_the_policy_ends_the_text(page):
    recipe = load_recipe("guess.yaml", ["model.path=absent"], "train").recipe
    end = CHAT.template.encode("<|im_end|>")[0]
    other = next(token for token in range(20) if token != end)
    chat = type(CHAT)(CHAT.template, [end, other])
    trajectory = episode_of(recipe, [*encode("I say 0"), other], loop="own_loop:best_of_two", chat=chat)
    assert (trajectory.status, trajectory.metadata["num_turns"]) == (Status.completed, 1)


class NoStep:
    async def start(self, prompt, *, seed, scratch): ...

    async def close(self): ...


class OldStart(NoStep):
    async def start(self, prompt, seed): ...

    async def step(self, turn): ...


class LongStep(NoStep):
    async def step(self, turn, more): ...


class Static(NoStep):
    async def step(self, turn): ...

    @staticmethod
    async def close(): ...


def test_a_method_may_be_static():
    recipe = Recipe()
    recipe.agent = AgentConfig(environment=f"{__name__}:Static")
    assert isinstance(load_environment(recipe, ToolBox([]), POOL)(), Static)


def not_asynchronous(episode): ...


def test_its_rule_and_its_sub_agents_are_accepted(page):
    rule = load_summary_rule("own_rule:newest_results")
    results = [{"role": "tool", "content": str(number)} for number in range(7)]
    assert rule([{"role": "user", "content": "q"}, *results]) == "Results so far: 2; 3; 4; 5; 6"
    compaction = "agent.compaction={at_tokens: 200, function: own_rule:newest_results}"
    loaded = load_recipe("subagents.yaml", ["model.path=absent", compaction], "train")
    keys = {problem.key for problem in check_loaded(loaded) if not problem.warning}
    assert keys <= {"model.path", "data.train", "data.eval.heldout"}
    tools = load_tools(loaded.recipe.agent, ProblemCollector(loaded), POOL)
    assert [schema["function"]["name"] for schema in tools.schemas] == ["calculator", "solver"]


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"environment": f"{__name__}:NoStep"}, "has no `async def step`"),
        ({"environment": f"{__name__}:OldStart"}, r"cannot be called as start\(prompt, seed=\.\.\., scratch=\.\.\.\)"),
        ({"environment": f"{__name__}:LongStep"}, r"cannot be called as step\(turn\)"),
        ({"environment": f"{__name__}:Nowhere"}, "has no Nowhere"),
        ({"environment": "guess:Guess", "environment_args": {"lowest": 3}}, "cannot be made with lowest: .*lowest"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_starts(page, agent, said):
    recipe = Recipe()
    recipe.agent = AgentConfig(**agent)
    with pytest.raises(ValueError, match=said):
        load_environment(recipe, ToolBox([]), POOL)


def test_what_is_no_episode_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="is not `async def`"):
        load_episode_loop(f"{__name__}:not_asynchronous")
    with pytest.raises(ValueError, match=r"cannot be called as episode_of\(episode\)|takes|async"):
        load_episode_loop(f"{__name__}:episode_of")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("agent.tools=[slimrl.agent.calculator:calculator]", "agent.tools"),
        ("agent.max_tool_calls=3", "agent.max_tool_calls"),
        ("agent.system_prompt=x", "agent.system_prompt"),
        ("agent.environment=guess", "agent.environment"),
        ("agent.environment=''", "agent.environment_args"),
        ("agent.environment_isolation=venv", "agent.environment_venv"),
        ("agent.environment_venv=somewhere", "agent.environment_venv"),
        ("agent.start_retries=-1", "agent.start_retries"),
    ],
)
def test_settings_that_contradict_an_environment_are_named(page, override, key):
    problems = recipe_problems("guess.yaml", ["model.path=absent", override])
    assert key in {problem.key for problem in problems if not problem.warning}


def test_names_that_their_modules_do_not_have_are_named_without_running_them(page):
    overrides = ["model.path=absent", "agent.environment=guess:Gues", "agent.episode=own_loop:best_of_tow"]
    recipe = load_recipe("guess.yaml", overrides, "train").recipe
    assert dict(function_violations(recipe, "train")) == {
        "agent.environment": "guess:Gues: guess has no Gues. Did you mean Guess?",
        "agent.episode": "own_loop:best_of_tow: own_loop has no best_of_tow. Did you mean best_of_two?",
    }
