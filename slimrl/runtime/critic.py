"""The critic of a run: it estimates values and advantages for the policy's updates, and learns from the same updates.

Its ranks hold the same sequences as the policy's, packed for a layout of their own. What the two tell each other goes
from rank to rank: log-probs to the critic where the KL is in the reward, and advantages to the policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from slimrl.algorithms.not_finite import CRITIC_VALUES
from slimrl.algorithms.selection import Selection
from slimrl.algorithms.token_advantages import charges_kl
from slimrl.algorithms.values import value_metrics, value_objective
from slimrl.config.critic import critic_recipe
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS
from slimrl.data.training import UpdateResult
from slimrl.data.trajectory import Trajectory
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.not_finite import SkippedUpdates, Work, owners_of
from slimrl.runtime.packed_updates import Update, make_updates
from slimrl.runtime.state import RunState


class Critic:
    """The critic's half of the learning; the driver calls it between the policy's passes."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: TrainerGroup,
        state: RunState,
        say: Callable[[str], None],
        folder: RunFolder | None,
    ) -> None:
        """
        Args:
            recipe: the policy's.
            ranks: the critic's.
            say, folder: as of SkippedUpdates.
        """
        self._recipe, self._ranks = recipe, ranks
        limit = recipe.critic.trainer.max_skipped_updates
        self._skipped = SkippedUpdates(ranks, state, limit, say, folder, critic=True)
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

    def learn(self, number: int, step: int, part: str) -> None:
        """Do one optimizer update of the critic toward the returns.

        Args:
            part: which update of the step it is, for the user.

        Raises:
            NotFinite: as SkippedUpdates.count.
        """
        update = self._updates[number]
        work = Work(
            number=number,
            batch=update.batch,
            owners=owners_of(update),
            loss=partial(value_objective, value_clip=self._recipe.critic.value_clip),
            denominator=update.num_tokens,
            temperature=1.0,
            output=CRITIC_VALUES,
        )
        self._ranks.call(
            RankBatches.accumulate, number, work.loss, denominator=work.denominator, temperature=work.temperature
        )
        result = self._ranks.call(RankBatches.step)
        self._skipped.count(result, step, f"{part} of the critic", work)
        self._results.append(result)

    def finish(self, step: int) -> dict[str, float]:
        """Drop the batches; the metrics of the step's updates, empty if there were none.

        Raises:
            NotFinite: the weights are not finite.
        """
        results, self._results, self._updates = self._results, [], []
        if not results:
            return {}
        self._skipped.check_weights(step)
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
