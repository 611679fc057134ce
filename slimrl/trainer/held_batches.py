"""The micro-batches of a rollout as one trainer rank holds them.

The driver puts them on the ranks once, numbered by optimizer update. A pass may add an array that the update reads, so
results stay on the ranks; the driver gets a report.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slimrl import device
from slimrl.algorithms.mismatch import LogProbReport, report_logprobs
from slimrl.algorithms.objective import LossFunction
from slimrl.algorithms.remote import remote_sums, set_remote
from slimrl.algorithms.token_advantages import charges_kl, kl_returns, whitening_deviation
from slimrl.config.schema import AlgorithmConfig, RoutingReplay
from slimrl.data.packing import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS, TEACHER_LOGPROBS, MicroBatch
from slimrl.data.pieces import Piece, cut, join, pieces_of, sampled_places
from slimrl.data.training import LogProbs, UpdateResult
from slimrl.trainer.micro_batch_runner import MicroBatchRunner
from slimrl.trainer.routing_replay import engine_experts


class HeldBatches:
    """All ranks make each call together. Ranks of one data-parallel rank hold the same micro-batches."""

    def __init__(self, runner: MicroBatchRunner, routing_replay: RoutingReplay = RoutingReplay.off) -> None:
        self.runner, self.replay_mode = runner, routing_replay
        self.updates: list[list[MicroBatch]] = []
        """This rank's micro-batches of each update"""
        self.reference: Callable[[], AbstractContextManager[None]] | None = None
        """Gives a block within which the model is the reference"""

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
            A report on each micro-batch, on the output rank of the data-parallel rank; None on others.
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
        return self._reports(batches, found)

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
        set_remote(batches, own, [one for of_rank in _over_data(with_ids) for one in of_rank])

    def add_advantages(self, settings: AlgorithmConfig) -> None:
        """Add the advantages of tokens: those of trajectories and turns, plus the teacher's, charged with the KL,
        whitened."""
        if not self.runner.layout.is_last_stage:
            return
        for batches in self.updates:
            for batch in batches:
                by_trajectory = batch.advantages[batch.trajectory_ids] if len(batch.advantages) else 0.0
                given = batch.added.get(ADVANTAGES, by_trajectory)
                if settings.teacher_coef:
                    given = given + settings.teacher_coef * (batch.added[TEACHER_LOGPROBS] - batch.added[OLD_LOGPROBS])
                batch.added[ADVANTAGES] = np.where(batch.mask, given, 0).astype(np.float32)
            if charges_kl(settings):
                self._charge_kl(batches, settings.kl_coef)
        if settings.whiten:
            self._whiten()

    def accumulate(
        self, update: int, loss_function: LossFunction, denominator: float, temperature: float, logprobs: bool = False
    ) -> list[LogProbReport] | None:
        """Gradients of an update, for `step`.

        Args:
            logprobs: report on the log-probs that the loss saw.

        Returns:
            As `add_logprobs`.
        """
        batches = self.updates[update]
        found = self.runner.accumulate(
            batches, loss_function, denominator=denominator, temperature=temperature, logprobs=logprobs
        )
        return None if found is None else self._reports(batches, found)

    def step(self) -> UpdateResult:
        """See MicroBatchRunner.step."""
        return self.runner.step()

    def _reports(self, batches: Sequence[MicroBatch], found: Sequence[LogProbs]) -> list[LogProbReport] | None:
        if not self.runner.layout.is_output_rank:
            return None
        return [report_logprobs(batch, result) for batch, result in zip(batches, found, strict=True)]

    def _charge_kl(self, batches: Sequence[MicroBatch], coefficient: float) -> None:
        own = [
            pieces_of(batch, {name: batch.added[name] for name in (OLD_LOGPROBS, REFERENCE_LOGPROBS)})
            for batch in batches
        ]
        whole = _by_trajectory([piece for of_batch in own for piece in of_batch], batches)
        charged: dict[int, np.ndarray] = {}
        for pieces in whole.values():
            values = join(pieces)
            returns_S = kl_returns(values[OLD_LOGPROBS], values[REFERENCE_LOGPROBS], coefficient)
            charged |= cut(returns_S, pieces)
        for batch in batches:
            for sequence, places in zip(batch.sequences.tolist(), sampled_places(batch), strict=True):
                if len(places):
                    batch.added[ADVANTAGES][places] += charged[sequence]

    def _whiten(self) -> None:
        batches = [batch for of_update in self.updates for batch in of_update]
        sampled = [batch.added[ADVANTAGES][batch.mask].astype(np.float64) for batch in batches]
        values_S = np.concatenate(sampled) if sampled else np.zeros(0)
        count, total = _sums([len(values_S), values_S.sum()])
        mean = total / count
        (squares,) = _sums([np.square(values_S - mean).sum()])
        deviation = whitening_deviation(count, squares)
        for batch in batches:
            values_T = batch.added[ADVANTAGES]
            batch.added[ADVANTAGES] = np.where(batch.mask, (values_T - mean) / deviation, 0).astype(np.float32)


def _unreplayed(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [replace(batch, replay_experts=None) for batch in batches]


def _by_trajectory(pieces: Iterable[Piece], batches: Sequence[MicroBatch]) -> dict[int, list[Piece]]:
    """All pieces of each trajectory of this rank; those of trajectories that lie elsewhere too are exchanged."""
    found: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.trajectory >= 0:
            found[piece.trajectory].append(piece)
    sampled = {int(t): int(n) for b in batches for t, n in zip(b.trajectories, b.num_sampled, strict=True)}
    incomplete = [own for t, own in found.items() if sum(map(_length, own)) < sampled[t]]
    here = {(piece.trajectory, piece.sequence) for own in found.values() for piece in own}
    for piece in (piece for of_rank in _over_data([p for own in incomplete for p in own]) for piece in of_rank):
        if piece.trajectory in found and (piece.trajectory, piece.sequence) not in here:
            found[piece.trajectory].append(piece)
    return found


def _length(piece: Piece) -> int:
    return len(next(iter(piece.values.values())))


def _over_data(value: Any) -> list[Any]:
    """The values of all data-parallel ranks."""
    group = mpu.get_data_parallel_group()
    of_ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(of_ranks, value, group=group)
    return of_ranks


def _sums(values: Sequence[float]) -> list[float]:
    """Sums over the data-parallel ranks."""
    totals = torch.tensor(values, dtype=torch.float64, device=device.compute_device())
    dist.all_reduce(totals, group=mpu.get_data_parallel_group())
    return [float(total) for total in totals.tolist()]
