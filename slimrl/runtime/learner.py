"""From scored trajectories to optimizer updates: selection, what the updates need of the old policy, training."""

from collections.abc import Sequence

from slimrl.algorithms.mismatch import LogProbReport, entropy_mean, mismatch_metrics
from slimrl.algorithms.objective import denominator
from slimrl.algorithms.passes import needs_old, needs_reference, needs_sums
from slimrl.algorithms.replay_gap import replay_gap_is_due, replay_gap_metrics
from slimrl.algorithms.selection import Selection, deal, select
from slimrl.algorithms.token_advantages import has_token_advantages
from slimrl.config.schema import Recipe
from slimrl.data.packing import (
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    PackedBatch,
    is_split,
    num_sampled,
    num_trajectories,
    pack_for,
)
from slimrl.data.training import Layout, UpdateResult
from slimrl.data.trajectory import Trajectory
from slimrl.runtime.checks.task import GroupFilter
from slimrl.runtime.cluster.errors import RunError
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.group_filters import GroupFilters
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step, policy_metrics, update_metrics


class Learner:
    """The learning half of a step; it needs no engine."""

    def __init__(
        self, recipe: Recipe, trainers: TrainerGroup, state: RunState, group_filters: Sequence[GroupFilter]
    ) -> None:
        self._recipe, self._trainers, self._state = recipe, trainers, state
        self._keeps = GroupFilters(recipe.reward.group_filters, group_filters)
        self._reports: dict[int, list[LogProbReport]] = {}
        """By update, on the log-probs of the policy before the first one"""

    def prepare(self, step: Step, trajectories: Sequence[Trajectory]) -> list[PackedBatch]:
        """Select trajectories, pack them into updates and put these on the ranks; empty if nothing is selected.

        Raises:
            RunError: a group filter failed; it is named.
        """
        selection = select(trajectories, self._recipe.algorithm, self._keeps, step=step.number)
        step.record({"rollout/zero_variance_fraction": selection.zero_variance_fraction})
        updates = make_updates(selection, self._recipe, self._trainers.layout)
        if updates:
            with step.timed("logprobs"):
                self._trainers.put_batches(updates)
        return updates

    def compute_inputs(self, step: Step, updates: Sequence[PackedBatch]) -> None:
        """Have the ranks store what the updates need of the policy before the first of them, and of the reference."""
        self._reports = {}
        for number in range(len(updates)):
            if needs_old(self._recipe, number):
                routing = self._recipe.rollout.routed_experts
                self._reports[number] = self._trainers.add_logprobs(
                    number, OLD_LOGPROBS, self._temperature, routing=routing
                )
            if needs_reference(self._recipe):
                self._trainers.add_logprobs(number, REFERENCE_LOGPROBS, self._temperature)
        if updates and replay_gap_is_due(self._recipe.algorithm, step.number):
            own = [self._trainers.report_own_routing(number, self._temperature) for number in range(len(updates))]
            step.record(replay_gap_metrics([report for of_update in own for report in of_update]))
        if updates and has_token_advantages(self._recipe.algorithm):
            self._trainers.add_advantages(self._recipe.algorithm)

    def train(self, step: Step, updates: Sequence[PackedBatch], *, enforce_limit: bool = True) -> None:
        """One optimizer update per batch; afterwards the ranks drop the batches.

        Args:
            enforce_limit: False if the trajectories are of an older policy.

        Raises:
            RunError: the mean difference between the trainer's and the engines' log-probs is above
                `algorithm.max_logprob_mismatch`, or too many updates in a row had a gradient that was not finite.
        """
        algorithm, results = self._recipe.algorithm, []
        for number, batch in enumerate(updates):
            if needs_sums(algorithm, number) and is_split(batch):
                self._trainers.set_remote(number, algorithm, self._temperature)
            found = self._trainers.accumulate(
                number,
                "policy",
                denominator=self._denominator(batch),
                temperature=self._temperature,
                entropy_coef=self._state.entropy_coef(algorithm),
                logprobs=number == 0 and 0 not in self._reports,
            )
            if number == 0:
                self._reports.setdefault(0, found)
                self._measure(step, enforce_limit)
            result = self._trainers.step()
            count_skipped(self._state, result, self._recipe.trainer.max_skipped_updates)
            results.append(result)
        if results:
            self._trainers.put_batches([])
            step.record({**update_metrics(results), **policy_metrics(results)})
            self._state.adapt_entropy_coef(algorithm, step.metrics["policy/entropy"])
        step.record({"train/skipped_steps": self._state.skipped_steps})

    def _measure(self, step: Step, enforce_limit: bool) -> None:
        """How far the engines' log-probs are from the trainer's, of all updates for which they are known.

        Raises:
            RunError: too far.
        """
        reports = [self._reports[number] for number in sorted(self._reports)]
        metrics = mismatch_metrics([report for of_update in reports for report in of_update])
        step.record({**metrics, "policy/entropy": entropy_mean(reports)})
        limit, found = self._recipe.algorithm.max_logprob_mismatch, metrics["mismatch/logprob_abs_mean"]
        if enforce_limit and not found <= limit:
            raise RunError(
                f"step {step.number}: trainer and engines disagree by {found:.2e} per token on average; "
                f"algorithm.max_logprob_mismatch is {limit:.2e}"
            )

    def _denominator(self, batch: PackedBatch) -> float:
        return denominator(
            self._recipe.algorithm.aggregation,
            num_trajectories=num_trajectories(batch),
            num_tokens=num_sampled(batch),
            length=self._recipe.rollout.max_trajectory_tokens,
        )

    @property
    def _temperature(self) -> float:
        return self._recipe.rollout.sampling.temperature


def make_updates(selection: Selection, recipe: Recipe, layout: Layout) -> list[PackedBatch]:
    """One packed batch for each optimizer update of a rollout."""
    trajectories, by_turn = selection.trajectories, selection.turn_advantages
    return [
        pack_for(
            recipe.trainer,
            layout,
            [trajectories[i].segments for i in chosen],
            selection.advantages[chosen],
            None if by_turn is None else [by_turn[i] for i in chosen],
        )
        for chosen in deal(trajectories, recipe.trainer.updates_per_rollout)
    ]


def count_skipped(state: RunState, result: UpdateResult, limit: int) -> None:
    """Count skipped updates.

    Raises:
        RunError: `limit` updates in a row were skipped.
    """
    if not result.skipped:
        state.skipped_in_a_row = 0
        return
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    if state.skipped_in_a_row >= limit:
        raise RunError(
            f"{state.skipped_in_a_row} optimizer updates in a row had a gradient norm of {result.grad_norm}; "
            "trainer.max_skipped_updates stops the run here"
        )
