"""mini-swe-agent as it is, on a task of software repair, before a scripted policy."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from broken_package import HOOK, PROMPT, REPAIR, write_tasks
from gateway_agents import ScriptedEngine, runner_of

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.load import read_recipe
from slimrl.config.schema.agent import SandboxConfig
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rollout.task.environment import load_agent

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "qwen3" / "qwen3_8b_gspo_mini_swe_agent.yaml"
VENV = Path(sys.prefix) / "clients" / "python"
"""Takes the place of the recipe's"""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (VENV / "bin/mini").exists(), reason="no mini-swe-agent; `make test-clients` installs it"),
]


def call(command: str) -> str:
    said = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"I run it.\n<tool_call>\n{said}\n</tool_call><|im_end|>"


async def played(pool: SandboxPool, folder: Path, *commands: str) -> Trajectory:
    """What comes of the shipped recipe's agent before a policy that runs the commands and submits."""
    loaded, problems = read_recipe(RECIPE, [], "train")
    assert loaded is not None, problems
    config = loaded.recipe.agent
    config.command = [word.replace("/opt/mini-swe-agent", str(VENV)) for word in config.command]
    config.command_env = {
        name: text.replace("/opt/mini-swe-agent", str(VENV)) for name, text in config.command_env.items()
    }
    config.command_sandbox.paths = [os.path.realpath(VENV), str(VENV)]
    config.command_task_args = {**config.command_task_args, "folder": str(folder), "reward": "resolved"}
    engine = ScriptedEngine([call(command) for command in (*commands, SUBMIT)])
    runner = runner_of(engine, load_agent(config, pool), max_trajectory_tokens=1_000_000, trajectory_timeout_s=100.0)
    await runner.start()
    try:
        sampling = SamplingConfig(max_new_tokens=4096)
        return await runner.run(PROMPT, trajectory_id="t:1", sampling=sampling, seed=0)
    finally:
        await runner.stop()


async def test_it_repairs_and_cannot_cheat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    folder = write_tasks(tmp_path)
    pool = SandboxPool(SandboxConfig(packages=["pytest"]))
    look = "ls tests; python3 -m pytest -q 2>&1 | tail -1"
    hook = f"cat > conftest.py <<'END'\n{HOOK}\nEND\nprintf 'def test_total():\\n    pass\\n' > tests/test_total.py"
    try:
        repaired, idle, cheated = await asyncio.gather(
            played(pool, folder, look, REPAIR), played(pool, folder), played(pool, folder, hook)
        )
    finally:
        await pool.close()
    rewards = []
    for trajectory in (repaired, idle, cheated):
        assert trajectory.status is Status.completed, trajectory.metadata
        assert len(trajectory.segments) == 1
        rewards.append(trajectory.scratch["posted_reward"])
    assert rewards == [1.0, 0.0, 0.0]
    asked, seen = (
        next(one["content"] for one in repaired.messages if one["role"] == role) for role in ("user", "tool")
    )
    assert "total([1, 2]) is 2\n\nThe current folder holds the package's code, without the tests" in asked
    output = json.loads(seen)["output"].split("\n")
    assert (output[0], output[1][:8]) == ("test_mean.py", "1 passed")
