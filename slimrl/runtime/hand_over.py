"""Who holds the memory of devices that trainer and engines share (`rollout.colocated`), at each stage of a step.

| stage    | engines           | trainer                       |
|----------|-------------------|-------------------------------|
| rollout  | weights, KV cache | nothing                       |
| train    | nothing           | weights, optimizer, gradients |
| exchange | weights           | weights                       |
| replace  | weights           | nothing                       |
| save     | weights           | weights, optimizer            |

Memory is given away on both sides before either takes any, so that no more is held at once than one row of the table
says. A run starts in the first row: the trainer has given everything away before the engines start.
"""

from collections.abc import Collection
from enum import Enum
from typing import Any, Protocol

from slimrl.data.training import MemoryPart
from slimrl.rollout.control import EngineMemory


class MemoryHolder(Protocol):
    """The trainer or the engines, which give away parts that they hold and take back parts that they do not."""

    def release_memory(self, parts: Collection[Any]) -> None: ...

    def resume_memory(self, parts: Collection[Any]) -> None: ...


class Stage(Enum):
    """(what the engines hold, what the trainer holds)"""

    rollout = (frozenset(EngineMemory), frozenset[MemoryPart]())
    train = (frozenset[EngineMemory](), frozenset(MemoryPart))
    exchange = (frozenset({EngineMemory.weights}), frozenset({MemoryPart.weights}))
    """A resync, or an export of the weights"""
    replace = (frozenset({EngineMemory.weights}), frozenset[MemoryPart]())
    """Engines that failed in a resync start anew, with what was free at the start of the run, less the sender's slots
    (and the stage of a transform), which it keeps."""
    save = (frozenset({EngineMemory.weights}), frozenset({MemoryPart.weights, MemoryPart.optimizer}))


class HandOver:
    """Moves memory as the stages ask. Where it is not `enabled`, both sides keep everything."""

    def __init__(self, engines: MemoryHolder, trainer: MemoryHolder, *, enabled: bool) -> None:
        self._sides = (engines, trainer)
        self._held: tuple[frozenset[Enum], frozenset[Enum]] = Stage.rollout.value
        self._enabled = enabled

    def enter(self, stage: Stage) -> None:
        """Returns when both sides hold what the stage gives them."""
        if not self._enabled:
            return
        sides = list(zip(self._sides, self._held, stage.value, strict=True))
        for side, held, wanted in sides:
            if surplus := held - wanted:
                side.release_memory(surplus)
        for side, held, wanted in sides:
            if missing := wanted - held:
                side.resume_memory(missing)
        self._held = stage.value
