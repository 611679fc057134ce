"""From scored trajectories to optimizer updates: selection, old log-probs, training."""

from collections.abc import Sequence

from slimrl.algorithms.mismatch import entropy_mean, mismatch_metrics
from slimrl.algorithms.replay_gap import replay_gap_is_due, replay_gap_metrics
from slimrl.algorithms.selection import Selection, deal, select
from slimrl.config.schema import Recipe
from slimrl.data.packing import OLD_LOGPROBS, PackedBatch, is_split, num_trajectories, pack_for
from slimrl.data.training import Layout, UpdateResult
from slimrl.data.trajectory import Trajectory
from slimrl.runtime.checks.task import GroupFilter
from slimrl.runtime.cluster.errors import RunError
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step, policy_metrics, update_metrics


class Learner:
    """The learning half of a step; it needs no engine."""

    def __init__(
        self, recipe: Recipe, trainers: TrainerGroup, state: RunState, group_filters: Sequence[GroupFilter]
    ) -> None:
        self._recipe, self._trainers, self._state = recipe, trainers, state
        self._group_filters = group_filters

    def prepare(self, step: Step, trajectories: Sequence[Trajectory]) -> list[PackedBatch]:
        """Select trajectories, pack them into updates and put these on the ranks; empty if nothing is selected.

        Raises:
            RunError: a group filter failed; it is named.
        """
        selection = select(trajectories, self._recipe.algorithm, self._keeps)
        step.record({"rollout/zero_variance_fraction": selection.zero_variance_fraction})
        updates = make_updates(selection, self._recipe, self._trainers.layout)
        if updates:
            with step.timed("logprobs"):
                self._trainers.put_batches(updates)
        return updates

    def compute_old_logprobs(self, step: Step, updates: Sequence[PackedBatch], *, enforce_limit: bool = True) -> None:
        """Have the ranks store the log-probs of the current policy, and measure how far the engines' are from them.

        Args:
            enforce_limit: False if the trajectories are of an older policy.

        Raises:
            RunError: the mean difference is above `algorithm.max_logprob_mismatch`.
        """
        if not updates:
            return
        routing = self._recipe.rollout.routed_experts
        reports = [
            self._trainers.add_logprobs(number, OLD_LOGPROBS, self._temperature, routing=routing)
            for number in range(len(updates))
        ]
        metrics = mismatch_metrics([report for of_update in reports for report in of_update])
        step.record({**metrics, "policy/entropy": entropy_mean(reports)})
        if replay_gap_is_due(self._recipe.algorithm, step.number):
            own = [self._trainers.report_own_routing(number, self._temperature) for number in range(len(updates))]
            step.record(replay_gap_metrics([report for of_update in own for report in of_update]))
        limit, found = self._recipe.algorithm.max_logprob_mismatch, metrics["mismatch/logprob_abs_mean"]
        if enforce_limit and not found <= limit:
            raise RunError(
                f"step {step.number}: trainer and engines disagree by {found:.2e} per token on average; "
                f"algorithm.max_logprob_mismatch is {limit:.2e}"
            )

    def train(self, step: Step, updates: Sequence[PackedBatch]) -> None:
        """One optimizer update per batch; afterwards the ranks drop the batches.

        Raises:
            RunError: too many updates in a row had a gradient that was not finite.
        """
        results = []
        for number, batch in enumerate(updates):
            # Before the first update the policy is the old one, so remote log ratios are 0.
            if number > 0 and is_split(batch):
                self._trainers.refresh_remote(number, self._temperature)
            result = self._trainers.train_update(
                number, "policy", denominator=num_trajectories(batch), temperature=self._temperature
            )
            count_skipped(self._state, result, self._recipe.trainer.max_skipped_updates)
            results.append(result)
        if results:
            self._trainers.put_batches([])
            step.record({**update_metrics(results), **policy_metrics(results)})
        step.record({"train/skipped_steps": self._state.skipped_steps})

    def _keeps(self, group: list[Trajectory]) -> bool:
        for name, keeps in zip(self._recipe.reward.group_filters, self._group_filters, strict=True):
            try:
                if not keeps(group):
                    return False
            except Exception as error:
                # A task's own code may raise anything. The message names the filter; the driver's log has the rest.
                raise RunError(f"{name} failed on {group[0].group_id}: {type(error).__name__}: {error}") from error
        return True

    @property
    def _temperature(self) -> float:
        return self._recipe.rollout.sampling.temperature


def make_updates(selection: Selection, recipe: Recipe, layout: Layout) -> list[PackedBatch]:
    """One packed batch for each optimizer update of a rollout."""
    trajectories = selection.trajectories
    return [
        pack_for(recipe.trainer, layout, [trajectories[i].segments for i in chosen], selection.advantages[chosen])
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
