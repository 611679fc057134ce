"""Watches a call of the trainer's ranks: shows the first one's progress, and notices when none makes any more.

A rank counts what it has done (micro-batches, buckets), beside the call that it is in. Where one hangs, the others wait
for it in their next collective, and all counts stand still. A slow step moves them with each micro-batch, so that no
deadline has to be as long as a step.
"""

import time
from collections.abc import Mapping
from typing import Any

import ray

from slimrl.base.errors import NoAnswer
from slimrl.observability.progress import Phase
from slimrl.runtime.cluster.rank_position import RankPosition, RankProgress

ASK_S = 1.0
"""Seconds between two questions to the same rank."""
ANSWER_S = 15.0
"""How long ranks may take to say where they stand when all of them have stopped."""


class RankWatch:
    """Called every moment while a call is waited for."""

    def __init__(
        self, name: str, method: str, actors: Mapping[str, Any], phase: Phase | None, hang_timeout_s: float | None
    ) -> None:
        """
        Args:
            name, method: of the group and of the call, for the error.
            actors: handles of the ranks by their names, the first one's first.
            phase: shows the first rank's progress.
            hang_timeout_s: seconds without progress of any rank that count as a hang; None for a call whose progress
                is not counted.
        """
        self._name, self._method, self._actors, self._phase = name, method, actors, phase
        self._hang_timeout_s = hang_timeout_s
        self._first = next(iter(actors))
        self._asked: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._asked_at = time.monotonic()
        self._moved_at = time.monotonic()

    def __call__(self) -> None:
        """Read the answers that have come, and ask again.

        Raises:
            NoAnswer: no rank has made progress for too long; says where each stands.
        """
        now = time.monotonic()
        for name, answer in self._answers().items():
            if self._counts.get(name) != answer.count:
                self._counts[name], self._moved_at = answer.count, now
            if name == self._first and self._phase is not None:
                self._phase.update(answer.done, answer.total)
        if self._hang_timeout_s is not None and now - self._moved_at > self._hang_timeout_s:
            raise self._hang(self._hang_timeout_s)
        if self._phase is not None and self._first not in self._asked:
            self._ask(self._first)
        if self._hang_timeout_s is not None and now - self._asked_at > ASK_S:
            self._asked_at = now
            for name in self._actors.keys() - self._asked.keys():
                self._ask(name)

    def _ask(self, name: str) -> None:
        self._asked[name] = self._actors[name].progress.remote()

    def _answers(self) -> dict[str, RankProgress]:
        """By rank. A rank that has ended is reported by the call itself."""
        if not self._asked:
            return {}
        done = set(ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)[0])
        found = {}
        for name, reference in list(self._asked.items()):
            if reference in done:
                del self._asked[name]
                try:
                    found[name] = ray.get(reference)
                except ray.exceptions.RayError:
                    continue
        return found

    def _hang(self, hang_timeout_s: float) -> NoAnswer:
        asked = {name: actor.position.remote() for name, actor in self._actors.items()}
        answered = set(ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)[0])
        positions: dict[str, RankPosition] = {}
        for name, reference in asked.items():
            if reference in answered:
                try:
                    positions[name] = ray.get(reference)
                except ray.exceptions.RayError:
                    continue
        silent = [name for name in asked if name not in positions]
        says = [f"{', '.join(silent)}: no answer"] if silent else []
        says += [f"{name}: {positions[name].text}" for name in positions][:8]
        return NoAnswer(
            f"{self._name}: no rank made progress in {self._method} for {hang_timeout_s:g} s "
            f"(trainer.hang_timeout_s). {'; '.join(says)}",
            "\n\n".join(f"{name}\n{position.stacks}" for name, position in positions.items()),
        )
