"""The critic of a run: it estimates values and advantages for the policy's updates, and learns from the same updates.

Its ranks hold the same sequences as the policy's, packed for a layout of their own. What the two tell each other goes
from rank to rank: log-probs to the critic where the KL is in the reward, and advantages to the policy.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from slimrl.algorithms.selection import Selection
from slimrl.algorithms.token_advantages import charges_kl
from slimrl.algorithms.values import value_metrics, value_objective
from slimrl.config.critic import critic_recipe
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS
from slimrl.data.training import UpdateResult
from slimrl.data.trajectory import Trajectory
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.packed_updates import Update, make_updates
from slimrl.runtime.state import RunState, count_skipped


class Critic:
    """The critic's half of the learning; the driver calls it between the policy's passes."""

    def __init__(self, recipe: Recipe, ranks: TrainerGroup, state: RunState) -> None:
        """
        Args:
            recipe: the policy's.
            ranks: the critic's.
        """
        self._recipe, self._ranks, self._state = recipe, ranks, state
        self._updates: list[Update] = []
        self._results: list[UpdateResult] = []

    def put(self, selection: Selection) -> None:
        """Pack the trajectories of a step, with their rewards, for the critic's ranks."""
        own = replace(selection, trajectories=[_without_engine(trajectory) for trajectory in selection.trajectories])
        self._updates = make_updates(own, critic_recipe(self._recipe), self._ranks.layout)
        if self._updates:
            self._ranks.put_batches([update.batch for update in self._updates])

    def add_advantages(self, policy: TrainerGroup) -> None:
        """Estimate advantages and have the policy's ranks add them to their batches."""
        for number in range(len(self._updates)):
            if charges_kl(self._recipe.algorithm):
                policy.send(number, [OLD_LOGPROBS, REFERENCE_LOGPROBS], self._ranks)
            self._ranks.call(RankBatches.add_values, number)
            self._ranks.call(RankBatches.estimate, number, self._recipe.algorithm, self._recipe.critic)
            self._ranks.send(number, [ADVANTAGES], policy)

    def learn(self, number: int) -> None:
        """Do one optimizer update of the critic toward the returns.

        Raises:
            RunError: too many updates in a row had a gradient that was not finite.
        """
        loss = partial(value_objective, value_clip=self._recipe.critic.value_clip)
        num_tokens = self._updates[number].num_tokens
        self._ranks.call(RankBatches.accumulate, number, loss, denominator=num_tokens, temperature=1.0)
        result = self._ranks.call(RankBatches.step)
        count_skipped(self._state, result, self._recipe.critic.trainer.max_skipped_updates, critic=True)
        self._results.append(result)

    def finish(self) -> dict[str, float]:
        """Drop the batches; the metrics of the step's updates, empty if there were none."""
        results, self._results, self._updates = self._results, [], []
        if not results:
            return {}
        self._ranks.put_batches([])
        return {
            **value_metrics(_added([result.sums for result in results])),
            "critic/grad_norm": sum(result.grad_norm for result in results) / len(results),
            "critic/lr": results[-1].lr,
        }


def _without_engine(trajectory: Trajectory) -> Trajectory:
    """The trajectory without the large arrays that a critic does not read."""
    segments = [replace(segment, routed_experts=None, teacher_logprobs=None) for segment in trajectory.segments]
    return replace(trajectory, segments=segments)


def _added(sums: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(of_update[name] for of_update in sums) for name in sums[0]}
