"""The reward that an agent behind the gateway gives itself, by `POST` to its reward URL (docs/gateway.md)."""

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import POSTED_BY_ROLE, POSTED_REWARD, Trajectory
from slimrl.rewards.scoring import Score


def posted_reward(trajectory: Trajectory, prompt: Prompt) -> float | Score:
    """The number that was posted last, with those of roles if there were any. Raises LookupError if there was none."""
    if POSTED_REWARD not in trajectory.scratch:
        raise LookupError("the agent posted no reward for the trajectory")
    reward, by_role = float(trajectory.scratch[POSTED_REWARD]), trajectory.scratch.get(POSTED_BY_ROLE)
    return Score(reward=reward, by_role=by_role) if by_role else reward
