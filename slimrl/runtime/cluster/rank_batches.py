"""The micro-batches of a rollout as one trainer rank holds them.

The driver puts them on the ranks once, numbered by optimizer update. A pass may add an array that the update reads, so
results stay on the ranks; the driver gets a report.

The driver imports this module to name the methods that it calls, so it leaves Megatron to the runner.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from slimrl.algorithms.cross_batch_sums import remote_sums, set_remote
from slimrl.algorithms.mismatch import LogProbReport, report_logprobs
from slimrl.algorithms.not_finite import LOGPROBS, LOSS, Fault, faults_of
from slimrl.algorithms.objective import LossFunction
from slimrl.algorithms.routing import engine_experts
from slimrl.algorithms.token_advantages import charges_kl, kl_returns, kl_rewards, whitening_deviation
from slimrl.algorithms.values import estimate_advantages
from slimrl.config.schema.algorithm import AdvantageName, AlgorithmConfig, RoutingReplay
from slimrl.config.schema.trainer import CriticConfig
from slimrl.data.packing import (
    ADVANTAGES,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    TEACHER_LOGPROBS,
    VALUES,
    MicroBatch,
)
from slimrl.data.pieces import Piece, cut, join, pieces_of, sampled_places, scattered
from slimrl.data.training import LogProbs, UpdateResult
from slimrl.runtime.cluster.exchange import by_trajectory, over_data, sum_over_data

if TYPE_CHECKING:
    from slimrl.trainer.micro_batch_runner import MicroBatchRunner


class RankBatches:
    """All ranks make each call together. Ranks of one data-parallel rank hold the same micro-batches."""

    def __init__(self, runner: "MicroBatchRunner", routing_replay: RoutingReplay = RoutingReplay.off) -> None:
        self.runner, self.replay_mode = runner, routing_replay
        self.updates: list[list[MicroBatch]] = []
        """Micro-batches of this rank, by update"""
        self.reference: Callable[[], AbstractContextManager[None]] | None = None
        """Context manager within which the model's weights are the reference's; None without a reference"""

    def put_batches(self, updates: Sequence[list[MicroBatch]]) -> None:
        """Replace the micro-batches held.

        Raises:
            ValueError: the engine's experts are to be replayed, and there are none or not the model's.
        """
        self.updates = list(updates)
        if self.replay_mode is RoutingReplay.rollout:
            for batch in (batch for update in updates for batch in update):
                batch.replay_experts = engine_experts(batch, self.runner.routing_shape)

    def add_logprobs(
        self, update: int, name: str, temperature: float, routing: bool = False
    ) -> list[LogProbReport] | None:
        """Add the log-probs of the current policy, or for `reference_logprobs` of the reference, to the micro-batches.

        Args:
            routing: also compare the experts of each token with the engine's.

        Returns:
            A report on each micro-batch, on the output rank of the data-parallel rank; None on others, and of the
            reference, which nobody compares with the engine.
        """
        batches = self.updates[update]
        records = self.replay_mode is RoutingReplay.train and name == OLD_LOGPROBS
        if name == REFERENCE_LOGPROBS:
            assert self.reference is not None, "the worker keeps a reference when it has loaded the weights"
            with self.reference():
                found = self.runner.compute_logprobs(_unreplayed(batches), temperature)
        else:
            found = self.runner.compute_logprobs(batches, temperature, routing=routing, record_replay=records)
        if found is None:
            return None
        for batch, result in zip(batches, found, strict=True):
            batch.added[name] = result.logprobs
        return None if name == REFERENCE_LOGPROBS else self._reports(batches, found)

    def report_own_routing(self, update: int, temperature: float) -> list[LogProbReport] | None:
        """What `add_logprobs` would report if nothing were replayed; adds nothing."""
        batches = _unreplayed(self.updates[update])
        found = self.runner.compute_logprobs(batches, temperature, routing=True)
        return None if found is None else self._reports(batches, found)

    def set_remote(self, update: int, settings: AlgorithmConfig, temperature: float) -> None:
        """Compute what the micro-batches need of trajectories' tokens in other ones, under the current policy."""
        batches = self.updates[update]
        found = self.runner.compute_logprobs(batches, temperature)
        if found is None:
            return
        own = [remote_sums(batch, result.logprobs, settings) for batch, result in zip(batches, found, strict=True)]
        with_ids = [(batch.trajectories, sums) for batch, sums in zip(batches, own, strict=True)]
        set_remote(batches, own, [one for of_rank in over_data(with_ids, self.runner.data_group) for one in of_rank])

    def add_advantages(self, settings: AlgorithmConfig) -> None:
        """Add the advantages of tokens: those of trajectories and turns, plus the teacher's, charged with the KL,
        whitened. Those of a critic are there already, with the KL in them."""
        if not self.runner.layout.is_last_stage:
            return
        for batches in self.updates:
            for batch in batches:
                by_trajectory = batch.advantages[batch.trajectory_ids] if len(batch.advantages) else 0.0
                given = batch.added.get(ADVANTAGES, by_trajectory)
                if settings.teacher_coef:
                    given = given + settings.teacher_coef * (batch.added[TEACHER_LOGPROBS] - batch.added[OLD_LOGPROBS])
                batch.added[ADVANTAGES] = np.where(batch.mask, given, 0).astype(np.float32)
            if charges_kl(settings) and settings.advantage != AdvantageName.gae:
                self._charge_kl(batches, settings.kl_coef)
        if settings.whiten:
            self._whiten()

    def pieces(self, update: int, names: Sequence[str]) -> list[Piece]:
        """Added arrays of the sampled tokens, by sequence, on the output rank of each data-parallel rank; none on other
        ranks."""
        if not self.runner.layout.is_output_rank:
            return []
        batches = self.updates[update]
        return [p for batch in batches for p in pieces_of(batch, {name: batch.added[name] for name in names})]

    def place(self, update: int, pieces: Iterable[Piece]) -> None:
        """Add arrays from the pieces of all sequences of an update; called on the last pipeline stage.

        These may have been packed for another layout.
        """
        found = {piece.sequence: piece.values for piece in pieces}
        names = {name for values in found.values() for name in values}
        for name in names:
            values = {sequence: of_sequence[name] for sequence, of_sequence in found.items()}
            for batch in self.updates[update]:
                batch.added[name] = scattered(batch, values)

    def add_values(self, update: int) -> None:
        """Add the critic's present values, on a critic's rank."""
        batches = self.updates[update]
        found = self.runner.compute_logprobs(batches, temperature=1.0)
        for batch, result in zip(batches, found or (), strict=found is not None):
            batch.added[VALUES] = result.logprobs

    def estimate(self, update: int, algorithm: AlgorithmConfig, critic: CriticConfig) -> None:
        """Add advantages and returns on a critic's rank, from its values and the rewards of trajectories at their ends.

        The rewards stand in the place of advantages. Where the KL is in the reward, `place` has added both log-probs.

        Args:
            algorithm: the policy's.
        """
        if not self.runner.layout.is_last_stage:
            return
        batches, charged = self.updates[update], charges_kl(algorithm)
        names = (VALUES, OLD_LOGPROBS, REFERENCE_LOGPROBS) if charged else (VALUES,)
        own = [p for batch in batches for p in pieces_of(batch, {name: batch.added[name] for name in names})]
        rewards = {int(t): float(r) for b in batches for t, r in zip(b.trajectories, b.advantages, strict=True)}
        advantages: dict[int, np.ndarray] = {}
        returns: dict[int, np.ndarray] = {}
        for trajectory, pieces in by_trajectory(own, batches, self.runner.data_group).items():
            values = join(pieces)
            rewards_S = np.zeros(len(values[VALUES]))
            if charged:
                rewards_S = kl_rewards(values[OLD_LOGPROBS], values[REFERENCE_LOGPROBS], algorithm.kl_coef)
            rewards_S[-1] += rewards[trajectory]
            advantages_S, returns_S = estimate_advantages(
                rewards_S, values[VALUES], discount=critic.discount, gae_lambda=critic.gae_lambda
            )
            advantages |= cut(advantages_S, pieces)
            returns |= cut(returns_S, pieces)
        for batch in batches:
            for name, found in ((ADVANTAGES, advantages), (RETURNS, returns)):
                batch.added[name] = scattered(batch, found)

    def accumulate(
        self,
        update: int,
        loss_function: LossFunction,
        denominator: float,
        temperature: float,
        logprobs: bool = False,
        recorded: Collection[int] = (),
    ) -> list[LogProbReport] | None:
        """Gradients of an update, for `step`.

        Args:
            logprobs: report on the log-probs that the loss saw.
            recorded: places of sequences of which `recorded` is asked afterwards.

        Returns:
            As `add_logprobs`.
        """
        batches = self.updates[update]
        found = self.runner.accumulate(
            batches,
            loss_function,
            denominator=denominator,
            temperature=temperature,
            logprobs=logprobs,
            recorded=recorded,
        )
        return None if found is None else self._reports(batches, found)

    def recorded(self, update: int, sequences: Collection[int]) -> list[Piece] | None:
        """What the loss of the last `accumulate` reported of the sampled tokens of these sequences, on the output rank
        of each data-parallel rank; None on others."""
        if not self.runner.layout.is_output_rank:
            return None
        batches, found = self.updates[update], self.runner.recorded
        pieces = [piece for place, values in found.items() for piece in pieces_of(batches[place], values)]
        return [piece for piece in pieces if piece.sequence in sequences]

    def step(self, skip: bool = False) -> UpdateResult:
        """Do one optimizer step; see MicroBatchRunner.step."""
        return self.runner.step(skip=skip)

    def faults(
        self, update: int, loss_function: LossFunction, temperature: float, *, output: str = LOGPROBS
    ) -> list[Fault] | None:
        """Sequences of an update with numbers that are not finite, up to the loss, under the current weights; on the
        output rank of each data-parallel rank, None on others.

        Args:
            output: what the model's results are called.
        """
        batches = self.updates[update]
        found = self.runner.compute_losses(batches, loss_function, temperature)
        if found is None or not self.runner.layout.is_output_rank:
            return None
        values = [{output: output_T, LOSS: losses_T} for output_T, losses_T in found]
        return [fault for batch, own in zip(batches, values, strict=True) for fault in faults_of(batch, own)]

    def has_finite_gradient(
        self,
        update: int,
        loss_function: LossFunction,
        denominator: float,
        temperature: float,
        *,
        sequences: Collection[int],
        places: Sequence[int],
    ) -> bool:
        """Whether the gradient of these sequences alone is finite; the same on every rank.

        Args:
            loss_function, denominator, temperature: as in `accumulate`.
            places: of the micro-batches that are passed, among those of each data-parallel rank.
        """
        batches = [_only(self.updates[update][place], sequences) for place in places]
        return self.runner.has_finite_gradient(batches, loss_function, denominator=denominator, temperature=temperature)

    def weights_not_finite(self) -> list[str]:
        """Names of this rank's weights that are not finite."""
        return self.runner.weights_not_finite()

    def _reports(self, batches: Sequence[MicroBatch], found: Sequence[LogProbs]) -> list[LogProbReport] | None:
        if not self.runner.layout.is_output_rank:
            return None
        return [report_logprobs(batch, result) for batch, result in zip(batches, found, strict=True)]

    def _charge_kl(self, batches: Sequence[MicroBatch], coefficient: float) -> None:
        own = [
            pieces_of(batch, {name: batch.added[name] for name in (OLD_LOGPROBS, REFERENCE_LOGPROBS)})
            for batch in batches
        ]
        whole = by_trajectory([piece for of_batch in own for piece in of_batch], batches, self.runner.data_group)
        charged: dict[int, np.ndarray] = {}
        for pieces in whole.values():
            values = join(pieces)
            returns_S = kl_returns(values[OLD_LOGPROBS], values[REFERENCE_LOGPROBS], coefficient)
            charged |= cut(returns_S, pieces)
        for batch in batches:
            batch.added[ADVANTAGES] += scattered(batch, charged)

    def _whiten(self) -> None:
        batches = [batch for of_update in self.updates for batch in of_update]
        sampled = [batch.added[ADVANTAGES][batch.mask].astype(np.float64) for batch in batches]
        values_S = np.concatenate(sampled) if sampled else np.zeros(0)
        count, total = sum_over_data([len(values_S), values_S.sum()], self.runner.data_group)
        mean = total / count
        (squares,) = sum_over_data([np.square(values_S - mean).sum()], self.runner.data_group)
        deviation = whitening_deviation(count, squares)
        for batch in batches:
            values_T = batch.added[ADVANTAGES]
            batch.added[ADVANTAGES] = np.where(batch.mask, (values_T - mean) / deviation, 0).astype(np.float32)


def _only(batch: MicroBatch, sequences: Collection[int]) -> MicroBatch:
    """A micro-batch in which these sequences' targets alone count."""
    mask = np.zeros_like(batch.mask)
    for sequence, places in zip(batch.sequences.tolist(), sampled_places(batch), strict=True):
        if sequence in sequences:
            mask[places] = True
    return replace(batch, mask=mask)


def _unreplayed(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [replace(batch, replay_experts=None) for batch in batches]
