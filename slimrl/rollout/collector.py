"""Runs many episodes at once and collects their trajectories in a fixed order.

1. Each prompt gives `samples_per_prompt` trajectories, whose ids and seeds follow from the prompt, step and sample.
2. Each is one coroutine; a semaphore bounds how many are under way.
3. A finished trajectory is scored. The result is ordered by prompt and sample, whatever finished first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from slimrl.data.seeds import derive_seed
from slimrl.data.trajectory import Prompt, Trajectory


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """One trajectory to be made."""

    prompt: Prompt
    trajectory_id: str
    seed: int


def episode_requests(
    prompts: Sequence[Prompt], *, samples_per_prompt: int, label: str, seed: int
) -> list[EpisodeRequest]:
    """Requests in order of prompt and sample.

    Args:
        label: what this batch is, for example `step_000012`; part of every trajectory id, so that ids are unique.
        seed: the run's seed; a trajectory's seed is derived from it and the trajectory's id.
    """
    requests = []
    for position, prompt in enumerate(prompts):
        for sample in range(samples_per_prompt):
            trajectory_id = f"{label}/{position:05d}/{sample:03d}"
            requests.append(
                EpisodeRequest(
                    prompt=prompt, trajectory_id=trajectory_id, seed=derive_seed(seed, "trajectory", trajectory_id)
                )
            )
    return requests


async def collect(
    requests: Sequence[EpisodeRequest],
    run_episode: Callable[[EpisodeRequest], Awaitable[Trajectory]],
    *,
    max_concurrency: int,
    on_done: Callable[[Trajectory], None],
) -> list[Trajectory]:
    """Trajectories in the order of the requests.

    An exception of one episode (a fault of ours, since the failure of an engine, a tool or a reward is a status)
    cancels the others and is raised.
    """
    slots = asyncio.Semaphore(max_concurrency)

    async def one(request: EpisodeRequest) -> Trajectory:
        async with slots:
            trajectory = await run_episode(request)
        on_done(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
