"""Settings and commands that the pages on tasks and agents name exist, and the settings take their values."""

from pathlib import Path

import pytest
from page_names import command_problem, commands_of, is_setting, refused_values, settings_of

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("new_task", "agents", "gateway", "chat", "rewards", "data_formats")


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_on_the_page_exists_and_takes_its_value(name):
    named = set(settings_of((DOCS / f"{name}.md").read_text()))
    assert named
    assert [key for key, _ in named if not is_setting(key)] == []
    assert refused_values(named) == []


def test_every_command_on_the_pages_exists():
    lines = [line for name in PAGES for line in commands_of((DOCS / f"{name}.md").read_text())]
    assert len(lines) > 20
    assert [problem for line in lines if (problem := command_problem(line))] == []
