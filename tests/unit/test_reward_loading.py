"""The rewards of a recipe: where they come from, what they are bound to, and what is refused before a start."""

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest
from reward_cases import asked, said

from slimrl.config.functions import function_violations
from slimrl.config.load import load_recipe, read_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.reward_rules import reward_violations
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardConfig, RewardPartConfig
from slimrl.config.show import dump_resolved
from slimrl.rewards.loading import load_part, load_rewards, refuse_unknown_names
from slimrl.rewards.scoring import score

TINY = Path(__file__).parents[2] / "recipes" / "tiny_moe" / "gspo_calculator.yaml"
GIVEN = """\
steps: 1
run: {name: a}
model: {path: m}
data: {train: t}
trainer: {max_tokens_per_rank: 16, optimizer: {lr: 1}}
rollout: {max_trajectory_tokens: 9}
algorithm: {max_logprob_mismatch: 1}
"""


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """A module with rewards of each kind."""
    module = ModuleType("own_rewards")

    class Scaled:
        def __init__(self, factor, *, offset=0.0):
            if factor < 0:
                raise ValueError(f"factor {factor} is negative")
            self.factor, self.offset = factor, offset

        def __call__(self, trajectory, prompt):
            return self.factor * prompt.label + self.offset

    module.Scaled = Scaled
    module.Unused = type("Unused", (), {})

    class Words:
        def __init__(self, path):
            self.words = Path(path).read_text()

    class Server:
        def start(self): ...

        def __call__(self, trajectory, prompt): ...

    module.Words, module.Server = Words, Server
    module.plain = lambda trajectory, prompt: float(prompt.label)
    module.scaled = lambda trajectory, prompt, factor=1.0: factor * prompt.label
    module.ranks = lambda trajectories, prompt: [1.0] * len(trajectories)
    monkeypatch.setitem(sys.modules, "own_rewards", module)
    return module


def part(name, **settings):
    return RewardPartConfig(function=f"own_rewards:{name}", **settings)


def load(settings):
    """The rewards and the problems by key."""
    problems = {}

    def get(key, action):
        try:
            return action()
        except ValueError as error:
            problems[key] = str(error)
            return None

    return load_rewards(settings, get), problems


async def test_the_reward_is_made_of_functions_and_classes_with_their_arguments():
    settings = RewardConfig(
        parts={"class": part("Scaled", args={"factor": 2, "offset": 1.0}), "bound": part("scaled", args={"factor": 3})},
        by_name={"math": part("plain", weight=10.0, verified=True)},
        group={"rank": part("ranks", weight=0.5)},
    )
    rewards, problems = load(settings)
    assert problems == {}
    trajectory = said("x")
    await score(trajectory, asked(2, reward="math"), rewards.function, 10.0)
    assert trajectory.rewards == {"class": 5.0, "bound": 6.0, "math": 2.0}
    assert trajectory.reward == 5.0 + 6.0 + 20.0
    assert [(one.name, one.weight) for one in rewards.group] == [("rank", 0.5)]
    assert [(one.name, one.verified) for one in rewards.parts] == [
        ("class", False), ("bound", False), ("math", True), ("rank", False),
    ]  # fmt: skip


async def test_a_function_alone_is_the_reward_as_it_is():
    rewards, problems = load(RewardConfig(function="own_rewards:plain"))
    trajectory = said("x")
    await score(trajectory, asked(2), rewards.function, 10.0)
    assert (trajectory.reward, trajectory.rewards, problems) == (2.0, {}, {})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            part("plain", args={"factor": 1}),
            "cannot be called with (trajectory, prompt, factor=...): got an unexpected",
        ),
        (part("Scaled"), "cannot be called with (): missing a required argument: 'factor'"),
        (part("Scaled", args={"factor": -1}), "factor -1 is negative"),
        (part("Words", args={"path": "absent.txt"}), "Words: could not be made: FileNotFoundError: "),
        (part("Server"), "own_rewards:Server: its start is not `async def`, so it would not be called"),
        (part("Unused"), "an object of this class cannot be called; it has no __call__"),
        (part("ranks", args={"n": 2}), "got an unexpected keyword argument 'n'"),
        (part("plainn"), "own_rewards has no plainn. Did you mean plain?"),
    ],
)
def test_what_cannot_be_called_as_the_recipe_says_is_refused_under_its_key(given, problem):
    rewards, problems = load(RewardConfig(parts={"p": given}))
    assert rewards is None
    assert list(problems) == ["reward.parts.p.function"]
    assert problem in problems["reward.parts.p.function"]


