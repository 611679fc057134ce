"""Functions that a recipe names, looked up in sources of every form; and the numbers that a refusal proposes."""

import ast
import importlib
import re
from inspect import signature

import pytest

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.functions import _defined_names, _find, absent_modules, function_violations, reward_warnings
from slimrl.config.import_path import resolve
from slimrl.config.problems import fitting_text, multiples_text
from slimrl.config.schema.agent import AgentConfig, SandboxConfig, SubagentConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardConfig, RewardPartConfig
from slimrl.rewards.http import EndpointSettings, JsonEndpoint
from slimrl.rewards.judge import JudgeSettings, _Judging
from slimrl.rewards.loading import Supplies, load_part


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules below a folder that Python looks into."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sources: str):
        for name, source in sources.items():
            file = tmp_path / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        importlib.invalidate_caches()
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(): g = 1\nasync def h(): pass\nclass C:\n    x = 1\n", {"f", "h", "C"}),
        ("import a.b\nimport c.d as e\nfrom f import g, h as i\n", {"a", "e", "g", "i"}),
        (
            "x = y\nz: int = 1\nfor i in u: j = 1\nwith v as w: pass\n(k, [l]) = m\n",
            {"x", "z", "i", "j", "w", "k", "l"},
        ),
        ("if a:\n    b = 1\nelse:\n    def c(): pass\n", {"b", "c"}),
        ("from a import *\n", None),
        ("def __getattr__(name): pass\n", None),
        ("globals()['a'] = 1\n", None),
        ("vars()\n", None),
        ("setattr(a, 'b', 1)\n", None),
        ("def f():\n    exec('x')\n", None),
        ("a.exec(1)\nprint()\n", set()),
        ("", set()),
    ],
)
def test_names_at_the_top_of_a_module_are_known_unless_they_appear_when_it_runs(tmp_path, source, names):
    (tmp_path / "m.py").write_text(source)
    found = _defined_names(tmp_path / "m.py")
    assert (found if found is None else set(found)) == names
    (tmp_path / "m.so").write_text(source)
    assert _defined_names(tmp_path / "m.so") is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\ndef f(:\n", "{file}:2: invalid syntax"),
        ("def f():\n  x\n    y\n", "{file}:3: unexpected indent"),
        ("a = '\0'\n", "source code string cannot contain null bytes"),
    ],
)
def test_a_module_that_is_not_python_is_refused_by_its_line_whoever_reads_it(modules, source, said):
    folder = modules(wrong=source, importing="import wrong\ndef f(): pass\n")
    recipe = Recipe(
        agent=AgentConfig(environment="wrong:C", tools=["wrong:f"]), reward=RewardConfig(function="wrong:r")
    )
    said = said.format(file=folder / "wrong.py")
    found = dict(function_violations(recipe, "train"))
    for key, path in (("agent.environment", "wrong:C"), ("agent.tools", "wrong:f"), ("reward.function", "wrong:r")):
        assert found[key].startswith(f"{path}: ")
        assert found[key].endswith(said)
    for path in ("wrong:f", "importing:f"):
        with pytest.raises(ValueError, match=rf"^{path}: .*{re.escape(said)}$"):
            resolve(path)


def test_what_defines_a_name_last_counts(tmp_path):
    (tmp_path / "m.py").write_text("class A: pass\ndef A(): pass\ndef B(): pass\nclass B: pass\n")
    kinds = {name: type(node) for name, node in _defined_names(tmp_path / "m.py").items()}
    assert kinds == {"A": ast.FunctionDef, "B": ast.ClassDef}


def test_modules_are_found_as_files_packages_folders_and_compiled(modules):
    names = ("plain", "package/__init__", "package/inner", "package/deep/__init__", "spaced/x/y")
    folder = modules(**dict.fromkeys(names, ""))
    (folder / "package" / "fast.cpython-311-x86_64-linux-gnu.so").touch()
    (folder / "package" / "both.py").touch()
    (folder / "package" / "both").mkdir()
    found = {
        "plain": "plain.py",
        "package": "package/__init__.py",
        "package.inner": "package/inner.py",
        "package.deep": "package/deep/__init__.py",
        "package.fast": "package/fast.cpython-311-x86_64-linux-gnu.so",
        "package.both": "package/both.py",
        "spaced": "spaced",
        "spaced.x": "spaced/x",
        "spaced.x.y": "spaced/x/y.py",
    }
    assert {name: _find(name).relative_to(folder).as_posix() for name in found} == found
    for name in ("nowhere", "plain.inner", "package.nowhere", "package.inner.deeper", "spaced.nowhere"):
        assert _find(name) is None, name
    assert _find("sys").name == "sys"


