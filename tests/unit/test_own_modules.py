"""What is said of the user's modules whose path is wrong, or whose name is one of Python's own."""

import pytest

from slimrl.agent.tools import tools_of
from slimrl.config.functions import absent_modules, function_violations
from slimrl.config.import_path import resolve
from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.recipe import Recipe


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with tasks/shop.py and random.py as the current one, which is searched first."""
    (tmp_path / "tasks").mkdir()
    for name in ("tasks/shop.py", "random.py", "math.py"):
        (tmp_path / name).write_text("def lookup(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def with_tools(*paths):
    return Recipe(agent=AgentConfig(tools=list(paths)))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("module", ["shop", "shops", "tasks.shp", "task.shop"])
def test_a_path_that_leads_to_no_module_is_answered_with_the_one_that_is_meant(module):
    said = f"{module}:lookup: no module {module}. Did you mean tasks.shop?"
    assert list(absent_modules(with_tools(f"{module}:lookup"), "train")) == [("agent.tools", said)]
    with pytest.raises(ValueError, match=r"Did you mean tasks\.shop\?"):
        resolve(f"{module}:lookup")


@pytest.mark.usefixtures("own")
def test_a_path_unlike_any_module_is_answered_with_none():
    said = "nowhere_at_all:f: no module nowhere_at_all."
    assert list(absent_modules(with_tools("nowhere_at_all:f"), "train")) == [("agent.tools", said)]


@pytest.mark.usefixtures("own")
def test_all_wrong_paths_of_tools_are_named_at_once():
    with pytest.raises(ValueError, match=r"^2 broken tools:\nshops:lookup: no module shops.*\nelsewhere:f: no module"):
        tools_of(["shops:lookup", "elsewhere:f"])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("module", ["random", "math"])
def test_a_file_with_the_name_of_a_module_of_pythons_own_must_be_renamed(module):
    said = f"{module} is Python's own module, which is found instead of {module}.py. Rename the file."
    violations = list(function_violations(with_tools(f"{module}:lookup"), "train"))
    assert violations == [("agent.tools", f"{module}:lookup: {said}")]
    with pytest.raises(ValueError, match=f"{module} is Python's own module.* Rename the file"):
        resolve(f"{module}:lookup")
    assert callable(resolve("math:floor"))
