"""The engines' log-probs against the trainer's where no token of a step is of the trainer's present weights.

An engine scores a few of the step's trajectories under the present weights, and the trainer computes the same
log-probs, before the step changes its weights.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from slimrl.algorithms.mismatch import mismatch_metrics
from slimrl.base.errors import RunError
from slimrl.config.schema.recipe import Recipe
from slimrl.data.engine import EngineError, ScoreRequest
from slimrl.data.packing import OLD_LOGPROBS, micro_batches, pack_for
from slimrl.data.trajectory import Segment, Trajectory
from slimrl.rollout.stage import RolloutStage
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.runtime.cluster.trainer_group import TrainerGroup

NUM_SCORED = 8
"""Segments; the first sampled ones of the step's trajectories"""


class ScoreCheck:
    """Measures at the first step that has no token of the present weights, and then every so many steps."""

    def __init__(self, recipe: Recipe, stage: RolloutStage, trainers: TrainerGroup) -> None:
        self._recipe, self._stage, self._trainers = recipe, stage, trainers
        self._last: int | None = None

    def is_due(self, step: int) -> bool:
        every = self._recipe.algorithm.score_every_steps
        return every > 0 and (self._last is None or step - self._last >= every)

    def measure(self, step: int, trajectories: Sequence[Trajectory], check: Callable[[], None]) -> dict[str, float]:
        """The metrics `mismatch/`; empty if no trajectory has a sampled token.

        Args:
            check: called every second while the engines score.

        Raises:
            RunError: an engine did not score.
        """
        found = [one for t in trajectories for one in t.segments if one.loss_mask[1:].any()]
        if not found:
            return {}
        self._last = step
        scored = self._stage.run_watched(self._scored(found[:NUM_SCORED]), check)
        return self._metrics(scored)

    async def _scored(self, segments: Sequence[Segment]) -> list[Segment]:
        """The segments with the engines' present log-probs, the engines in turn."""
        requests = enumerate(segments)
        try:
            return list(await asyncio.gather(*(self._score(number, segment) for number, segment in requests)))
        except EngineError as error:
            raise RunError(f"the engines' log-probs under the present weights: {error}") from error

    async def _score(self, number: int, segment: Segment) -> Segment:
        start = int(np.flatnonzero(segment.loss_mask[1:])[0]) + 1
        request = ScoreRequest(
            session_id=f"score/{number}",
            tokens=segment.tokens.tolist(),
            start=start,
            timeout_s=self._recipe.rollout.request_timeout_s,
        )
        logprobs = np.zeros(len(segment), np.float32)
        logprobs[start:] = await self._stage.score(request)
        # The experts are those of the weights that sampled it; at -1 the trainer's routers choose (docs/models.md).
        experts = None if segment.routed_experts is None else np.full_like(segment.routed_experts, -1)
        return replace(segment, rollout_logprobs=np.where(segment.loss_mask, logprobs, 0), routed_experts=experts)

    def _metrics(self, segments: Sequence[Segment]) -> dict[str, float]:
        batch = pack_for(
            self._recipe.trainer,
            self._trainers.layout,
            [[one] for one in segments],
            np.zeros(len(segments), np.float32),
        )
        self._trainers.put_batches([batch])
        # Engines score at temperature 1.
        reports = self._trainers.gather(RankBatches.add_logprobs, 0, OLD_LOGPROBS, 1.0)
        self._trainers.put_batches([])
        limit = self._recipe.algorithm.max_logprob_mismatch
        return mismatch_metrics(reports, micro_batches([batch]), limit=limit)