def test_each_setting_is_judged_where_the_command_needs_it(modules):
    modules(own="class C: pass\ndef right():\n    'Do it.'\ndef _hidden(): pass\nmade = C()\n")
    recipe = Recipe(
        agent=AgentConfig(tools=["own:rihgt", "own:C", "own:right", "away:f"], parser="own:C"),
        reward=RewardConfig(function="own:hidden", group_filters=["own:C", "own:made"]),
    )
    tools = [
        ("agent.tools", "own:rihgt: own has no rihgt. Did you mean right?"),
        ("agent.tools", "own:C: C is a class. A tool is a function."),
    ]
    rewards = [
        ("reward.function", "own:hidden: own has no hidden."),
        ("reward.group_filters", "own:C: C is a class. A filter is a function, or an object that can be called."),
    ]
    assert list(function_violations(recipe, "train")) == tools + rewards
    assert list(function_violations(recipe, "sft")) == tools
    assert list(function_violations(recipe, "export")) == []
    assert list(absent_modules(recipe, "train")) == [("agent.tools", "away:f: no module away.")]
    assert list(absent_modules(recipe, "export")) == []
    recipe.agent.parser, recipe.agent.tools = "hermes", []
    recipe.reward.function, recipe.reward.group_filters = "???", []
    assert [*function_violations(recipe, "train"), *absent_modules(recipe, "train")] == []


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("def r(prompt, trajectory): pass", "prompt, trajectory"),
        ("async def r(args, sample, **kwargs): pass", "args, sample"),
        ("def r(prompts, completions, **kwargs): pass", "prompts, completions"),
        ("class r:\n    def __call__(self, prompt, trajectory): pass", "prompt, trajectory"),
        ("r = lambda prompt, answer: 0", "prompt, answer"),
        ("def r(trajectory, prompt): pass", None),
        ("def r(sample, item): pass", None),
        ("def r(*args): pass", None),
        ("class r:\n    def __init__(self, prompt): pass\n    def __call__(self, trajectory, prompt): pass", None),
        ("def r(:", None),
    ],
)
def test_a_reward_whose_parameters_are_named_as_if_it_got_other_values_is_noted(modules, source, given):
    modules(rewarding=source)
    recipe = Recipe(reward=RewardConfig(function="rewarding:r"))
    said = f"rewarding:r: its parameters are ({given}), but it is called with (trajectory, prompt)."
    assert list(reward_warnings(recipe, "train")) == ([] if given is None else [("reward.function", said)])


SOURCE = """
import functools, other
from slimrl.api import EpisodeInfo, tool

def good(place: str, info: EpisodeInfo, corpus, *, most: int = 3) -> str:
    '''Look.

    Args:
        place: Where.
        most: How many.
    '''

@tool(pure=True)
def pure(n):
    '''Count.

    Args:
        n: To.
    '''

def bare(n: int): return n

def untold(n: int):
    '''Count to n.'''

def many(*words: str, **settings: str):
    '''Say.

    Args:
        words: What.
        settings: How.
    '''

@functools.cache
def decorated(n): pass

number = 7
text: str = f"{number}"
listed = [good]
late = None
try:
    import fast
    either = fast.either
except ImportError:
    either = None
made = other.make()

def set_late():
    global late
    late = good

def right(trajectory, prompt): return 1.0
def one(trajectory): return 1.0
def with_args(trajectory, prompt, words, pool: "SandboxPool", *, cap=1.0): return 1.0
def of_many(*everything): return 1.0
small = lambda trajectory: 1.0

class Reward:
    def __init__(self, words, supplies: "Supplies"): pass
    async def __call__(self, trajectory, prompt): return 1.0

class OneArgument:
    def __call__(self, trajectory): return 1.0

class Inherited(Reward): pass

def play(episode): pass
async def played(episode): pass
"""


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("good", []),
        ("decorated", []),
        ("late", []),
        ("either", []),
        ("made", []),
        ("pure", ["its parameter n has no annotation, from which the model is told its type."]),
        ("bare", ["has no docstring, from which the model is told what the tool does."]),
        ("untold", ["its docstring does not describe n in a section `Args:`."]),
        (
            "many",
            [
                f"has the parameter {each}, which no schema can describe to the model."
                for each in ("*words: str", "**settings: str")
            ],
        ),
        ("number", ["number is a value, not a function."]),
        ("text", ["text is a text, not a function."]),
        ("listed", ["listed is a list, not a function."]),
    ],
)
def test_tools_that_cannot_work_are_refused_from_their_source(modules, name, problems):
    modules(own=SOURCE)
    agent = AgentConfig(tools=[f"own:{name}"], tool_args={"corpus": "x"})
    reward = RewardConfig(function="own:right")
    found = [text for key, text in function_violations(Recipe(agent=agent, reward=reward), "train")]
    assert [text.removeprefix(f"own:{name}: ").replace("'", "") for text in found] == problems


