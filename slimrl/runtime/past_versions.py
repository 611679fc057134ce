"""Older versions of the policy as players (`agent.past_versions`): their folders, and which one plays in a step.

1. After the resync of every N-th step, and before the first step, the trainer's weights are written as a Hugging Face
   folder, `past_versions/step_000010` of the run's. It appears when it is whole.
2. The versions to draw from are the first and the newest ones; they are in the run's state and so in checkpoints.
   A folder is removed when neither the state nor a checkpoint has its version.
3. At the start of a step one of them is drawn, by the run's seed and the step, and its engines load it. An evaluation
   has the first version, so that its curve is against one opponent.
4. What the environment paid in a step counts for the version's win rate. Counts of earlier steps, of all versions, are
   multiplied by DECAY: the policy has changed since.
"""

import logging
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from slimrl.base.errors import RunError
from slimrl.base.seeds import derive_seed
from slimrl.config.schema.agent import PAST, POLICY, PastVersionsConfig, VersionChoice
from slimrl.config.schema.recipe import Recipe
from slimrl.data.roles import outcome
from slimrl.data.trajectory import Trajectory
from slimrl.runtime.cluster.engine_group import EngineGroup
from slimrl.runtime.cluster.trainer_group import TrainerGroup
from slimrl.runtime.state import RunState, read_state

DECAY = 0.9
"""Weight of the games of a step in the win rates of the next one"""

log = logging.getLogger(__name__)


def chosen(results: Mapping[str, Sequence[float]], choice: VersionChoice, seed: int, step: int) -> int:
    """The version that plays in a step.

    Args:
        results: of all versions in ascending order; see RunState.past_versions. A win rate begins as that of one game
            won and one lost.
    """
    steps = list(map(int, results))
    weights = {
        VersionChoice.uniform: [1.0] * len(steps),
        VersionChoice.recency: [1 / (len(steps) - place) for place in range(len(steps))],
        # Prioritized fictitious self-play, f_hard with p = 2 (AlphaStar, doi:10.1038/s41586-019-1724-z).
        VersionChoice.win_rate: [(1 - (won + 1) / (games + 2)) ** 2 for games, won in results.values()],
    }
    [drawn] = random.Random(derive_seed(seed, "past_versions", step)).choices(steps, weights[choice])
    return drawn


def kept(steps: Sequence[int], keep: int) -> list[int]:
    """The first of versions in ascending order, and the newest others, `keep` at most."""
    return [*steps[:1], *steps[1:][-(keep - 1) :]]


class PastVersions:
    """The older versions of a run, from the driver's side."""

    def __init__(
        self,
        recipe: Recipe,
        state: RunState,
        trainers: TrainerGroup,
        engines: EngineGroup,
        folder: Path,
        saved: Sequence[Path],
        pending: Callable[[], Sequence[RunState]] = lambda: (),
    ) -> None:
        """
        Args:
            engines: those of older versions.
            folder: of the versions.
            saved: folders of the run's checkpoints.
            pending: gives the states of the checkpoints that are being written.
        """
        self._settings: PastVersionsConfig = recipe.agent.past_versions
        self._seed, self._state, self._trainers, self._engines = recipe.seed, state, trainers, engines
        self._folder, self._saved, self._pending = folder, saved, pending
        self._loaded: int | None = None
        """The version that the engines have"""

    def keep(self, step: int) -> None:
        """Write the trainer's weights if they are due after this step, or if there is no version yet."""
        versions = self._state.past_versions
        if not versions:
            # A run may have been continued with this setting.
            step = self._state.step
        elif step == 0 or step % self._settings.every_steps:
            return
        target = version_folder(self._folder, step)
        # An attempt that ended before its checkpoint may have left one.
        shutil.rmtree(target, ignore_errors=True)
        self._trainers.export_hf(target)
        names = kept([*map(int, versions), step], self._settings.keep)
        self._state.past_versions = {str(name): versions.get(str(name), [0.0, 0.0]) for name in names}
        self.clean()

    def load_for(self, step: int) -> None:
        """Have the engines load the version that plays in this step. Raises RunError: its folder is gone."""
        self._load(chosen(self._state.past_versions, self._settings.choice, self._seed, step))

    def load_first(self) -> None:
        """Have the engines load the first version."""
        self._load(int(next(iter(self._state.past_versions))))

    def count(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Count the games of a step; returns its metrics."""
        results = [one for trajectory in trajectories if (one := against_past(trajectory)) is not None]
        for counts in self._state.past_versions.values():
            counts[:] = [DECAY * count for count in counts]
        assert self._loaded is not None
        counts = self._state.past_versions[str(self._loaded)]
        counts[:] = [counts[0] + len(results), counts[1] + sum(results)]
        metrics = {"past/version": float(self._loaded), "past/versions": float(len(self._state.past_versions))}
        return metrics | ({"past/win_rate": sum(results) / len(results)} if results else {})

    def clean(self) -> None:
        """Remove the folders of versions that neither the run nor one of its checkpoints draws from."""
        needed = {*self._state.past_versions}
        for pending in self._pending():
            needed |= pending.past_versions.keys()
        for checkpoint in chain.from_iterable(saved.glob("step_*") for saved in self._saved):
            try:
                needed |= read_state(checkpoint)[0].past_versions.keys()
            except ValueError as error:
                log.warning("no older version is removed: %s: %s", checkpoint, error)
                return
        names = {version_folder(self._folder, int(step)).name for step in needed}
        for path in self._folder.iterdir():
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def _load(self, version: int) -> None:
        folder = version_folder(self._folder, version)
        if version == self._loaded:
            return
        if not folder.is_dir():
            raise RunError(f"{folder}: the version that is to play now is gone; a run needs its older versions")
        self._engines.load_checkpoint(folder, version)
        self._loaded = version


def version_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def against_past(trajectory: Trajectory) -> float | None:
    """What the policy made of a game against an older version (`outcome`); None if it played none."""
    roles = trajectory.metadata.get("roles", {})
    own, others = ([role for role, facts in roles.items() if facts["player"] == name] for name in (POLICY, PAST))
    return outcome(trajectory, own, others) if own and others else None
