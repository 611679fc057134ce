"""The states that a search over an episode's steps has reached; each is gone on from once.

1. `expand` samples turns in a state. Each leads to a new state, or to the end of the episode.
2. A new state gets a value: the mean over the ends of plain episodes that go on from it, or what is said of the state
   as it is. An end's value is what is said of it.
3. Each value counts for the state and for all those before it: the value of a state is the mean of what counts for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from slimrl.agent.episode import Episode, run_turns, take_turn
from slimrl.config.schema.search import SearchConfig
from slimrl.data.engine import EngineError
from slimrl.data.trajectory import Status

Judge = Callable[[Episode, Status], Awaitable[float]]
"""Says how good a state or an end is; `truncated` is the status of a state from which an episode may go on."""
RunTurns = Callable[[Episode], Awaitable[Status | None]]


@dataclass(eq=False, kw_only=True)
class Node:
    """A state: the episode after some turns."""

    episode: Episode
    parent: "Node | None" = None
    status: Status | None = None
    """How the episode ended here; None if it goes on"""
    num_turns: int = 0
    """Turns up to here"""
    children: list["Node"] = field(default_factory=list)
    num_values: int = 0
    sum_values: float = 0.0

    @property
    def value(self) -> float:
        return self.sum_values / self.num_values if self.num_values else 0.0

    @property
    def has_turn(self) -> bool:
        """Whether a turn led here: an episode may also end because there is no room for one."""
        return self.parent is not None and self.num_turns > self.parent.num_turns

    @property
    def is_spent(self) -> bool:
        """Whether no state from here on can be gone on from."""
        return self.status is not None or (bool(self.children) and all(child.is_spent for child in self.children))


@dataclass(frozen=True, eq=False, kw_only=True)
class End:
    """An episode that has ended."""

    node: Node
    """The last state of the tree on its path; a plain episode went on from there"""
    episode: Episode
    status: Status
    value: float


@dataclass(frozen=True, eq=False, kw_only=True)
class _Grown:
    """What came of a turn in a state."""

    node: Node
    ends: list[End]
    value: float


class Tree:
    """
    Args:
        root: its environment is closed with the tree.
        parallel: whether turns are sampled at the same time; a deterministic engine takes one request at a time of a
            trajectory.
    """

    def __init__(self, root: Episode, settings: SearchConfig, judge: Judge, *, parallel: bool) -> None:
        self._settings, self._judge, self._parallel = settings, judge, parallel
        self.root = Node(episode=root)
        self.nodes: list[Node] = []
        """The states but for the first one, in the order in which their turns were begun"""
        self.ends: list[End] = []
        self.num_tokens = 0
        """Tokens that were sampled, those of plain episodes included"""
        self._open = {root: self.root}
        """Episodes whose environment is open"""
        self._closing: set[asyncio.Future[None]] = set()
        self._numbers: Iterator[int] = count()

    @property
    def has_budget(self) -> bool:
        limit = self._settings.max_tokens
        return limit is None or self.num_tokens < limit

    async def expand(self, nodes: Sequence[Node]) -> list[Node]:
        """The states after `width` turns in each of these, in order.

        Raises:
            EnvironmentFailure: an environment cannot be copied, or fails.
            EngineError: the engine does.
        """
        width, rollouts = self._settings.width, self._settings.rollouts
        calls = []
        for node in nodes:
            numbers = [[next(self._numbers) for _ in range(1 + rollouts)] for _ in range(width)]
            calls += [partial(self._grow, node, own) for own in numbers]
        grown = await self._all(calls)
        await self.drop(nodes)
        for one in grown:
            self.nodes.append(one.node)
            self.ends += one.ends
            assert one.node.parent is not None
            one.node.parent.children.append(one.node)
            _count(one.node, one.value)
        return [one.node for one in grown]

    async def drop(self, nodes: Sequence[Node]) -> None:
        """Close the environments of states that will not be gone on from."""
        await self._close([node.episode for node in nodes])

    async def best_end(self) -> End:
        """The end of the highest value, the first of several; without one the best state is gone on from to the end."""
        if not self.ends:
            node = max(self._open.values(), key=lambda one: one.value)
            self.ends.append(await self._to_the_end(node, node.episode))
        return max(self.ends, key=lambda end: end.value)

    async def close(self) -> None:
        """Close the environments of all states, and wait for those that close already."""
        await self._close(list(self._open))
        await asyncio.shield(asyncio.gather(*self._closing))

    async def _close(self, episodes: Sequence[Episode]) -> None:
        """Close these; what has begun to close goes on if this is cancelled."""
        closing = [
            asyncio.ensure_future(episode.host.close())
            for episode in episodes
            if self._open.pop(episode, None) is not None
        ]
        self._closing.update(closing)
        for task in closing:
            task.add_done_callback(self._closing.discard)
        await asyncio.shield(asyncio.gather(*closing))

    async def _grow(self, parent: Node, numbers: Sequence[int]) -> _Grown:
        """A turn in a state.

        Args:
            numbers: of the forks of the episode, for the new state and for each plain episode from there.
        """
        episode = await parent.episode.fork(numbers[0])
        node = self._open[episode] = Node(episode=episode, parent=parent)
        node.status = await self._sampled(episode, take_turn)
        node.num_turns = episode.conversations.num_turns
        if node.status is not None:
            value = await self._judge(episode, node.status)
            await self.drop([node])
            return _Grown(
                node=node, ends=[End(node=node, episode=episode, status=node.status, value=value)], value=value
            )
        if len(numbers) == 1:
            return _Grown(node=node, ends=[], value=await self._judge(episode, Status.truncated))
        ends = await self._all([partial(self._rollout, node, number) for number in numbers[1:]])
        return _Grown(node=node, ends=ends, value=sum(end.value for end in ends) / len(ends))

    async def _rollout(self, node: Node, number: int) -> End:
        episode = await node.episode.fork(number)
        self._open[episode] = node
        end = await self._to_the_end(node, episode)
        await self._close([episode])
        return end

    async def _to_the_end(self, node: Node, episode: Episode) -> End:
        status = await self._sampled(episode, run_turns)
        assert status is not None
        return End(node=node, episode=episode, status=status, value=await self._judge(episode, status))

    async def _sampled(self, episode: Episode, run: RunTurns) -> Status | None:
        before = episode.conversations.num_sampled_tokens
        try:
            status = await run(episode)
        finally:
            self.num_tokens += episode.conversations.num_sampled_tokens - before
        if status is Status.aborted:
            raise EngineError("aborted by the engine")
        return status

    async def _all[T](self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """What the calls return, in order; the others are cancelled if one raises."""
        if not self._parallel:
            return [await call() for call in calls]
        running = [asyncio.ensure_future(call()) for call in calls]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _count(node: Node | None, value: float) -> None:
    while node is not None:
        node.num_values += 1
        node.sum_values += value
        node = node.parent
