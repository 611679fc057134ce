"""The whole recipe: every setting of a run with its default, as nested dataclasses.

A recipe is YAML over these classes and must give each field without a default.
Times end in `_s` (seconds), sizes in `_bytes` or `_tokens`; paths are relative to the working directory.
The modules of this folder import no torch, so that a recipe is checked in milliseconds.
"""

from dataclasses import dataclass, field
from math import ceil

from slimrl.config.schema.agent import AgentConfig
from slimrl.config.schema.algorithm import AdvantageName, AlgorithmConfig
from slimrl.config.schema.credit import RefillMode
from slimrl.config.schema.data import DataConfig, EvalConfig, SftConfig
from slimrl.config.schema.model import ModelConfig, TeacherConfig
from slimrl.config.schema.resync import ResyncConfig, TransportName
from slimrl.config.schema.reward import RewardConfig
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.run import CheckpointConfig, RunConfig, StopConfig, TrackingConfig
from slimrl.config.schema.trainer import CriticConfig, TrainerConfig
from slimrl.config.schema.types import MISSING, Flag, NonNegativeInt, PositiveInt


@dataclass(kw_only=True)
class Recipe:
    """The settings of one run of `slimrl train`, `sft`, `eval` or `rollout`."""

    seed: NonNegativeInt = 0
    """Seed of all randomness: data order, sampling, initial states."""
    deterministic: Flag = False
    """Make equal seeds give equal metrics: seeded requests, rollout in lockstep batches, and on GPUs slower algorithms
    that add in the same order each time."""
    steps: PositiveInt = MISSING
    """Rollout-and-train steps of `slimrl train`, optimizer updates of `slimrl sft`."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    resync: ResyncConfig = field(default_factory=ResyncConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def has_critic(self) -> bool:
        return self.algorithm.advantage == AdvantageName.gae.value

    @property
    def critic_ranks(self) -> int:
        """Ranks of the critic that the run starts."""
        return self.critic.trainer.num_ranks if self.has_critic else 0

    @property
    def past_engines(self) -> int:
        """Engines for older versions of the policy that the run starts."""
        return self.agent.past_versions.num_engines if self.agent.past_versions.every_steps else 0

    @property
    def step_trajectories(self) -> int | None:
        """The most trajectories of a step that run at a time; None where those of other steps run among them."""
        if self.rollout.spans_steps:
            return None
        sampling = self.algorithm.dynamic_sampling
        prompts = self.rollout.prompts_per_step * (1.0 if sampling.refill is RefillMode.off else sampling.oversampling)
        return ceil(prompts) * self.rollout.samples_per_prompt

    @property
    def shares_devices(self) -> bool:
        """Whether engines run on the devices of trainer ranks: colocated, or because `ipc` cannot reach others."""
        return self.rollout.colocated or self.resync.transport is TransportName.ipc

    @property
    def may_add_engines(self) -> bool:
        """Whether engines may join a run on any free devices of the cluster."""
        return not self.shares_devices and self.rollout.engine_nodes == 1 and not self.deterministic
