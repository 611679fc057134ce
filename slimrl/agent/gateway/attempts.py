"""Attempts of a trajectory's requests, so that one that is sent again is known.

Several callers may ask the same at the same time, as agents do that choose the best of several answers. A retry says
that it is one, and not of which attempt. It can only be of one whose client is gone or was told to come again:

1. An attempt that ended without an answer was lost. The next retry asks for a sample of its own in its place.
2. Otherwise the oldest one whose connection has ended is its first attempt.
3. One whose connection is open is another caller's.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slimrl.agent.gateway.chat_request import Reply


@dataclass(eq=False)
class Attempt:
    task: "asyncio.Task[Any]"
    is_gone: Callable[[], bool]
    """Function that tells whether the client's connection has ended"""
    reply: Reply | None = None
    """The answer, once there is one"""

    @property
    def is_continued(self) -> bool:
        """Whether its client has got the answer and gone on from it."""
        return self.reply is not None and any(turn.children for turn in self.reply.turns)


@dataclass
class Attempts:
    _kept: dict[bytes, list[Attempt]] = field(default_factory=dict)
    """Attempts that are under way or answered, the oldest first, by the key of their request"""
    _lost: Counter[bytes] = field(default_factory=Counter)

    def add(self, asked: bytes, attempt: Attempt) -> None:
        self._kept.setdefault(asked, []).append(attempt)

    def before(self, asked: bytes) -> Attempt | None:
        """The attempt that a retry repeats; None if it was lost, or is of no client that is gone."""
        if self._found_lost(asked):
            return None
        return next((one for one in self._kept.get(asked, ()) if one.is_gone() and not one.is_continued), None)

    async def end(self, asked: bytes, attempt: Attempt, timeout_s: float) -> None:
        """End an attempt that is under way; a retry takes its place."""
        attempt.task.cancel()
        await asyncio.wait([attempt.task], timeout=timeout_s)
        self._found_lost(asked)

    def lose(self, asked: bytes, attempt: Attempt) -> None:
        """Forget an attempt whose client did not get the answer and may come again."""
        self._lost[asked] += 1
        self.forget(asked, attempt)

    def refuse(self, asked: bytes) -> None:
        """Expect a retry of a refused request whose client was told to try again; it is mistaken for another client's
        only if there is another."""
        if asked in self._kept:
            self._lost[asked] += 1

    def forget(self, asked: bytes, attempt: Attempt) -> None:
        self._kept[asked].remove(attempt)
        if not self._kept[asked]:
            del self._kept[asked]

    def _found_lost(self, asked: bytes) -> bool:
        if not self._lost[asked]:
            return False
        self._lost[asked] -= 1
        return True

    def take_back(self, reply: Reply) -> None:
        """Lose the attempt that a reply answers."""
        for asked, attempt in [
            (asked, one) for asked, kept in self._kept.items() for one in kept if one.reply is reply
        ]:
            self.lose(asked, attempt)
