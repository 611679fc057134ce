"""docs/debugging.md names metrics, settings, files, commands and messages as they are."""

import ast
import re
from functools import cache
from pathlib import Path

from page_names import code_of, command_problem, commands_of, is_setting, refused_values, settings_of

from slimrl.observability.metrics import METRIC_NAMES, is_metric
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster.engine_actor import actor_log

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "debugging.md").read_text()
HOLE = "..."
"""What the page writes for the varying parts of a message."""


def test_every_metric_on_the_page_exists():
    sections = "|".join({name.partition("/")[0] for name in METRIC_NAMES if "/" in name})
    named = {code for code in code_of(PAGE) if re.fullmatch(rf"({sections})/[\w/<>]+", code)}
    assert len(named) > 50
    assert [name for name in named if name not in METRIC_NAMES and not is_metric(name)] == []


def test_every_setting_on_the_page_exists_and_takes_its_value():
    named = set(settings_of(PAGE))
    assert len(named) > 90
    assert [key for key, _ in named if not is_setting(key)] == []
    assert refused_values(named) == []


def test_every_command_on_the_page_exists():
    lines = commands_of(PAGE)
    assert len(lines) > 10
    assert [problem for line in lines if (problem := command_problem(line))] == []


def test_the_files_of_a_run_s_folder_have_these_names():
    run = RunFolder(Path())
    engine = actor_log(0, 0).removesuffix("_actor.log")
    files = [
        *(run.metrics, run.groups, run.config, run.resumed_config, run.provenance, run.failed_file),
        *(run.not_finite_file(12, 1), run.left_out),
        *(run.sample_file(1), run.curve, run.profile / "trace.json"),
        *(run.log_file(name) for name in ("driver", "trainer_0", "critic_0", "episodes_0")),
        *(run.log_file(name) for name in (engine, f"{engine}_start_1", f"{engine}_actor")),
    ]
    kinds = r"(log|jsonl|json|yaml|png)"
    named = {code for code in code_of(PAGE) if re.fullmatch(rf"((logs|trajectories|profile)/)?[\w.]+\.{kinds}", code)}
    assert len(named) > 12
    assert named - {str(file) for file in files} == set()


def test_every_message_on_the_page_is_one_that_slimrl_prints():
    messages = [code for code in code_of(PAGE) if HOLE in code and " " in code]
    assert len(messages) > 12
    for message in messages:
        parts = [part for part in message.split(HOLE) if part.strip(" :")]
        assert any(_has_all(text, parts) for text in texts()), message


def _has_all(text: str, parts: list[str]) -> bool:
    """Whether the parts stand in the text, in their order."""
    at = 0
    for part in parts:
        if (found := text.find(part.strip(), at)) < 0:
            return False
        at = found + len(part.strip())
    return True


@cache
def texts() -> list[str]:
    """Every text in slimrl's source; where a value is put into one, it has a hole."""
    return [
        text
        for path in (ROOT / "slimrl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (text := _text(node)) is not None
    ]


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(value.value if isinstance(value, ast.Constant) else HOLE for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
