"""How many trajectories may run at a time: a semaphore whose size may change while it is in use."""

import asyncio
from collections import deque
from types import TracebackType


class Slots:
    """Slots of running trajectories. Taken with `async with`, in the order in which they are asked for.

    Args:
        limit: most that are taken at a time, at least 1. A lower one takes no slot away from who has it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._num_ended = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def taken(self) -> int:
        return self._taken

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        assert limit >= 1
        self._limit = limit
        self._hand_out()

    def take_num_ended(self) -> int:
        """How many have given their slot back since the last call."""
        taken, self._num_ended = self._num_ended, 0
        return taken

    def locked(self) -> bool:
        """Whether one who asks now would wait."""
        return self._taken >= self._limit

    async def __aenter__(self) -> None:
        if not self.locked():
            self._taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if not turn.cancelled():
                # It had got its slot already.
                self._give_back()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self._taken -= 1
        self._num_ended += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._taken < self._limit:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._taken += 1
                turn.set_result(None)