def test_a_tool_that_is_given_twice_is_refused(modules):
    modules(own=SOURCE)
    agent = AgentConfig(
        tools=["own:good", "own:made", "own:good"], subagents={"helper": SubagentConfig(tools=["own:good"] * 2)}
    )
    agent.tool_args = {"corpus": "x"}
    reward = RewardConfig(function="own:right")
    assert list(function_violations(Recipe(agent=agent, reward=reward), "train")) == [
        ("agent.tools", "own:good: is given twice."),
        ("agent.subagents.helper.tools", "own:good: is given twice."),
    ]


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("right", {}, ""),
        ("with_args", {"words": 3}, ""),
        ("with_args", {"words": 3, "cap": 2.0}, ""),
        ("of_many", {}, ""),
        ("Reward", {"words": 3}, ""),
        ("Inherited", {"anything": 3}, ""),
        ("decorated", {}, ""),
        ("one", {}, "cannot be called with (trajectory, prompt): too many positional arguments."),
        ("small", {}, "cannot be called with (trajectory, prompt): too many positional arguments."),
        ("with_args", {}, "cannot be called with (trajectory, prompt): missing a required argument: 'words'."),
        (
            "right",
            {"cap": 1},
            "cannot be called with (trajectory, prompt, cap=...): got an unexpected keyword argument 'cap'.",
        ),
        ("Reward", {}, "cannot be called with (): missing a required argument: 'words'."),
        ("OneArgument", {}, "cannot be called with (trajectory, prompt): too many positional arguments."),
        ("number", {}, "number is a value, not a function."),
    ],
)
def test_rewards_that_cannot_be_called_are_refused_from_their_source(modules, name, args, problem):
    modules(own=SOURCE)
    part = RewardPartConfig(function=f"own:{name}", args=args)
    found = [text for _, text in function_violations(Recipe(reward=RewardConfig(parts={"a": part})), "train")]
    assert found == ([f"own:{name}: {problem}"] if problem else [])


SERVER = {"url": "http://h", "model": "m"}
JUDGE = {**SERVER, "rubric": "r"}
ENDPOINT = {"api_key_env": "KEY", "max_running": 4, "timeout_s": 1.0, "retries": 1}
COSINE = {"of": "slimrl.rewards.answers:ExactMatch", "max_tokens": 9}
UNEXPECTED = "got an unexpected keyword argument"
MISSING = "missing a required"


