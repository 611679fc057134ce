"""Trainer ranks without a model or Megatron: a few actors that stand for all of them.

They hold the batches that the driver gives them, and report on them as a rank does.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from slimrl.algorithms.mismatch import LogProbReport, report_logprobs
from slimrl.data.packing import REFERENCE_LOGPROBS, MicroBatch
from slimrl.data.training import Layout, LogProbs, UpdateResult
from slimrl.resync.report import ResyncReport

TENSOR = 4
"""Ranks that share a data-parallel rank's batches"""
NUM_ACTORS = 2
"""That stand for all ranks"""


def layout_of(rank: int, num_ranks: int) -> Layout:
    tensor = min(TENSOR, num_ranks)
    ones = dict.fromkeys(("pipeline", "virtual_pipeline", "expert", "expert_tensor", "context"), 1)
    return Layout(
        **ones, rank=rank, world_size=num_ranks, tensor=tensor, data=num_ranks // tensor, sequence=False,
        tensor_rank=rank % tensor, pipeline_rank=0, context_rank=0, data_rank=rank // tensor,
    )  # fmt: skip


def answer_of(batch: MicroBatch) -> LogProbs:
    return LogProbs(logprobs=batch.rollout_logprobs + np.float32(1e-4), entropy=np.ones_like(batch.rollout_logprobs))


class Ranks:
    """Methods of trainer ranks, any of them in one process; the batches that they hold are not copied."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._held: dict[int, list[list[MicroBatch]]] = {}

    def call(self, rank: int, run: Callable[..., Any], method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """What this class has under the name of a rank's method; nothing of others."""
        return getattr(self, method.__name__, self._nothing)(rank, *given, **options)

    def pid(self, rank: int) -> int:
        return os.getpid()

    def rendezvous(self, rank: int, on_one_node: bool) -> str:
        return "file:///nowhere"

    def start(self, rank: int, address: str) -> Layout:
        return layout_of(rank, self._num_ranks)

    def put_batches(self, rank: int, updates: list[list[MicroBatch]]) -> None:
        self._held[rank] = updates

    def add_logprobs(self, rank: int, update: int, name: str, *_: Any, **__: Any) -> list[LogProbReport] | None:
        if not layout_of(rank, self._num_ranks).is_output_rank or name == REFERENCE_LOGPROBS:
            return None
        batches = self._held[rank][update]
        return [report_logprobs(batch, answer_of(batch)) for batch in batches]

    def accumulate(
        self,
        rank: int,
        update: int,
        loss: Any,
        denominator: float,
        temperature: float,
        logprobs: bool = False,
        **_: Any,
    ) -> list[LogProbReport] | None:
        return self.add_logprobs(rank, update, "") if logprobs else None

    def step(self, rank: int) -> UpdateResult:
        names = ("loss", "tokens", "clipped", "weight", "clamped", "kl_old", "kl", "importance", "importance_squared")
        sums = dict.fromkeys(names, 1.0)
        return UpdateResult(sums=sums, denominator=1.0, grad_norm=1.0, skipped=False, lr=1e-6, num_tokens=1)

    def resync(self, rank: int, version: int) -> ResyncReport | None:
        if rank:
            return None
        return ResyncReport(
            version=version, bytes=1, buckets=1, seconds=0.1, stage_seconds={}, verified_tensors=1, mismatching=(),
            failed_engines={}, stale_requests=0, peak_extra_bytes=0,
        )  # fmt: skip

    def save_checkpoint(self, rank: int, folder: Path) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        return {}

    def progress(self, rank: int) -> tuple[int, int]:
        return 0, 0

    def _nothing(self, *_: Any, **__: Any) -> None:
        return


class Rank:
    """An actor's handle, as the driver uses it."""

    def __init__(self, actor: Any, rank: int) -> None:
        self.__ray_call__ = SimpleNamespace(remote=partial(actor.call.remote, rank))
        self.progress = SimpleNamespace(remote=partial(actor.progress.remote, rank))


class RankActors:
    """In place of RemoteTrainer: gives each new rank one of a few actors."""

    def __init__(self, num_ranks: int) -> None:
        number = min(NUM_ACTORS, num_ranks)
        self._actors: list[Any] = [ray.remote(num_cpus=0)(Ranks).remote(num_ranks) for _ in range(number)]
        self._numbers = count()

    def options(self, **_: Any) -> Any:
        return self

    def remote(self, *_: Any, **__: Any) -> Rank:
        rank = next(self._numbers)
        return Rank(self._actors[rank % len(self._actors)], rank)

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
