"""A reward that a random model earns: what it samples decides, so that a group's rewards differ."""

import numpy as np

from slimrl.data.prompt import Prompt
from slimrl.data.trajectory import Trajectory
from slimrl.rewards.scoring import Score


def low_tokens_of_any_version(trajectory: Trajectory, prompt: Prompt) -> float:
    """Share of the sampled tokens whose id is below 256, about half of the vocabulary."""
    sampled = [int(t) for s in trajectory.segments for t in s.tokens[s.loss_mask]]
    return sum(token < 256 for token in sampled) / max(1, len(sampled))


def low_tokens(trajectory: Trajectory, prompt: Prompt) -> float:
    """The same of a run that sends its weights once a step.

    Raises:
        AssertionError: a sampled token of step n was not sampled by weight version n - 1.
    """
    label = trajectory.trajectory_id.split("/")[0]
    versions = {int(v) for s in trajectory.segments for v in s.weight_versions[s.loss_mask]}
    if label.startswith("step_"):
        assert versions == {int(label.removeprefix("step_")) - 1}, f"{trajectory.trajectory_id}: versions {versions}"
    return low_tokens_of_any_version(trajectory, prompt)


def beyond_32_bits(trajectory: Trajectory, prompt: Prompt) -> float:
    """As `low_tokens_of_any_version`, but for prompts that are planted: their advantages are beyond 32 bits."""
    scale = 1e41 if prompt.metadata.get("planted") else 1.0
    return scale * low_tokens_of_any_version(trajectory, prompt)


def rare_score(trajectory: Trajectory, prompt: Prompt) -> Score:
    """1 if most sampled tokens have an even id, so that some groups of a random model are equal; each turn a half."""
    tokens = np.concatenate([segment.tokens[segment.loss_mask] for segment in trajectory.segments])
    even = float((tokens % 2 == 0).mean() > 0.55) if len(tokens) else 0.0
    return Score(reward={"even": even}, turn_rewards=[0.5] * trajectory.num_turns)
