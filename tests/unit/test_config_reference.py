"""The reference page of all settings is that of the schema."""

import dataclasses
from pathlib import Path

from typer.testing import CliRunner

from slimrl.cli import app
from slimrl.config.keys import KEY_TYPES, is_section
from slimrl.config.reference import reference_page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current_and_the_command_prints_it():
    page = reference_page()
    assert PAGE.read_text() == page, "run: slimrl config schema > docs/configuration.md"
    assert CliRunner().invoke(app, ["config", "schema"]).stdout == page


def test_every_setting_has_a_row_with_what_it_means():
    rows = [line.split(" | ") for line in reference_page().splitlines() if line.startswith("| `")]
    settings = [key for key, kind in KEY_TYPES.items() if not dataclasses.is_dataclass(kind)]
    named = {row[0].strip("| `") for row in rows if len(row) >= 4}
    # One row stands for all settings of the critic's trainer.
    assert {key.rpartition(".")[2] for key in (*settings, "critic.trainer")} == named
    assert any(is_section(key) for key in KEY_TYPES)
    assert [row[0] for row in rows if not row[-1].strip(" |")] == []


def test_settings_of_one_section_used_twice_have_the_defaults_of_their_place():
    sections = reference_page().split("\n## ")
    rows = {section.splitlines()[0]: section for section in sections}
    assert "| `temperature` | `float` | `1.0` |" in rows["rollout.sampling"]
    assert "| `temperature` | `float` | `0.0` |" in rows["rollout.eval_sampling"]


def test_the_critic_s_trainer_is_a_reference_to_the_trainer_s_settings():
    sections = {section.splitlines()[0]: section for section in reference_page().split("\n## ")}
    assert "| `trainer` | [trainer](#trainer) | those of `trainer` |" in sections["critic"]
    assert not [name for name in sections if name.startswith("critic.")]
