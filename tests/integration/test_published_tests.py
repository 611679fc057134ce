"""Rows of published data sets of programs, read as a recipe reads them and judged in the real sandbox."""

import asyncio
import json

import pytest
from published_tests import IDLE, ITEMS, RIGHT, WRONG
from reward_cases import said
from sandboxes import needs_namespaces

from slimrl.agent.sandbox.pool import SandboxPool
from slimrl.config.schema.agent import SandboxConfig, SandboxLimits
from slimrl.data.prompts import read_prompts
from slimrl.rewards.code import CodeTests

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), needs_namespaces]


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="module")
def reward(runner):
    pool = SandboxPool(SandboxConfig(limits=SandboxLimits(wall_s=10.0, cpu_s=4)))
    yield CodeTests(sandbox=pool)
    runner.run(pool.close())


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.source}: {item.form}")
def test_a_published_row_pays_the_right_program_alone(runner, reward, tmp_path, item):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(item.row) + "\n")
    (prompt,) = read_prompts(file, item.keys)
    reward.check_prompt(prompt)
    paid = [
        runner.run(reward(said(f"So:\n```python\n{code}\n```\n"), prompt))
        for code in (item.right, item.wrong, item.idle)
    ]
    assert paid == [RIGHT, WRONG, IDLE]
