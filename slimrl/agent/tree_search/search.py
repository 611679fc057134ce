"""Searches an episode: the best of its ends is the trajectory, and all turns are there for training."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from slimrl.agent.environment import EnvironmentFailure
from slimrl.agent.episode import Episode, Searched, Snapshot
from slimrl.agent.tree_search.methods import grow
from slimrl.agent.tree_search.training import search_tree
from slimrl.agent.tree_search.tree import Tree
from slimrl.config.schema.search import SearchConfig
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Status, Trajectory


class Value(Protocol):
    """Says how good a state is: the greater the better."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Awaitable[float]: ...


@dataclass(frozen=True, kw_only=True)
class TreeSearch:
    """
    Args:
        parallel: see Tree.
        trains: whether all turns are trained, and not only the path.
    """

    settings: SearchConfig
    value: Value
    parallel: bool
    trains: bool

    async def start(self) -> None:
        """Open what the value function needs."""
        await self.value.start()

    async def stop(self) -> None:
        await self.value.stop()

    async def run(self, episode: Episode, snapshot: Snapshot, figures: dict[str, int]) -> Searched:
        """Search an episode that has just begun.

        Args:
            figures: gets the numbers of states, ends and sampled tokens, also of a search that fails.

        Raises:
            EnvironmentFailure: the environment has several roles, cannot be copied or fails, or the value function
                does.
            EngineError: the engine does.
        """
        if list(episode.conversations.by_role) != [""]:
            raise EnvironmentFailure("agent.search: the environment has several roles, and a search is for one")

        async def judge(state: Episode, status: Status) -> float:
            try:
                return await self.value(snapshot(state, status), episode.prompt)
            except Exception as error:
                # A function of the task's own may raise anything.
                raise EnvironmentFailure(f"agent.search.value failed: {error!r}") from error

        tree = Tree(episode, self.settings, judge, parallel=self.parallel)
        try:
            await grow(tree, self.settings)
            best = await tree.best_end()
        finally:
            figures |= {"num_states": len(tree.nodes), "num_ends": len(tree.ends), "num_tokens": tree.num_tokens}
            await tree.close()
        return Searched(
            episode=best.episode,
            status=best.status,
            tree=search_tree(tree, best) if self.trains else None,
        )
