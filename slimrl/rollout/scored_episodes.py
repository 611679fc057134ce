"""Episodes and what is added to their trajectories: rewards, those of groups, the teacher's log-probs.

Each is the task's own code or another server, and may fail. The trajectory then has failed; the recipe limits how many
may.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from slimrl.algorithms.selection import check_credit
from slimrl.algorithms.turn_states import observed_states
from slimrl.base.seeds import derive_seed
from slimrl.base.spans import SPANS
from slimrl.config.schema.credit import CreditName
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import SamplingConfig
from slimrl.data.engine import EVALUATION, Engine, EngineError
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import SearchTree, Status, Trajectory
from slimrl.engines.teacher import Teacher
from slimrl.engines.turn_logs import LoggedTurn
from slimrl.rewards.groups import score_group
from slimrl.rewards.loading import Rewards
from slimrl.rewards.parts import PartFailed
from slimrl.rewards.scoring import score

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What runs an episode: EpisodeRunner, GatewayRunner or EpisodeWorkers."""

    async def run(
        self, prompt: Prompt, *, trajectory_id: str, sampling: SamplingConfig, seed: int | None
    ) -> Trajectory: ...


class Workers(Runner, Protocol):
    """What runs episodes in other processes: EpisodeWorkers."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def begin(self, trajectory_id: str, saved: Sequence[LoggedTurn] = ()) -> None: ...

    def forget(self, trajectory_id: str) -> None: ...

    async def turns(self) -> Mapping[str, Sequence[LoggedTurn]]: ...

    def take_lags(self) -> Sequence[float]: ...


class ScoredEpisodes:
    """Runs episodes and adds rewards, credit and the teacher's log-probs. Used on the event loop of the episodes."""

    def __init__(
        self, recipe: Recipe, rewards: Rewards, runner: Runner, engine: Engine, roles: Sequence[str] = ()
    ) -> None:
        """
        Args:
            engine: its session of a trajectory is closed when the episode has ended.
            roles: those that the environment's class says it has.
        """
        self._recipe, self._rewards, self._runner, self._engine = recipe, rewards, runner, engine
        self._roles = {*roles, *recipe.agent.roles}

    async def run(self, trajectory_id: str, prompt: Prompt, sampling: SamplingConfig) -> Trajectory:
        """A trajectory with its own reward and, where the recipe needs them, the states of its turns."""
        with SPANS.lane("episode"), SPANS("episode", id=trajectory_id):
            seed = derive_seed(self._recipe.seed, "trajectory", trajectory_id)
            trajectory = await self._runner.run(prompt, trajectory_id=trajectory_id, sampling=sampling, seed=seed)
            self._engine.close(trajectory_id)
            tree, trajectory.search_tree = trajectory.search_tree, None
            try:
                with SPANS("reward"):
                    timeout_s = self._recipe.rollout.trajectory_timeout_s
                    await score(trajectory, prompt, self._rewards.function, timeout_s, self._roles)
                if not trajectory_id.startswith(EVALUATION):
                    if tree is not None and self._recipe.algorithm.given_by_turn:
                        _take_search_tree(trajectory, tree)
                    self._complete_credit(trajectory)
            except Exception as error:
                # A task's own code may raise anything.
                name = self._recipe.reward.function or "the reward"
                whole = f"{name} failed: {type(error).__name__}: {error}"
                cause = str(error) if isinstance(error, PartFailed) else whole
                log.warning("%s: %s", trajectory_id, cause, exc_info=error)
                _fail(trajectory, cause)
            return trajectory

    async def score_by(self, teacher: Teacher, trajectory: Trajectory) -> list[float]:
        """Add the teacher's log-probs to a trajectory that has not failed.

        Returns:
            The seconds of the score, if there is one.
        """
        if trajectory.status is Status.failed:
            return []
        start = time.monotonic()
        try:
            await teacher.score(trajectory)
        except EngineError as error:
            cause = f"the teacher failed: {error}"
            log.warning("%s: %s", trajectory.trajectory_id, cause)
            _fail(trajectory, cause)
            return []
        return [time.monotonic() - start]

    async def score_group(self, trajectories: Sequence[Trajectory], prompt: Prompt) -> None:
        """Add the rewards of groups to a prompt's trajectories, all of which fail if one of these rewards does."""
        rewards, timeout_s = self._rewards, self._recipe.rollout.trajectory_timeout_s
        try:
            await score_group(trajectories, prompt, rewards.group, timeout_s, rewards.retries)
        except PartFailed as error:
            log.warning("%s: %s", prompt.prompt_id, error, exc_info=error)
            for trajectory in trajectories:
                if trajectory.status is not Status.failed:
                    _fail(trajectory, str(error))

    def _complete_credit(self, trajectory: Trajectory) -> None:
        """Add the states that GiGPO needs where the reward gives none: the environment's, or a hash of its messages.

        Raises:
            ValueError: the task gave less than the recipe's advantages need.
        """
        if trajectory.status is Status.failed:
            return
        if self._recipe.algorithm.credit.name is CreditName.gigpo and not trajectory.turn_states:
            states = trajectory.metadata["environment"].get("states")
            if not states and "roles" in trajectory.metadata:
                raise ValueError("algorithm.credit.name gigpo needs a state_id in each observation of several roles")
            trajectory.turn_states = states or observed_states(
                trajectory.messages, trajectory.metadata["num_prompt_messages"], trajectory.num_turns
            )
        check_credit(trajectory, self._recipe.algorithm)


def _take_search_tree(trajectory: Trajectory, tree: SearchTree) -> None:
    """Put all turns of a search in place of those of the path that it chose, whose reward the trajectory keeps."""
    trajectory.segments, trajectory.turn_advantages = tree.segments, tree.turn_advantages
    trajectory.turn_rewards, trajectory.turn_states = [], []


def _fail(trajectory: Trajectory, cause: str) -> None:
    trajectory.status = Status.failed
    trajectory.metadata["error"] = cause
