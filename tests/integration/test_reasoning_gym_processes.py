"""Scorers of reasoning-gym in processes of their own: bounded in CPU time, and gone when the reward is closed."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from slimrl_tools.prepare.reasoning_gym import prepare_tasks

from slimrl.data.prompts import read_prompts
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.reasoning_gym import ReasoningGym
from slimrl.rewards.scoring import score

pytest.importorskip("reasoning_gym")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SLOW = "9**9**9**9"
"""A formula that no machine evaluates"""


def said(text: str) -> Trajectory:
    return Trajectory(
        group_id="g", trajectory_id="g/0", segments=[], status=Status.completed,
        messages=[{"role": "assistant", "content": text}],
    )  # fmt: skip


def test_answers_are_scored_beside_one_that_never_ends_and_the_processes_end_with_the_reward(tmp_path: Path):
    prepare_tasks("gcd,countdown", tmp_path, num=6, heldout=2, seed=0)
    gcd, countdown = (read_prompts(tmp_path / task / "train.jsonl") for task in ("gcd", "countdown"))
    reward = ReasoningGym()
    for prompt in (*gcd, *countdown):
        reward.check_prompt(prompt)
    asked = [(prompt, said(f"It is \\boxed{{{prompt.label}}}.")) for prompt in gcd]
    asked += [(countdown[0], said(f"\\boxed{{{SLOW}}}")), (gcd[0], said("\\boxed{-1}"))]

    async def score_all() -> None:
        await asyncio.gather(*(score(trajectory, prompt, reward, 120.0) for prompt, trajectory in asked))

    asyncio.run(score_all())
    assert [trajectory.reward for _, trajectory in asked] == [1.0] * 6 + [0.0, 0.0]
    assert [bool(t.metadata.get("reward_timed_out")) for _, t in asked] == [False] * 6 + [True, False]
    pids = reward._processes.pids
    assert 1 <= len(pids) <= min(8, len(os.sched_getaffinity(0)))
    asyncio.run(reward.close())
    assert not any(psutil.pid_exists(pid) for pid in pids)
