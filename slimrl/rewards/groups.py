"""Rewards of a whole group: functions that get all trajectories of a prompt when the last of them has ended.

Failed trajectories are left out. A function returns one number for each of the others, which is added to the
trajectory's reward as a part. If it fails, all of them fail with its cause.
"""

from collections.abc import Sequence
from typing import Any

from slimrl.base.threads import call_task_code
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory
from slimrl.rewards.deadline import within
from slimrl.rewards.parts import Part, count_retry, failure
from slimrl.rewards.retries import Retries
from slimrl.rewards.scoring import finite_number


async def score_group(
    trajectories: Sequence[Trajectory], prompt: Prompt, parts: Sequence[Part], timeout_s: float, retries: Retries
) -> None:
    """Add the parts to the rewards of a prompt's trajectories, all of them or none.

    Args:
        trajectories: scored on their own, in a fixed order; failed ones may be among them.
        timeout_s: deadline of each part.

    Raises:
        PartFailed: a function raised, missed the deadline, or returned something else than one finite number for each
            trajectory.
    """
    scored = [trajectory for trajectory in trajectories if trajectory.status is not Status.failed]
    if not scored:
        return
    values = [await _values(part, scored, prompt, timeout_s, retries) for part in parts]
    for part, numbers in zip(parts, values, strict=True):
        for trajectory, number in zip(scored, numbers, strict=True):
            trajectory.reward += part.counted(number)
            # A new dict: a snapshot for a checkpoint may have the old one.
            by_role = trajectory.role_rewards
            trajectory.role_rewards = {role: own + part.counted(number) for role, own in by_role.items()}
            trajectory.rewards[part.name] = number


async def _values(
    part: Part, scored: Sequence[Trajectory], prompt: Prompt, timeout_s: float, retries: Retries
) -> list[float]:
    async def attempt() -> Any:
        return await call_task_code(part.function, scored, prompt)

    def on_retry() -> None:
        for trajectory in scored:
            count_retry(trajectory)

    try:
        call = retries.call(attempt, f"{prompt.prompt_id}: {part.title}", on_retry)
        values = list(await within(call, timeout_s, "no reward"))
        if len(values) != len(scored):
            raise ValueError(f"it returned {len(values)} numbers for {len(scored)} trajectories")
        return [finite_number(value, part.name) for value in values]
    except Exception as error:
        # A task's own code may raise anything; the group fails with this cause.
        raise failure(part, error) from error
