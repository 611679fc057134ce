"""What turns scored trajectories into optimizer updates: selection, old log-probs, training."""

from collections.abc import Sequence

from slimrl.config.schema import Recipe
from slimrl.data.packing import is_split
from slimrl.data.training import UpdateResult
from slimrl.data.trajectory import Trajectory
from slimrl.runtime.batch import (
    UpdateBatch,
    fill_elsewhere,
    fill_old_logprobs,
    make_updates,
    mismatch_metrics,
    num_sampled_tokens,
    select,
)
from slimrl.runtime.errors import RunError
from slimrl.runtime.state import RunState
from slimrl.runtime.step import Step, policy_metrics, update_metrics
from slimrl.runtime.task import GroupFilter
from slimrl.runtime.trainer_group import TrainerGroup


class Learner:
    """The learning half of a step; it needs no engine."""

    def __init__(
        self, recipe: Recipe, trainers: TrainerGroup, state: RunState, group_filters: Sequence[GroupFilter]
    ) -> None:
        self._recipe, self._trainers, self._state = recipe, trainers, state
        self._group_filters = group_filters

    def prepare(self, step: Step, trajectories: Sequence[Trajectory]) -> list[UpdateBatch]:
        """Chosen, given advantages and packed; empty where no trajectory has anything to teach."""
        selection = select(trajectories, self._recipe, self._group_filters)
        step.record({"rollout/zero_variance_fraction": selection.zero_variance_fraction})
        return make_updates(selection, self._recipe, self._trainers.layout)

    def compute_old_logprobs(self, step: Step, updates: Sequence[UpdateBatch], *, enforce_limit: bool = True) -> None:
        """Fills in the log-probs of the current policy and measures their distance from the engines'.

        Args:
            enforce_limit: False where the trajectories are known to be of an older policy.

        Raises:
            RunError: the distance is above `algorithm.max_logprob_mismatch`.
        """
        routing = self._recipe.rollout.routed_experts
        for update in updates:
            results = self._trainers.compute_logprobs(update.parts, self._temperature, routing=routing)
            fill_old_logprobs(update, results)
        if not updates:
            return
        metrics = mismatch_metrics(updates)
        tokens = sum(map(num_sampled_tokens, updates))
        step.record({**metrics, "policy/entropy": sum(update.entropy_sum for update in updates) / tokens})
        limit, found = self._recipe.algorithm.max_logprob_mismatch, metrics["mismatch/logprob_abs_mean"]
        if enforce_limit and not found <= limit:
            raise RunError(
                f"step {step.number}: trainer and engines disagree by {found:.2e} per token on average; "
                f"algorithm.max_logprob_mismatch is {limit:.2e}"
            )

    def train(self, step: Step, updates: Sequence[UpdateBatch]) -> None:
        """One optimizer update per batch.

        Raises:
            RunError: too many updates in a row had a gradient that was not finite.
        """
        results = []
        for number, update in enumerate(updates):
            # Before the first update the policy is the old one, and nothing lies elsewhere.
            if number > 0 and is_split(update.parts):
                fill_elsewhere(update, self._trainers.compute_logprobs(update.parts, self._temperature))
            result = self._trainers.train_update(
                update.parts, "policy", denominator=update.num_trajectories, temperature=self._temperature
            )
            count_skipped(self._state, result, self._recipe.trainer.max_skipped_steps)
            results.append(result)
        if results:
            step.record({**update_metrics(results), **policy_metrics(results)})
        step.record({"train/skipped_steps": self._state.skipped_steps})

    @property
    def _temperature(self) -> float:
        return self._recipe.rollout.sampling.temperature


def count_skipped(state: RunState, result: UpdateResult, limit: int) -> None:
    """Keeps count of the updates that were skipped.

    Raises:
        RunError: `limit` in a row were.
    """
    if not result.skipped:
        state.skipped_in_a_row = 0
        return
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    if state.skipped_in_a_row >= limit:
        raise RunError(
            f"{state.skipped_in_a_row} optimizer updates in a row had a gradient norm of {result.grad_norm}; "
            "trainer.max_skipped_steps stops the run here"
        )
