"""Memory that trainer and engines hold on shared devices (`rollout.colocated`) in each phase of a step.

| phase    | engines                        | trainer                       |
|----------|--------------------------------|-------------------------------|
| rollout  | weights, KV cache, CUDA graphs | nothing                       |
| train    | nothing                        | weights, optimizer, gradients |
| exchange | weights                        | weights                       |
| replace  | weights                        | nothing                       |
| save     | weights                        | weights, optimizer            |

Both sides release memory before either resumes any, so that they never hold more than one row of the table. A run
starts in the first row: the trainer has released everything before the engines start.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

from slimrl.data.training import MemoryPart
from slimrl.engines.servers.control import EngineMemory


class MemoryHolder(Protocol):
    """The trainer or the engines. Both release only parts that they hold and resume only parts that they do not."""

    def release_memory(self, parts: Collection[Any]) -> None: ...

    def resume_memory(self, parts: Collection[Any]) -> None: ...


class MemoryPhase(Enum):
    """The phases of a step on shared devices, each as (what the engines hold, what the trainer holds)."""

    rollout = (frozenset(EngineMemory), frozenset[MemoryPart]())
    train = (frozenset[EngineMemory](), frozenset(MemoryPart))
    exchange = (frozenset({EngineMemory.weights}), frozenset({MemoryPart.weights}))
    """A resync, or an export of the weights"""
    replace = (frozenset({EngineMemory.weights}), frozenset[MemoryPart]())
    """Engines that failed in a resync restart, with the memory that was free at the start of the run, less the sender's
    slots (and a transform's staging buffer), which stay allocated."""
    save = (frozenset({EngineMemory.weights}), frozenset({MemoryPart.weights, MemoryPart.optimizer}))


class MemorySchedule:
    """Moves memory between the phases. Unless `enabled`, both sides keep everything."""

    def __init__(self, engines: MemoryHolder, trainer: MemoryHolder, *, enabled: bool) -> None:
        self._sides = (engines, trainer)
        self._held: list[frozenset[Enum]] = list(MemoryPhase.rollout.value)
        self._enabled = enabled

    def enter(self, phase: MemoryPhase) -> None:
        """Move memory, and return when both sides hold what the phase gives them."""
        if not self._enabled:
            return
        held: tuple[frozenset[Enum], frozenset[Enum]] = phase.value
        for side, wanted in enumerate(held):
            self._release(side, wanted)
        for side, wanted in enumerate(held):
            self._resume(side, wanted)

    @contextmanager
    def trainer_starts(self) -> Iterator[None]:
        """Have the engines hold nothing within the block, which starts another trainer in the place of one that has
        ended; afterwards both sides hold what the phase `rollout` gives them."""
        if not self._enabled:
            yield
            return
        engines, trainer = MemoryPhase.train.value
        self._release(0, engines)
        yield
        self._held[1] = trainer
        self.enter(MemoryPhase.rollout)

    def _release(self, side: int, wanted: frozenset[Enum]) -> None:
        if surplus := self._held[side] - wanted:
            self._sides[side].release_memory(surplus)
            self._held[side] &= wanted

    def _resume(self, side: int, wanted: frozenset[Enum]) -> None:
        if missing := wanted - self._held[side]:
            self._sides[side].resume_memory(missing)
            self._held[side] |= wanted
