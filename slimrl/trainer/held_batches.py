"""The micro-batches of a rollout as one trainer rank holds them.

The driver puts them on the ranks once, numbered by optimizer update. A pass may add an array that the update reads, so
results stay on the ranks; the driver gets a report.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slimrl.algorithms.losses import LossFunction, log_ratio_sums, set_remote_log_ratio
from slimrl.algorithms.mismatch import LogProbReport, report_logprobs
from slimrl.config.schema import RoutingReplay
from slimrl.data.packing import OLD_LOGPROBS, MicroBatch
from slimrl.data.training import UpdateResult
from slimrl.trainer.micro_batch_runner import MicroBatchRunner
from slimrl.trainer.routing_replay import engine_experts


class HeldBatches:
    """All ranks make each call together. Ranks of one data-parallel rank hold the same micro-batches."""

    def __init__(self, runner: MicroBatchRunner, routing_replay: RoutingReplay = RoutingReplay.off) -> None:
        self.runner, self.replay_mode = runner, routing_replay
        self.updates: list[list[MicroBatch]] = []
        """This rank's micro-batches of each update"""

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
        """Add the log-probs of the current policy to the micro-batches as array `name`.

        Args:
            routing: also compare the experts of each token with the engine's.

        Returns:
            A report on each micro-batch, on the output rank of the data-parallel rank; None on others.
        """
        batches = self.updates[update]
        records = self.replay_mode is RoutingReplay.train and name == OLD_LOGPROBS
        found = self.runner.compute_logprobs(batches, temperature, routing=routing, record_replay=records)
        if found is None:
            return None
        for batch, result in zip(batches, found, strict=True):
            batch.added[name] = result.logprobs
        if not self.runner.layout.is_output_rank:
            return None
        return [report_logprobs(batch, result) for batch, result in zip(batches, found, strict=True)]

    def report_own_routing(self, update: int, temperature: float) -> list[LogProbReport] | None:
        """What `add_logprobs` would report if nothing were replayed; adds nothing."""
        batches = [replace(batch, replay_experts=None) for batch in self.updates[update]]
        found = self.runner.compute_logprobs(batches, temperature, routing=True)
        if found is None or not self.runner.layout.is_output_rank:
            return None
        return [report_logprobs(batch, result) for batch, result in zip(batches, found, strict=True)]

    def refresh_remote(self, update: int, temperature: float) -> None:
        """Recompute the remote log ratios of trajectories in several micro-batches, after an update of the policy."""
        batches = self.updates[update]
        found = self.runner.compute_logprobs(batches, temperature)
        if found is None:
            return
        own = [log_ratio_sums(batch, result.logprobs) for batch, result in zip(batches, found, strict=True)]
        group = mpu.get_data_parallel_group()
        of_ranks: list[Any] = [None] * group.size()
        with_ids = [(batch.trajectories, sums) for batch, sums in zip(batches, own, strict=True)]
        dist.all_gather_object(of_ranks, with_ids, group=group)
        set_remote_log_ratio(batches, own, [one for of_rank in of_ranks for one in of_rank])

    def train_update(
        self, update: int, loss_function: LossFunction, denominator: float, temperature: float
    ) -> UpdateResult:
        """See MicroBatchRunner.train_update."""
        return self.runner.train_update(
            self.updates[update], loss_function, denominator=denominator, temperature=temperature
        )
