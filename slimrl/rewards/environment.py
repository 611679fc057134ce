"""The reward that the trajectory's environment gave."""

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory


def environment_return(trajectory: Trajectory, prompt: Prompt) -> float:
    """Sum of the rewards of the environment's steps; 0 if it gave none."""
    return float(sum(trajectory.metadata["environment"].get("rewards", [])))