def test_a_function_in_c_without_a_signature_is_taken_as_it_is():
    assert load_part("p", RewardPartConfig(function="builtins:max")).function is max


def test_exceptions_to_retry_are_classes_of_exceptions():
    rewards, problems = load(RewardConfig(function="own_rewards:plain", retries=2))
    assert (rewards.retries.limit, rewards.retries.errors[0]) == (2, OSError)
    _, problems = load(RewardConfig(function="own_rewards:plain", retry_on=["builtins:int"]))
    assert problems == {"reward.retry_on": "builtins:int: is no class of exceptions"}


async def test_a_request_whose_connection_the_server_closes_is_made_again():
    asked_for = []

    async def close_the_first(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked_for.append(1)
        if len(asked_for) > 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n0.5")
            await writer.drain()
        writer.close()

    async def attempt():
        async with aiohttp.ClientSession() as client, client.post(f"http://127.0.0.1:{port}") as response:
            return await response.text()

    rewards, _ = load(RewardConfig(function="own_rewards:plain", retries=1))
    async with await asyncio.start_server(close_the_first, "127.0.0.1") as server, asyncio.timeout(30):
        port = server.sockets[0].getsockname()[1]
        assert await replace(rewards.retries, first_delay_s=0).call(attempt, "p", lambda: None) == "0.5"
    assert len(asked_for) == 2


def test_prompts_that_name_a_reward_that_is_not_there_are_refused_by_their_lines():
    refused = partial(refuse_unknown_names, [asked(reward="mth"), asked(reward="math"), asked(), asked(reward=3)])
    known = {"math": part("plain")}
    assert refused(RewardConfig()) == []
    assert refused(RewardConfig(by_name=known, parts={"all": part("plain")})) == [
        "p.jsonl:7: metadata.reward is 'mth'; reward.by_name has math. Did you mean math?",
        "p.jsonl:7: metadata.reward is 3; reward.by_name has math.",
    ]
    (_, missing, _) = refused(RewardConfig(by_name=known))
    assert missing == "p.jsonl:7: metadata.reward is missing; it names the prompt's part of reward.by_name"


@pytest.mark.parametrize(
    ("settings", "key", "problem"),
    [
        ({}, "reward.function", "missing. Give it, or parts in"),
        ({"function": "a:b", "parts": {"x": part("y")}}, "reward.function", "reward.parts has the reward too."),
        ({"function": "a:b", "by_name": {"x": part("y")}}, "reward.function", "reward.by_name has the reward too."),
        ({"parts": {"x": part("y")}, "group": {"x": part("y")}}, "reward.group.x", "reward.parts.x has this name too."),
        ({"group": {"x": part("y")}}, "reward.group", "an evaluation has one trajectory per prompt"),
        ({"parts": {"overlong": part("y")}}, "reward.parts.overlong", "algorithm.overlong adds a part of this name"),
    ],
)
def test_rewards_that_contradict_each_other_are_refused(settings, key, problem):
    recipe = Recipe(reward=RewardConfig(**settings))
    recipe.data.eval, recipe.algorithm.overlong.max_tokens = {"heldout": "h.jsonl"}, 100
    ((found, message),) = reward_violations(recipe, "train")
    assert (found, message.startswith(problem)) == (key, True)
    assert list(reward_violations(recipe, "sft")) == []


@pytest.mark.parametrize("settings", [{"function": "a:b"}, {"parts": {"x": part("y")}}, {"by_name": {"x": part("y")}}])
def test_one_reward_with_groups_or_without_is_right(settings):
    for group in ({}, {"z": part("y")}):
        recipe = Recipe(reward=RewardConfig(**settings, group=group))
        recipe.data.eval = {"heldout": "h.jsonl"}
        assert list(reward_violations(recipe, "train")) == []
    assert list(reward_violations(Recipe(reward=RewardConfig(group={"z": part("y")})), "train")) == []


def test_numbers_and_functions_of_parts_have_ranges_and_forms_too():
    given = ["parts.x={function: no path, cap: 0.0, weight: -1.0}", "alarm_steps=3", "retries=-1", "retry_on=[OSError]"]
    problems = read_recipe(TINY, ["reward.function=''", *(f"reward.{one}" for one in given)])[1]
    assert {problem.key: problem.message for problem in problems} == {
        "reward.parts.x.function": "'no path' is not an import path; write module:function.",
        "reward.retry_on": "'OSError' is not an import path; write module:Exception.",
        "reward.parts.x.cap": "0.0: must be greater than 0.",
        "reward.alarm_steps": "3: must be at least 4, or 0 for off.",
        "reward.retries": "-1: must be at least 0.",
    }


def test_parts_are_looked_up_in_the_source_before_anything_runs(tmp_path, monkeypatch):
    (tmp_path / "own_file.py").write_text(
        "class No: pass\nclass Yes:\n    def __call__(self, trajectory, prompt): pass\nclass Sub(No): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parts = {name: RewardPartConfig(function=f"own_file:{name}") for name in ("No", "Yes", "Sub", "Yess")}
    found = dict(function_violations(Recipe(reward=RewardConfig(parts=parts)), "train"))
    assert found == {
        "reward.parts.No.function": "own_file:No: No is a class without __call__. "
        "A reward is a function, an object that can be called, or a class of such objects.",
        "reward.parts.Yess.function": "own_file:Yess: own_file has no Yess. Did you mean Yes?",
    }


def test_parts_of_a_recipe_are_typed_merged_overridden_and_written_down(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(
        GIVEN + 'reward:\n  parts:\n    math: {function: "a:b", args: {n: [1, {m: 2}]}}\n'
    )
    (tmp_path / "mine.yaml").write_text('extends: base.yaml\nreward: {parts: {form: {function: "a:c", cap: 1}}}\n')
    loaded = load_recipe("mine.yaml", ["reward.parts.math.weight=2", "reward.parts.math.args.k=v"])
    assert loaded.recipe.reward.parts == {
        "math": RewardPartConfig(function="a:b", weight=2.0, args={"n": [1, {"m": 2}], "k": "v"}),
        "form": RewardPartConfig(function="a:c", cap=1.0),
    }
    assert loaded.where("reward.parts.form.cap") == "mine.yaml:2"
    (tmp_path / "again.yaml").write_text(dump_resolved(loaded))
    assert load_recipe("again.yaml").recipe == loaded.recipe


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("reward.parts.math.wieght=2", "reward.parts.math.wieght: no such key. Did you mean reward.parts.math.weight?"),
        ("reward.parts.math.weight=much", "reward.parts.math.weight: expected float, got 'much'."),
        ("reward.parts.new.weight=1", "reward.parts.new.function: missing; `slimrl train` needs a value."),
        ("reward.parts.new=a:b", "reward.parts.new: is a section; expected keys below it, got 'a:b'."),
        ("reward.prats.math.weight=1", "reward.prats.math.weight: no such key. Did you mean reward.parts.NAME.weight?"),
    ],
)
def test_mistakes_in_parts_are_named_by_their_key(tmp_path, monkeypatch, override, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(GIVEN + 'reward: {parts: {math: {function: "a:b"}}}\n')
    with pytest.raises(RecipeError) as caught:
        load_recipe("r.yaml", [override])
    assert [line.partition(": ")[2] for line in str(caught.value).splitlines()[:-1]] == [problem]
