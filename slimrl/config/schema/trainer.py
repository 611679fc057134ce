"""The trainer: layout, optimizer, batches, adapters; and the critic, which has a trainer of its own."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from annotated_types import Ge

from slimrl.config.schema.precision import Fp8Scaling, Precision
from slimrl.config.schema.types import (
    MISSING,
    Decay,
    Flag,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Strict,
)


class LrSchedule(str, Enum):
    constant = "constant"
    """The learning rate `lr` throughout."""
    linear = "linear"
    """Linear decay to `min_lr`."""
    cosine = "cosine"
    """Half a cosine down to `min_lr`."""


@dataclass(kw_only=True)
class ParallelConfig:
    tensor: PositiveInt = 1
    """Ranks that share each matrix by rows or columns; each holds whole key-value heads."""
    pipeline: PositiveInt = 1
    """Pipeline stages into which the layers are divided."""
    virtual_pipeline: Annotated[int, Strict(), Ge(2)] | None = None
    """Model chunks per pipeline rank; None for the plain 1F1B schedule."""
    expert: PositiveInt = 1
    """Expert parallelism (EP): ranks over which the experts of a layer are divided."""
    expert_tensor: PositiveInt = 1
    """Tensor parallelism within an expert (ETP), independent of `tensor`."""
    context: PositiveInt = 1
    """Context parallelism: ranks that share the tokens of a micro-batch."""
    sequence: Flag = False
    """Sequence parallelism over the tensor-parallel group; a MoE with tensor > 1 needs it."""

    def data(self, num_ranks: int) -> int:
        """The data-parallel size: ranks over which the sequences of an update are divided."""
        return num_ranks // (self.tensor * self.pipeline * self.context)

    def smallest_world(self) -> int:
        """The fewest ranks for the layout, with data parallelism 1 for the experts or for the rest."""
        return self.pipeline * math.lcm(self.tensor * self.context, self.expert * self.expert_tensor)


@dataclass(kw_only=True)
class OptimizerConfig:
    lr: PositiveFloat = MISSING
    """Peak learning rate."""
    schedule: LrSchedule = LrSchedule.constant
    """Schedule after the warm-up, over all updates of the run."""
    warmup_updates: NonNegativeInt = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""
    min_lr: NonNegativeFloat = 0.0
    """Final learning rate of `linear` and `cosine`."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, decoupled from the gradient as in AdamW."""
    beta1: Decay = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Decay = 0.98
    """Decay rate of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon, added to the square root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    distributed: Flag = True
    """Shard optimizer state over data-parallel ranks."""


@dataclass(kw_only=True)
class LoraConfig:
    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains the model's own weights."""
    alpha: PositiveFloat = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get an adapter, by the last part of their name in Hugging Face's model (`q_proj`,
    `kv_b_proj`, `down_proj`), in attention, MLPs and experts; or `all-linear`."""
    dropout: Decay = 0.0
    """Probability with which a value of an adapter's input is dropped in training."""


@dataclass(kw_only=True)
class MtpConfig:
    train: Flag = False
    """Train the model's layers for multi-token prediction, with which an engine may draft tokens. The rest of the model
    learns the same with and without them (docs/models.md)."""
    loss_weight: PositiveFloat = 0.1
    """Factor of their loss. As it reaches no other weights, it matters little with Adam: the size of their gradient
    before clipping, which they have for themselves."""


@dataclass(kw_only=True)
class TrainerConfig:
    num_ranks: PositiveInt = 1
    """World size of the trainer: tensor * pipeline * context * data."""
    threads_per_rank: PositiveInt = 1
    """CPU threads of each trainer process (OMP_NUM_THREADS)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    precision: Precision = Precision.bf16
    """Precision of weights and activations; log-probs, gradients and optimizer state are always float32."""
    fp8: Fp8Scaling = Fp8Scaling.off
    """Linear layers of the transformer compute in FP8, through Transformer Engine; weights and optimizer keep
    `precision`."""
    fp8_emulation: Flag = False
    """Round to `fp8` and back around Megatron's own linear layers instead: the numbers of FP8 on any machine without
    Transformer Engine, without its speed."""
    max_tokens_per_rank: PositiveInt = MISSING
    """Token budget of a packed micro-batch on one rank (a context-parallel group holds `context` times as many)."""
    token_multiple: PositiveInt = 1
    """A rank's tokens of a micro-batch are padded to a multiple of this, within the budget. With 128 a GPU's kernels
    and its allocator see few sizes."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer updates per rollout batch, each on an equal part of its groups."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose log-probs are computed at a time; bounds the memory of float32 [tokens, vocabulary] logits."""
    max_skipped_updates: PositiveInt = 3
    """The run stops after this many consecutive updates with a NaN or infinite loss or gradient."""
    startup_timeout_s: PositiveFloat = 600.0
    """Deadline for all ranks to build the model and load its weights."""
    timeout_s: PositiveFloat = 1800.0
    """Deadline of one trainer call: a pass over a batch, a checkpoint, an export."""
    hang_timeout_s: PositiveFloat = 600.0
    """Seconds in which some rank must make progress, by a micro-batch or a bucket of weights; else the trainer hangs
    and is started anew (`run.max_restarts`). Checkpoints and exports have `timeout_s` alone."""
    spare_nodes: NonNegativeInt = 0
    """Nodes of the job beyond those that the run fills, which nothing uses until a node with ranks is lost that is not
    the driver's (docs/clusters.md#a-trainer-that-dies)."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the trainer's processes, such as `NCCL_DEBUG: INFO`; those that slimrl sets are refused."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig,
    [those that are safe](#fields-of-megatron-core-and-sglang)."""


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
