"""Settings of episodes that contradict each other, or whose code is not there, are named before anything starts."""

from itertools import pairwise

import pytest
from recipe_problems import recipe_problems
from test_episode import CHAT

from slimrl.agent.calculator import calculator
from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.agent.tools import make_tool
from slimrl.config.check import check_recipe
from slimrl.config.functions import function_violations
from slimrl.config.load import LoadedRecipe, load_recipe
from slimrl.config.problem_collector import ProblemCollector
from slimrl.config.schema.agent import SandboxConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.rollout.task.environment import check_summary_request, load_subagents, load_summary_rule
from slimrl.rollout.task.tools import load_tools

RECIPE = "recipes/tiny_moe/gspo_calculator.yaml"
HELPER = "agent.subagents.helper={description: Helps., max_turns: 2}"

POOL = SandboxPool(SandboxConfig())


GIVEN = ["model.path=absent", "data.train=absent", "rollout.max_turns=4"]


def recipe_of(*overrides):
    return load_recipe(RECIPE, [*GIVEN, *overrides]).recipe


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["agent.workers=0"], "agent.workers", "at least 1"),
        (["agent.workers=2", "deterministic=true"], "agent.workers", "in one process"),
        (["agent.compaction.at_tokens=9999999"], "agent.compaction.at_tokens", "rollout.max_trajectory_tokens"),
        (["agent.compaction.at_tokens=100", "agent.history=template"], "agent.compaction.at_tokens", "history keep"),
        (["agent.compaction.keep_turns=-1"], "agent.compaction.keep_turns", "at least 0"),
        (["agent.compaction.function=a:b"], "agent.compaction.function", "without agent.compaction.at_tokens"),
        (["agent.compaction={at_tokens: 99, function: ab}"], "agent.compaction.function", "is not an import path"),
        ([HELPER, "agent.subagents.helper.max_turns=4"], "agent.subagents.helper.max_turns", "its caller's"),
        ([HELPER, "agent.subagents.helper.max_turns=0"], "agent.subagents.helper.max_turns", "at least 1"),
        ([HELPER, "agent.subagents.helper.tools=[x]"], "agent.subagents.helper.tools", "is not an import path"),
        (["agent.subagents.a-b={description: d}"], "agent.subagents.a-b", "not a name of a tool"),
        (["agent.subagents.calculator={description: d}"], "agent.subagents.calculator", "this name too"),
        ([HELPER, "agent.environment=a:B"], "agent.subagents", "says that itself"),
    ],
)
def test_what_contradicts_itself_is_named_by_its_key(overrides, key, message):
    found = {problem.key: problem.message for problem in recipe_problems(RECIPE, [*GIVEN, *overrides])}
    assert message in found[key]


def test_a_recipe_with_all_of_them_is_accepted():
    overrides = ["agent.workers=2", HELPER, "agent.compaction.at_tokens=100"]
    assert not [problem for problem in check_recipe(recipe_of(*overrides), None, "train") if not problem.warning]


def test_code_that_its_module_does_not_have_is_named_without_running_it():
    module = "slimrl.agent.calculator"
    recipe = recipe_of(
        HELPER,
        f"agent.subagents.helper.tools=[{module}:calculater]",
        f"agent.compaction={{at_tokens: 99, function: {module}:gone}}",
    )
    found = dict(function_violations(recipe, "train"))
    assert "Did you mean calculator?" in found["agent.subagents.helper.tools"]
    assert "has no gone" in found["agent.compaction.function"]


def test_the_code_of_a_recipe_is_loaded_with_its_sub_agents():
    agent = recipe_of(HELPER, "agent.subagents.helper.tools=[slimrl.agent.calculator:calculator]").agent
    collector = ProblemCollector(LoadedRecipe(recipe=Recipe(), provenance={}, path="", command="train"))
    shown = [schema["function"] for schema in load_tools(agent, collector, POOL).schemas]
    assert [schema["name"] for schema in shown] == ["calculator", "helper"]
    assert list(shown[1]["parameters"]["properties"]) == ["task"]
    assert load_subagents(agent, POOL)["helper"].schemas == [make_tool(calculator).schema]
    agent.subagents["helper"].tools = ["slimrl.agent.calculator:gone"]
    with pytest.raises(ValueError, match=r"helper: .*has no gone"):
        load_subagents(agent, POOL)
    assert load_summary_rule("") is None
    with pytest.raises(ValueError, match=r"cannot be called as shortened\(messages\)"):
        load_summary_rule("slimrl.agent.tools:shortened")


def test_a_template_that_cannot_ask_for_a_summary_is_refused(monkeypatch):
    compaction = recipe_of("agent.compaction.at_tokens=99").agent.compaction
    check_summary_request(compaction, CHAT)
    render = CHAT.template.render

    def refuse_user_after_tool(messages, schemas, *, generate):
        for before, after in pairwise(messages):
            if (before["role"], after["role"]) == ("tool", "user"):
                raise ValueError("no user after a tool")
        return render(messages, schemas, generate=generate)

    monkeypatch.setattr(CHAT.template, "render", refuse_user_after_tool)
    with pytest.raises(ValueError, match="no user after a tool"):
        check_summary_request(compaction, CHAT)
    compaction.function = "a:b"
    check_summary_request(compaction, CHAT)
