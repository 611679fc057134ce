"""What happens between the rewards of trajectories and the advantages of their tokens."""

from dataclasses import dataclass, field
from enum import Enum

from slimrl.config.schema.types import (
    Decay,
    Float,
    Multiple,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)


class CreditName(str, Enum):
    """How advantages differ among the turns of a trajectory; docs/algorithms.md#credit-over-turns has the formulas."""

    trajectory = "trajectory"
    """The same advantage for every turn, that of its trajectory."""
    turn = "turn"
    """Rewards from the turn on, discounted, compared within the group at each turn."""
    gigpo = "gigpo"
    """The advantage of the trajectory plus that of the turn among turns from the same state (arXiv:2505.10978)."""


class SelectionMode(str, Enum):
    """The trajectories of a group that are trained on."""

    all = "all"
    """All trajectories of the group."""
    best_and_worst = "best_and_worst"
    """The trajectories with the highest and the lowest rewards; the others only count in the group's baseline."""
    best = "best"
    """Rejection sampling: the trajectories with the highest rewards, each with advantage 1."""


class RefillMode(str, Enum):
    """Prompts that replace zero-variance groups (dynamic sampling, arXiv:2503.14476)."""

    off = "off"
    """None: a step has `rollout.prompts_per_step` prompts, also where groups have zero variance."""
    order = "order"
    """The next prompts in the order of the training data."""
    value = "value"
    """Prompts drawn from all, with weights that prefer those of middling difficulty and those seldom tried."""


@dataclass(kw_only=True)
class CreditConfig:
    name: CreditName = CreditName.trajectory
    """How advantages differ among the turns of a trajectory."""
    discount: PositiveFraction = 1.0
    """Factor on a later turn's reward for each turn in between (turn, gigpo)."""
    step_weight: PositiveFloat = 1.0
    """Weight of the advantage among turns from the same state (gigpo)."""
    turn_weights: list[NonNegativeFloat] = field(default_factory=list)
    """Factors on the advantages of the first turn, the second and so on; later turns have the last. Empty for 1."""
    process_weights: list[NonNegativeFloat] = field(default_factory=lambda: [1.0])
    """Weight of the rewards of turns in each stage of the run; `[0.7, 0.3, 0]` moves from dense to sparse rewards."""
    outcome_weights: list[NonNegativeFloat] = field(default_factory=lambda: [1.0])
    """Weight of the trajectory's own reward in each stage, as `[0.3, 0.7, 1]`."""
    stage_starts: list[PositiveInt] = field(default_factory=list)
    """Steps at which the second stage and those after it begin."""

    @property
    def by_turn(self) -> bool:
        """Whether advantages differ among the turns of a trajectory."""
        return self.name is not CreditName.trajectory or bool(self.turn_weights)


@dataclass(kw_only=True)
class SelectionConfig:
    mode: SelectionMode = SelectionMode.all
    """The trajectories of a group that are trained on."""
    count: PositiveInt = 1
    """How many of the best trajectories are kept, and with `best_and_worst` how many of the worst."""
    min_reward: Float = 1.0
    """Smallest reward of a trajectory that `best` keeps."""


@dataclass(kw_only=True)
class DynamicSamplingConfig:
    refill: RefillMode = RefillMode.off
    """Prompts that replace zero-variance groups."""
    max_refills: PositiveInt = 4
    """Most further rollouts of a step, for replacements."""
    oversampling: Multiple = 1.0
    """Prompts of each rollout of a step, as a multiple of the groups that are missing; those in excess are dropped.
    `rollout.oversample` is another thing: its groups go on in the next step."""
    value_decay: Decay = 0.8
    """Weight of a prompt's earlier results against its newest in its success rate (value)."""
    uncertainty_weight: PositiveFloat = 0.5
    """Weight of how seldom a prompt was tried, against its difficulty (value)."""
    max_weight: Multiple = 4.0
    """Largest weight of a prompt, as a multiple of the mean (value)."""


@dataclass(kw_only=True)
class OverlongConfig:
    max_tokens: PositiveInt | None = None
    """Sampled tokens of a trajectory at which the penalty is complete; null is off (DAPO, arXiv:2503.14476, eq. 13)."""
    buffer_tokens: PositiveInt = 1024
    """Last tokens before it over which the penalty grows linearly."""
    penalty: PositiveFloat = 1.0
    """The penalty at `max_tokens`, subtracted from the reward."""
