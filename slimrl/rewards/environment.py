"""The rewards that the trajectory's environment gave."""

from fnmatch import fnmatchcase

from slimrl.data.prompt import Prompt
from slimrl.data.roles import trained_roles
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.scoring import Score


def environment_return(trajectory: Trajectory, prompt: Prompt) -> float:
    """Sum of the rewards of the environment's steps; 0 if it gave none."""
    return float(sum(trajectory.metadata["environment"].get("rewards", [])))


class RoleReturns:
    """
    `role_returns`, but of the trajectory the mean over some roles, such as those whose success a curriculum follows.

    Args:
        reported: name of these roles; `*` stands for any text.
    """

    def __init__(self, *, reported: str) -> None:
        self._reported = reported

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Score:
        """0 of the trajectory if none of these roles came to its turn; see `role_returns`."""
        by_role = role_returns(trajectory, prompt).by_role
        own = [value for role, value in by_role.items() if fnmatchcase(role, self._reported)]
        return Score(reward=sum(own) / max(len(own), 1), by_role=by_role)


def role_returns(trajectory: Trajectory, prompt: Prompt) -> Score:
    """What the environment paid each role (`Observation.role_rewards`), 0 where it paid nothing; of the trajectory the
    mean over the roles that are trained. Raises ValueError: there are no roles, or no environment that pays them."""
    if "roles" not in trajectory.metadata:
        raise ValueError("the trajectory has no roles that could be paid; use environment_return")
    if "gateway" in trajectory.metadata:
        raise ValueError("no environment pays the roles of an agent behind the gateway; use posted_reward")
    paid = trajectory.metadata["environment"].get("role_rewards", {})
    by_role = {role: float(paid.get(role, 0.0)) for role in trained_roles(trajectory)}
    return Score(reward=sum(by_role.values()) / max(len(by_role), 1), by_role=by_role)
