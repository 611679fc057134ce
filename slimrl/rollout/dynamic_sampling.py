"""The rollouts of one step: further prompts replace zero-variance groups (docs/algorithms.md#dynamic-sampling).

1. A rollout takes `oversampling` times as many prompts as groups are missing, at first `rollout.prompts_per_step`.
2. A group is useful if the selection keeps some of its trajectories, and their advantages are not all 0.
3. While groups are missing and `max_refills` is not reached, another rollout follows.
4. The first `rollout.prompts_per_step` useful groups are kept, in the order of their prompts. Others are
   dropped: in the next step they would be of an older policy.

Nothing is kept for the next step but the position in the data and the results of prompts, both part of the run's state.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slimrl.algorithms.advantages import groups_of
from slimrl.algorithms.prompt_values import PromptValues
from slimrl.algorithms.selection import select
from slimrl.algorithms.shaping import shape_rewards
from slimrl.base.seeds import derive_seed
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.recipe import Recipe
from slimrl.data.mixture import DataOrder
from slimrl.data.trajectory import Prompt, Status, Trajectory
from slimrl.rollout.stage import RolloutStage


@dataclass(kw_only=True)
class StepRollout:
    """The trajectories of a step; their rewards are shaped."""

    sampled: list[Trajectory] = field(default_factory=list)
    """All trajectories that were sampled, in the order of rollouts and prompts"""
    kept: list[Trajectory] = field(default_factory=list)
    """The trajectories that the learner gets"""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the refill, if there may be one, or of the rollout service"""
    seconds: float = 0.0
    """Duration of the rollout"""


class StepSampler:
    """Makes the rollouts of steps."""

    def __init__(
        self,
        recipe: Recipe,
        data: DataOrder[Prompt],
        prompts: Sequence[Prompt],
        stage: RolloutStage,
        keeps: Callable[[list[Trajectory]], bool],
        tried: dict[str, list[float]],
    ) -> None:
        """
        Args:
            data: the order of the prompts that every step starts with.
            prompts: all prompts of the training data.
            keeps: the task's group filters.
            tried: results of prompts so far, see PromptValues; changed when all rollouts of a step are complete.
        """
        self._recipe, self._data, self._prompts, self._stage, self._keeps = recipe, data, prompts, stage, keeps
        self._settings = recipe.algorithm.dynamic_sampling
        self._values = PromptValues(self._settings, tried)

    def rollout(self, step: int, check_cancelled: Callable[[], None]) -> StepRollout:
        """The rollouts of a step; raises as RolloutStage.rollout."""
        start = time.monotonic()
        batch = self._sampled(step, check_cancelled)
        batch.seconds = time.monotonic() - start
        return batch

    def _sampled(self, step: int, check_cancelled: Callable[[], None]) -> StepRollout:
        label, wanted = f"step_{step:06d}", self._recipe.rollout.prompts_per_step
        if self._settings.refill is RefillMode.off:
            sampled = self._stage.rollout(self._data.take(wanted), label=label, check_cancelled=check_cancelled)
            shape_rewards(sampled, self._recipe.algorithm)
            return StepRollout(sampled=sampled, kept=sampled)
        batch = StepRollout()
        useful: list[str] = []
        for number in range(self._settings.max_refills + 1):
            prompts = self._next_prompts(step, number, wanted - len(useful), batch)
            if not prompts:
                break
            if number == 0:
                new = self._stage.rollout(prompts, label=label, check_cancelled=check_cancelled)
            else:
                name = f"{label}/refill_{number}"
                new = self._stage.rollout(prompts, label=name, check_cancelled=check_cancelled, earlier=batch.sampled)
            shape_rewards(new, self._recipe.algorithm)
            batch.sampled += new
            useful = self._useful_groups(batch.sampled, step)
            batch.metrics["rollout/refills"] = number
            if len(useful) >= wanted:
                break
        kept = set(useful[:wanted])
        batch.kept = [t for t in batch.sampled if t.group_id in kept]
        batch.metrics |= {
            "rollout/groups_sampled": len({t.group_id for t in batch.sampled}),
            "rollout/groups_useful": len(useful),
            "rollout/groups_kept": len(kept),
        }
        if self._settings.refill is RefillMode.value:
            self._values.update(_rewards_by_prompt(batch.sampled))
        return batch

    def _next_prompts(self, step: int, number: int, missing: int, batch: StepRollout) -> list[Prompt]:
        """The prompts of rollout `number` of a step."""
        count = math.ceil(self._settings.oversampling * missing)
        if number == 0 or self._settings.refill is RefillMode.order:
            return self._data.take(count)
        used = {t.group_id for t in batch.sampled}
        others = [prompt for prompt in self._prompts if prompt.prompt_id not in used]
        seed = derive_seed(self._recipe.seed, "refill", step, number)
        return [others[i] for i in self._values.draw([prompt.prompt_id for prompt in others], count, seed)]

    def _useful_groups(self, trajectories: Sequence[Trajectory], step: int) -> list[str]:
        """Ids of the useful groups, in order."""
        groups = groups_of([t.group_id for t in trajectories])
        return [
            group_id
            for group_id, members in groups.items()
            if select([trajectories[i] for i in members], self._recipe.algorithm, self._keeps, step=step).is_useful
        ]


def _rewards_by_prompt(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    scored = [t for t in trajectories if t.status is not Status.failed]
    return {
        group_id: [scored[i].reward for i in members]
        for group_id, members in groups_of([t.group_id for t in scored]).items()
    }
