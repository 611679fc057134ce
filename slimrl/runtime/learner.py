"""From selected trajectories to optimizer updates: what the updates need of the old policy, training."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from slimrl.algorithms.mismatch import FAR, LogProbReport, entropy_mean, mismatch_metrics
from slimrl.algorithms.objective import denominator, loss_function
from slimrl.algorithms.passes import needs_old, needs_reference, needs_sums
from slimrl.algorithms.replay_gap import replay_gap_is_due, replay_gap_metrics
from slimrl.algorithms.selection import Selection
from slimrl.algorithms.token_advantages import has_token_advantages
from slimrl.base.errors import RunError
from slimrl.base.spans import SPANS
from slimrl.config.schema.recipe import Recipe
from slimrl.data.packing import (
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    is_split,
    micro_batches,
)
from slimrl.data.token_values import TRAINER_LOGPROBS
from slimrl.observability.run_folder import RunFolder
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.critic import Critic
from slimrl.runtime.not_finite import SkippedUpdates, Work, owners_of
from slimrl.runtime.packed_updates import Update, make_updates
from slimrl.runtime.state import RunState
from slimrl.runtime.step_metrics import Step, policy_metrics, update_metrics


class Learner:
    """The learning half of a step; it needs no engine."""

    def __init__(
        self,
        recipe: Recipe,
        trainers: TrainerGroup,
        state: RunState,
        critics: TrainerGroup | None = None,
        *,
        say: Callable[[str], None],
        folder: RunFolder | None = None,
    ) -> None:
        """
        Args:
            critics: ranks of the critic, if the recipe has one.
            say, folder: as of SkippedUpdates.
        """
        self._recipe, self._trainers, self._state = recipe, trainers, state
        self._critic = None if critics is None else Critic(recipe, critics, state, say, folder)
        self._skipped = SkippedUpdates(trainers, state, recipe.trainer.max_skipped_updates, say, folder)
        self._reports: dict[int, list[LogProbReport]] = {}
        """Reports by update, on the log-probs of the policy before the first one"""

    def prepare(self, step: Step, selection: Selection) -> list[Update]:
        """Pack the selected trajectories into updates and put these on the ranks; empty if nothing would be learned."""
        step.record({"rollout/zero_variance_fraction": selection.zero_variance_fraction})
        with SPANS("pack"):
            updates = make_updates(selection, self._recipe, self._trainers.layout)
        if updates:
            with step.timed("logprobs"):
                self._trainers.put_batches([update.batch for update in updates])
                if self._critic is not None:
                    self._critic.put(selection)
        return updates

    def compute_inputs(self, step: Step, updates: Sequence[Update]) -> None:
        """Have the ranks store the log-probs that the updates need: of the policy before the first of them, and of the
        reference."""
        self._reports = {}
        for number in range(len(updates)):
            if needs_old(self._recipe, number):
                routing = self._recipe.rollout.routed_experts
                self._reports[number] = self._trainers.gather(
                    RankBatches.add_logprobs, number, OLD_LOGPROBS, self._temperature, routing=routing
                )
            if needs_reference(self._recipe):
                self._trainers.call(RankBatches.add_logprobs, number, REFERENCE_LOGPROBS, self._temperature)
        if updates and replay_gap_is_due(self._recipe.algorithm, step.number):
            own = [
                self._trainers.gather(RankBatches.report_own_routing, number, self._temperature)
                for number in range(len(updates))
            ]
            reports = [report for of_update in own for report in of_update]
            step.record(replay_gap_metrics(reports, micro_batches([update.batch for update in updates])))
        if updates and self._critic is not None:
            self._critic.add_advantages(self._trainers)
        if updates and has_token_advantages(self._recipe.algorithm):
            self._trainers.call(RankBatches.add_advantages, self._recipe.algorithm)

    def train(self, step: Step, updates: Sequence[Update], *, enforce_limit: bool = True) -> None:
        """The optimizer updates, of the critic too if there is one; afterwards the ranks drop the batches.

        In the first `critic.warmup_steps` steps the critic alone learns.

        Args:
            enforce_limit: False if the trajectories are of an older policy.

        Raises:
            RunError: the mean difference between the trainer's and the engines' log-probs is above
                `algorithm.max_logprob_mismatch`.
            NotFinite: too many updates in a row had a loss or a gradient that is not finite, or the weights are not.
        """
        algorithm, results = self._recipe.algorithm, []
        warms_up = self._critic is not None and step.number <= self._recipe.critic.warmup_steps
        for number, update in enumerate(updates):
            part = f"update {number + 1} of {len(updates)}"
            if self._critic is not None:
                self._critic.learn(number, step.number, part)
            if warms_up:
                continue
            if needs_sums(algorithm, number) and is_split(update.batch):
                self._trainers.call(RankBatches.set_remote, number, algorithm, self._temperature)
            work = Work(
                number=number,
                batch=update.batch,
                owners=owners_of(update),
                loss=loss_function("policy", algorithm, self._state.entropy_coef(algorithm)),
                denominator=self._denominator(update),
                temperature=self._temperature,
                whitens=algorithm.whiten,
            )
            found = self._trainers.gather(
                RankBatches.accumulate,
                number,
                work.loss,
                denominator=work.denominator,
                temperature=work.temperature,
                logprobs=number == 0 and 0 not in self._reports,
                recorded=(recorded := step.tokens.numbers_in(update.segments)),
            )
            if recorded:
                self._record_tokens(step, number, update, recorded)
            if number == 0:
                self._reports.setdefault(0, found)
                self._measure(step, updates, enforce_limit)
            result = self._trainers.call(RankBatches.step, skip=not self._is_finite(number))
            self._skipped.count(result, step.number, part, work)
            results.append(result)
        if results:
            self._skipped.check_weights(step.number)
        if updates and warms_up:
            self._measure_unchanged(step, updates, enforce_limit)
        if updates:
            self._trainers.put_batches([])
        if self._critic is not None:
            step.record(self._critic.finish(step.number))
        step.count_experts(results)
        if results:
            step.record({**update_metrics(results), **policy_metrics(results)})
            if math.isfinite(entropy := step.metrics["policy/entropy"]):
                self._state.adapt_entropy_coef(algorithm, entropy)
        step.record({"train/skipped_steps": self._state.skipped_steps})

    def _is_finite(self, number: int) -> bool:
        """Whether the trainer's log-probs of an update are, where they are known.

        Its loss and gradient may be finite though they are not.
        """
        return all(bool(np.isfinite(report.logprobs_S).all()) for report in self._reports.get(number, ()))

    def _record_tokens(self, step: Step, number: int, update: Update, recorded: Collection[int]) -> None:
        # Those of a later update are not the old policy's unless there was a pass for them.
        without = () if number == 0 or number in self._reports else (TRAINER_LOGPROBS,)
        for piece in self._trainers.gather(RankBatches.recorded, number, recorded):
            step.tokens.add(update.segments[piece.sequence], piece.values, without)

    def _measure(self, step: Step, updates: Sequence[Update], enforce_limit: bool) -> None:
        """How far the engines' log-probs are from the trainer's, of all updates for which they are known.

        Raises:
            RunError: too far.
        """
        reports = [self._reports[number] for number in sorted(self._reports)]
        version = self._state.weight_version if self._recipe.rollout.spans_steps else None
        measured = micro_batches([updates[number].batch for number in sorted(self._reports)])
        limit = self._recipe.algorithm.max_logprob_mismatch
        metrics = mismatch_metrics(
            [report for of_update in reports for report in of_update], measured, version, limit=limit
        )
        step.record({**metrics, "policy/entropy": entropy_mean(reports)})
        if enforce_limit:
            self.limit_mismatch(step, metrics)

    def limit_mismatch(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Raises RunError if the log-probs of trainer and engines, of the same weights, differ too much.

        Those that are not finite are no difference: their update is skipped.
        """
        algorithm = self._recipe.algorithm
        limit, found = algorithm.max_logprob_mismatch, metrics.get("mismatch/logprob_abs_mean")
        if found is not None and found > limit:
            raise RunError(
                f"step {step.number}: trainer and engines disagree by {found:.2e} per token on average; "
                f"algorithm.max_logprob_mismatch is {limit:.2e}"
            )
        far = metrics.get("mismatch/far_fraction", 0.0)
        if far > algorithm.max_far_tokens:
            raise RunError(
                f"step {step.number}: trainer and engines disagree by more than {FAR * limit:.2g} nat, {FAR} times "
                f"algorithm.max_logprob_mismatch, on {far:.2%} of the tokens; algorithm.max_far_tokens is "
                f"{algorithm.max_far_tokens:.2%}"
            )

    def _measure_unchanged(self, step: Step, updates: Sequence[Update], enforce_limit: bool) -> None:
        """`_measure` in a step without an update of the policy."""
        if 0 not in self._reports:
            self._reports[0] = self._trainers.gather(RankBatches.add_logprobs, 0, OLD_LOGPROBS, self._temperature)
        self._measure(step, updates, enforce_limit)

    def _denominator(self, update: Update) -> float:
        return denominator(
            self._recipe.algorithm.aggregation,
            num_trajectories=update.num_trajectories,
            num_tokens=update.num_tokens,
            length=self._recipe.rollout.max_trajectory_tokens,
        )

    @property
    def _temperature(self) -> float:
        return self._recipe.rollout.sampling.temperature
