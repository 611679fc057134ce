"""The game of docs/new_task.md, word for word: its files are written, its commands run, and the policy learns it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.observability.metrics import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
MODULES = {"python": [], "slimrl": ["-m", "slimrl.cli"], "slimrl-tools": ["-m", "slimrl_tools.cli"]}
COMMAND_S = 600.0


def files_and_commands(page: str) -> tuple[dict[str, str], list[str]]:
    """The blocks of a section: those with a language are files, named last before the block; others are commands."""
    text, *rest = re.split(r"```(.*)\n", page)
    files, commands = {}, []
    for place in range(0, len(rest), 4):
        language, block, _, after = rest[place : place + 4]
        if language:
            files[re.findall(r"`(\w+\.\w+)`", text)[-1]] = block
        else:
            commands += block.splitlines()
        text = after
    return files, commands


def test_the_page_leads_from_nothing_to_a_curve_that_rises(tmp_path: Path):
    game = (ROOT / "docs/new_task.md").read_text().partition("\n## A game")[2].partition("\n## ")[0]
    files, commands = files_and_commands(game)
    assert list(files) == ["sticks.py", "make_data.py", "sticks.yaml"]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    said = {}
    for command in commands:
        program, *arguments = shlex.split(command)
        run = [sys.executable, *MODULES[program], *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said[" ".join([program, *arguments[:1]])] = done.stdout
    assert "ok for slimrl train" in said["slimrl config"]
    assert re.search(r"\d+ left", said["slimrl inspect-chat"].replace("\n", " "))
    steps = read_metrics(tmp_path / "runs/sticks/metrics.jsonl")
    won = [step["eval/heldout/reward_mean"] for step in steps if "eval/heldout/reward_mean" in step]
    # By chance about half of the games are won; 96 are played in each evaluation.
    assert won[-1] > won[0] + 0.15, won
    assert all("env/won" in step and "env/illegal" in step for step in steps[1:])
    for image in ("sticks.png", "runs/sticks/curve.png"):
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "after.json").read_text())["sets"]["heldout"]
    assert result["reward_mean"] == pytest.approx(won[-1], abs=0.15)
