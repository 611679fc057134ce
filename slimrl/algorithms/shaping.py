"""What is made of rewards before advantages: the rule for truncated trajectories, the penalty for long ones.

Both are applied once to the scored trajectories of a step, in this order, so that a penalty is never cancelled.
"""

from collections.abc import Sequence

from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.config.schema.credit import OverlongConfig
from slimrl.config.schema.data import TruncationMode
from slimrl.data.trajectory import Status, Trajectory

OVERLONG = "overlong"
"""Name of the penalty among the parts of a reward."""


def shape_rewards(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> None:
    """Apply `algorithm.truncated`, then `algorithm.overlong`, to rewards in place; failed trajectories are left."""
    apply_truncation_rule(trajectories, algorithm.truncated)
    if algorithm.overlong.max_tokens is None:
        return
    for trajectory in trajectories:
        if trajectory.status is not Status.failed:
            penalty = overlong_penalty(trajectory.num_sampled_tokens, algorithm.overlong)
            trajectory.reward += penalty
            trajectory.role_rewards = {role: own + penalty for role, own in trajectory.role_rewards.items()}
            trajectory.rewards[OVERLONG] = penalty


def unpenalized_reward(trajectory: Trajectory, settings: OverlongConfig) -> float:
    """The reward of a shaped trajectory before the penalty for its length, up to an error of rounding."""
    if settings.max_tokens is None:
        return trajectory.reward
    return trajectory.reward - trajectory.rewards[OVERLONG]


def apply_truncation_rule(trajectories: Sequence[Trajectory], rule: TruncationMode) -> None:
    """Under the rule `zero`, set positive rewards of truncated and aborted trajectories and of their turns to 0.

    Penalties stay: otherwise a trajectory would gain by not ending.
    """
    if rule is TruncationMode.zero:
        for trajectory in trajectories:
            if trajectory.status in (Status.truncated, Status.aborted):
                trajectory.reward = min(0.0, trajectory.reward)
                trajectory.role_rewards = {role: min(0.0, own) for role, own in trajectory.role_rewards.items()}
                trajectory.turn_rewards = [min(0.0, reward) for reward in trajectory.turn_rewards]


def overlong_penalty(num_tokens: int, settings: OverlongConfig) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13), 0 or negative.

    Args:
        num_tokens: sampled tokens of the trajectory.
        settings: with `max_tokens` given.

    Returns:
        0 up to max_tokens - buffer_tokens, from there linearly to -penalty at max_tokens and beyond.
    """
    assert settings.max_tokens is not None, "the penalty is off"
    beyond = num_tokens - (settings.max_tokens - settings.buffer_tokens)
    return -settings.penalty * min(max(beyond / settings.buffer_tokens, 0.0), 1.0)
