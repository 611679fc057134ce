"""What a step trains on, as the rollout service gives it to the driver."""

from dataclasses import dataclass

from slimrl.algorithms.selection import Selection
from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory


@dataclass(kw_only=True)
class StepRollout:
    """The trajectories of a step; their rewards are shaped."""

    sampled: list[Trajectory]
    """The trajectories of the batch; where no group spans steps also those that others replaced, in the order in which
    the groups began"""
    prompts: dict[str, Prompt]
    """Prompts of the trajectories, by their ids"""
    selection: Selection
    """What the learner gets"""
    metrics: dict[str, float]
    """Metrics of the refill, or of the groups that span steps"""
    seconds: float
    """Duration of the rollout, or time since the last one where groups span steps"""