@pytest.mark.parametrize(
    ("path", "args", "problem"),
    [
        ("math:boxed_exact", {}, ""),
        ("math:boxed_exact", {"digits": 3}, f"{UNEXPECTED} 'digits'"),
        ("math:boxed_equivalent", {"digits": 3}, f"{UNEXPECTED} 'digits'"),
        ("answers:F1", {"answer_in": "boxed", "power": 1}, ""),
        ("answers:F1", {"answer": "boxed"}, f"{UNEXPECTED} 'answer'"),
        ("code:CodeTests", {"credit": "fraction"}, ""),
        ("code:CodeTests", {"credits": "fraction"}, f"{UNEXPECTED} 'credits'"),
        ("remote:Remote", {"url": "http://h", **ENDPOINT}, ""),
        ("remote:Remote", {"url": "http://h", "timeout": 3}, f"{UNEXPECTED} 'timeout'"),
        ("process:ProcessReward", {**SERVER, **ENDPOINT}, ""),
        ("process:ProcessReward", {**SERVER, "retry": 1}, f"{UNEXPECTED} 'retry'"),
        ("judge:Judge", {**JUDGE, **ENDPOINT, "with_label": True, "shown": "answer", "options": {}, "cache": ""}, ""),
        ("judge:Judge", {**JUDGE, "temperature": 0}, f"{UNEXPECTED} 'temperature'"),
        ("judge:Judge", SERVER, f"{MISSING} argument: 'rubric'"),
        ("length:CosineLength", COSINE, ""),
        ("length:CosineLength", {"of": COSINE["of"]}, f"{MISSING} argument: 'max_tokens'"),
        ("length:CosineLength", {**COSINE, "of_arg": {}}, f"{UNEXPECTED} 'of_arg'"),
        ("length:CosineLength", {**COSINE, "of_args": {"answer_in": "boxed"}}, ""),
        ("length:CosineLength", {**COSINE, "of_args": {"answer": "boxed"}}, f"{UNEXPECTED} 'answer'"),
        ("length:CosineLength", {**COSINE, "of": "slimrl.rewards.answers:Exact"}, "has no Exact"),
        ("calibration:Calibration", {"of": "slimrl.rewards.math:boxed_exact", "tags": "c"}, f"{UNEXPECTED} 'tags'"),
    ],
)
def test_arguments_of_our_own_rewards_are_refused_from_their_source_as_a_start_refuses_them(path, args, problem):
    part = RewardPartConfig(function=f"slimrl.rewards.{path}", args=args)
    found = [text for _, text in function_violations(Recipe(reward=RewardConfig(parts={"a": part})), "train")]
    assert bool(found) == bool(problem)
    assert all(problem in text for text in found)
    assert len(found) <= 1
    if problem:
        # What a start says of the same arguments.
        supplies = Supplies({SandboxPool: SandboxPool(SandboxConfig())})
        with pytest.raises(ValueError, match=re.escape(problem.removeprefix(MISSING).removeprefix(UNEXPECTED))):
            load_part("a", part, supplies=supplies)


def test_settings_that_rewards_hand_on_are_those_of_what_gets_them():
    taken = {each.name for each in signature(JsonEndpoint).parameters.values() if each.kind is each.KEYWORD_ONLY}
    assert EndpointSettings.__annotations__.keys() == taken
    of_judges = {name for name, each in signature(_Judging).parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert JudgeSettings.__annotations__.keys() - taken == of_judges


def test_other_functions_are_called_with_what_the_run_gives_them(modules):
    modules(own=SOURCE)
    recipe = Recipe(
        agent=AgentConfig(episode="own:play"), reward=RewardConfig(group={"g": RewardPartConfig(function="own:one")})
    )
    recipe.reward.group_filters = ["own:right"]
    recipe.algorithm.loss, recipe.algorithm.advantage = "own:one", "own:one"
    assert list(function_violations(recipe, "train")) == [
        ("agent.episode", "own:play: is not `async def`, which an episode is."),
        (
            "reward.group.g.function",
            "own:one: cannot be called with (trajectories, prompt): too many positional arguments.",
        ),
        (
            "algorithm.loss",
            "own:one: cannot be called with (tokens, settings, log_ratio_N): too many positional arguments.",
        ),
        (
            "reward.group_filters",
            "own:right: cannot be called with (trajectories): missing a required argument: 'prompt'.",
        ),
    ]
    recipe.agent.episode = "own:played"
    assert "agent.episode" not in dict(function_violations(recipe, "train"))


@pytest.mark.parametrize(
    ("wrong", "fits", "largest", "text"),
    [
        (5, {1, 4, 8, 16}, 16, " Use 4 or 8."),
        (5, {1, 4, 8, 16}, 7, " Use 4."),
        (5, {8, 16}, 8, " Use 8."),
        (5, {5}, 16, ""),
        (20, {1, 4, 16}, 16, " Use 16."),
        (2, {1, 3}, 3, " Use 1 or 3."),
        (1, {1, 0}, 4, ""),
        (3, {0}, 4, ""),
    ],
)
def test_the_nearest_sizes_that_fit_are_proposed(wrong, fits, largest, text):
    assert fitting_text(wrong, fits.__contains__, largest) == text


@pytest.mark.parametrize(
    ("size", "wrong", "text"), [(4, 10, " Use 8 or 12."), (4, 3, " Use 4."), (7, 20, " Use 14 or 21.")]
)
def test_the_nearest_multiples_are_proposed_and_never_nothing(size, wrong, text):
    assert multiples_text(size, wrong) == text
