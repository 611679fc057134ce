"""The reward that an agent behind the gateway gives itself, by `POST` to its reward URL (docs/gateway.md)."""

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import POSTED_REWARD, Trajectory


def posted_reward(trajectory: Trajectory, prompt: Prompt) -> float:
    """The number that was posted last. Raises LookupError if there was none."""
    if POSTED_REWARD not in trajectory.scratch:
        raise LookupError("the agent posted no reward for the trajectory")
    return float(trajectory.scratch[POSTED_REWARD])
