"""The critic."""

from dataclasses import dataclass, field

from slimrl.config.schema.trainer import TrainerConfig
from slimrl.config.schema.types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFraction


@dataclass(kw_only=True)
class CriticConfig:
    """The model that estimates values for `algorithm.advantage: gae` (docs/algorithms.md#ppo-with-a-critic). It
    starts from `model` and has ranks on devices of its own."""

    discount: PositiveFraction = 1.0
    """Gamma: what a reward is worth one sampled token earlier."""
    gae_lambda: Fraction = 1.0
    """Lambda: 1 takes rewards as they came, 0 the critic's estimate from the next sampled token on."""
    value_clip: NonNegativeFloat = 0.2
    """An update gains nothing by moving a value further than this from where it was before the rollout's first update;
    0 is off."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the run, in which only the critic learns."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Layout, optimizer and batches of the critic: the settings of `trainer`, whose values it has where a recipe gives
    none here."""
