"""Functions that a recipe names, looked up in sources of every form; and the numbers that a refusal proposes."""

import ast
import importlib
import re

import pytest

from slimrl.config.functions import _defined_names, _find, absent_modules, function_violations
from slimrl.config.problems import fitting_text, multiples_text
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.reward import RewardConfig
from slimrl.data.import_path import resolve


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
    modules(own="class C: pass\ndef right(): pass\ndef _hidden(): pass\nmade = C()\n")
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
