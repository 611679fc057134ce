"""The sandbox of a recipe: who gets it, what is refused before anything starts, and who closes it."""

import re
import shutil
from pathlib import Path

import pytest

from slimrl.agent.environment import Observation
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import ToolBox, make_tool
from slimrl.config.check import check_recipe
from slimrl.config.load import read_recipe
from slimrl.config.schema.agent import SandboxBackend, SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardPartConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.loading import load_part
from slimrl.rollout.task.environment import load_environment
from slimrl.rollout.task.sandbox import check_sandbox

ROOT = Path(__file__).parents[2]
HERE = __name__
TOOLS = "slimrl.agent.sandbox.tools"
REPAIR = "slimrl.environments.software_repair.environment:SoftwareRepair"
POOL = SandboxPool(SandboxConfig())
PROMPT = Prompt(prompt_id="p", messages=[{"role": "user", "content": "q"}], label=None)
TRAJECTORY = Trajectory(group_id="p", trajectory_id="t", segments=[], status=Status.completed)


class Lab:
    """An environment that asks for the sandbox by an annotation."""

    def __init__(self, pool: SandboxPool, room: int) -> None:
        self.given = pool, room

    @classmethod
    def check(cls, box: SandboxPool, *, room: int) -> None:
        if box is not POOL or room > 9:
            raise ValueError(f"room {room}")

    async def start(self, prompt, *, seed, scratch):
        return Observation(messages=prompt.messages)

    async def step(self, turn):
        return Observation(done=True)

    async def close(self): ...


def by_function(trajectory: Trajectory, prompt: Prompt, box: SandboxPool) -> float:
    return float(box is POOL)


class ByClass:
    def __init__(self, box: "SandboxPool", scale: float) -> None:
        self.value = scale * (box is POOL)

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        return self.value


def plain(trajectory: Trajectory, prompt: Prompt) -> float:
    return 1.0


def lookup(word: str, table: str, box: SandboxPool, times: int = 1) -> str:
    """Look a word up.

    Args:
        word: The word.
        table: The words.
        times: So often.
    """
    return f"{word} {table} {times} {box is POOL}"


def recipe_of(**agent) -> Recipe:
    recipe = Recipe()
    for name, value in agent.items():
        setattr(recipe.agent, name, value)
    return recipe


def test_environments_and_rewards_get_the_sandbox_where_an_annotation_asks_for_it():
    recipe = recipe_of(environment=f"{HERE}:Lab", environment_args={"room": 3})
    assert load_environment(recipe, ToolBox([]), POOL)().given == (POOL, 3)
    function = load_part("f", RewardPartConfig(function=f"{HERE}:by_function"), supplies={SandboxPool: POOL})
    assert function.function(TRAJECTORY, PROMPT) == 1.0
    settings = RewardPartConfig(function=f"{HERE}:ByClass", args={"scale": 0.5})
    assert load_part("c", settings, supplies={SandboxPool: POOL}).function(TRAJECTORY, PROMPT) == 0.5
    with pytest.raises(ValueError, match="Lab: room 10"):
        load_environment(recipe_of(environment=f"{HERE}:Lab", environment_args={"room": 10}), ToolBox([]), POOL)
    with pytest.raises(ValueError, match=r"Lab: cannot be made with no arguments: .*room"):
        load_environment(recipe_of(environment=f"{HERE}:Lab"), ToolBox([]), POOL)


async def test_a_tool_gets_the_sandbox_and_the_recipes_arguments_which_the_model_neither_sees_nor_changes():
    box = ToolBox.from_import_paths([f"{HERE}:lookup"], {"table": "words"}, POOL)
    assert list(box.schemas[0]["function"]["parameters"]["properties"]) == ["word", "times"]
    answer = await box.call("lookup", {"word": "a", "table": "mine", "box": "mine", "times": 2}, 5.0)
    assert answer.text == "a words 2 True"
    assert list(make_tool(lookup, {"times": 7}).schema["function"]["parameters"]["properties"]) == ["word", "table"]
    with pytest.raises(ValueError, match="no tool has a parameter tabel"):
        ToolBox.from_import_paths([f"{HERE}:lookup"], {"table": "words", "tabel": "x"}, POOL)


