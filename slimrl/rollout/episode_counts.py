"""How many episodes run, and what became of those that have ended, for whoever watches the run."""

from collections import Counter

from slimrl.data.engine import EVALUATION
from slimrl.data.trajectory import Trajectory


class EpisodeCounts:
    """Used on the event loop of the episodes; another thread may read it. Counted by kind: `train` or `eval`."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter(train=0, eval=0)
        self.ended: Counter[tuple[str, str]] = Counter()
        """Number of episodes by kind and status"""
        self.tokens: Counter[str] = Counter(train=0, eval=0)
        """Number of tokens that the policy sampled in them"""

    def begin(self, trajectory_id: str) -> None:
        self.running[_kind(trajectory_id)] += 1

    def end(self, trajectory_id: str) -> None:
        self.running[_kind(trajectory_id)] -= 1

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory that has its reward."""
        kind = _kind(trajectory.trajectory_id)
        self.ended[kind, trajectory.status.value] += 1
        self.tokens[kind] += sum(int(segment.loss_mask.sum()) for segment in trajectory.segments)


def _kind(trajectory_id: str) -> str:
    return "eval" if trajectory_id.startswith(EVALUATION) else "train"