@pytest.mark.parametrize(
    ("recipe", "user"),
    [
        (recipe_of(tools=["slimrl.agent.calculator:calculator", "slimrl.agent.sandbox.tools:python"]), "tools:python"),
        (recipe_of(environment=f"{HERE}:Lab"), ":Lab"),
        (recipe_of(command=["sh"], command_task=f"{HERE}:Lab"), ":Lab"),
    ],
)
def test_a_machine_without_bubblewrap_is_refused_where_something_asks_for_the_sandbox(
    recipe, user, monkeypatch, tmp_path
):
    for name in ("unshare", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=rf"{user} runs code in the sandbox bubblewrap, and .*install bubblewrap"):
        check_sandbox(recipe)


def test_a_reward_that_asks_for_an_absent_sandbox_is_named():
    recipe = recipe_of(sandbox=SandboxConfig(backend=SandboxBackend.remote, url="http://127.0.0.1:9"))
    recipe.reward.parts["code"] = RewardPartConfig(function=f"{HERE}:ByClass")
    with pytest.raises(ValueError, match=r":ByClass runs code in the sandbox remote, and http://127\.0\.0\.1:9: "):
        check_sandbox(recipe)
    recipe.agent.sandbox = SandboxConfig(backend=SandboxBackend.container, command="/nowhere/docker")
    with pytest.raises(ValueError, match="there is no command /nowhere/docker"):
        check_sandbox(recipe)


def test_a_task_that_asks_for_no_sandbox_needs_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    recipe = recipe_of(tools=["slimrl.agent.calculator:calculator"])
    recipe.reward.function = f"{HERE}:plain"
    check_sandbox(recipe)


BEAM = "{method: beam, width: 3, beam: 2, rollouts: 1}"
SEARCHED = (
    "2688 at a time with rollout.max_concurrency_per_engine, each up to 14 environments of its search, and others "
    "would wait in vain. Use 2688 or more, or a lower rollout.max_concurrency_per_engine."
)
"""The 2 states that were kept, 6 that their turns lead to, and a plain episode from each of these, 192 times"""


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("agent.sandbox.limits.cpu_s=0", "agent.sandbox.limits.cpu_s", "must be at least 1"),
        ("agent.sandbox.limits.wall_s=10", "agent.sandbox.limits.wall_s", "rollout.tool_timeout_s 10.0"),
        (f"agent.tools=[{TOOLS}:shell]", "agent.sandbox.max_sessions", "Use 192."),
        (f"agent={{tools: [], environment: {REPAIR}}}", "agent.sandbox.max_sessions", "Use 192."),
        (f"agent.tools=[{TOOLS}:shell] rollout.max_engines=3", "agent.sandbox.max_sessions", "Use 576."),
        (f"agent={{tools: [{TOOLS}:shell], search: {BEAM}}}", "agent.sandbox.max_sessions", SEARCHED),
        (f"agent={{tools: [{TOOLS}:shell], sandbox: {{backend: remote}}}}", "agent.sandbox.backend", "has no sessions"),
        ("agent.sandbox={backend: remote, url: here}", "agent.sandbox.url", "write http://HOST:PORT"),
        ("agent.sandbox={backend: remote, url: http://a:1, all_nodes: true}", "agent.sandbox.all_nodes", "on no node"),
        ("agent={workers: 2, sandbox: {all_nodes: true}}", "agent.sandbox.all_nodes", "have sandboxes here alone"),
        ("agent.sandbox.backend=chroot", "agent.sandbox.backend", "bubblewrap"),
        ("agent.sandbox.bakend=remote", "agent.sandbox.bakend", "Did you mean agent.sandbox.backend?"),
    ],
)
def test_wrong_settings_of_the_sandbox_are_refused(override, key, said):
    loaded, problems = read_recipe(
        ROOT / "recipes/tiny_moe/gspo_python.yaml",
        [*re.split(r" (?=rollout\.)", override), "rollout.max_concurrency_per_engine=192"],
        "train",
    )
    found = [*problems, *(check_recipe(loaded.recipe, None, "train") if loaded else ())]
    assert [problem.key for problem in found if said in problem.message] == [key], found
