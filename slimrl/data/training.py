"""Types that trainer and driver share, without Megatron, which the driver does not import."""

import math
from dataclasses import asdict, dataclass, field
from enum import Enum

import numpy as np

from slimrl.config.alignment import sequence_alignment


class MemoryPart(str, Enum):
    """Parts of device memory that a trainer can release."""

    weights = "weights"
    gradients = "gradients"
    optimizer = "optimizer"
    """Main weights and moments of the optimizer"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of all parallel dimensions, and this rank's position in them."""

    rank: int
    world_size: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    expert: int
    expert_tensor: int
    context: int
    data: int
    sequence: bool
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int
    tile: int = 1
    """Multiple of the tokens of a sequence on each rank, for FP8 kernels"""

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank returns the log-probs of its data-parallel rank; one rank of each does."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def alignment(self) -> int:
        """The multiple of tokens to which every packed sequence is padded."""
        return sequence_alignment(tensor=self.tensor, context=self.context, sequence=self.sequence, tile=self.tile)

    @property
    def micro_batch_multiple(self) -> int:
        """The multiple of the number of micro-batches per rank: the interleaved schedule needs the pipeline size."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    def sizes(self) -> dict[str, int]:
        """Sizes of the parallel dimensions without the rank's position: if two layouts have the same, a rank's state
        (random numbers) can be restored."""
        others = {"rank", "tensor_rank", "pipeline_rank", "context_rank", "data_rank", "tile"}
        return {name: int(value) for name, value in asdict(self).items() if name not in others}


@dataclass(frozen=True, kw_only=True, eq=False)
class LogProbs:
    """The trainer's results for one micro-batch, in the order of its tokens."""

    logprobs: np.ndarray
    """float32 [T], of `targets`; meaningless where there is no target"""
    entropy: np.ndarray
    """float32 [T], of the distribution at each position"""
    routed_experts: np.ndarray | None = None
    """int16 [T, layers, topk], the experts of each token in no particular order, -1 in a layer without experts; None
    if not requested"""
    routing_margin: np.ndarray | None = None
    """float32 [T, layers], lowest router score of a chosen expert minus the highest of another: logits under softmax,
    probability plus bias under sigmoid; meaningless in a layer without experts"""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """The result of one optimizer update, equal on every rank but for `expert_load`."""

    sums: dict[str, float]
    """The values that the loss function reported, summed over the whole update batch"""
    denominator: float
    """Number by which the summed loss was divided"""
    grad_norm: float
    """Global gradient norm before clipping; NaN or infinite if the update was skipped, for whatever reason"""
    skipped: bool
    lr: float
    num_tokens: int
    """Tokens of the update batch that are not padding"""
    expert_load_max_over_mean: float = math.nan
    """Tokens of the busiest expert over the mean of its layer's experts, mean over layers: 1 is perfect balance. NaN,
    like all that follow, in a model without experts"""
    expert_load_worst: float = math.nan
    """Tokens of the busiest expert over the mean of its layer's experts, in the layer where this is largest"""
    expert_load_worst_layer: float = math.nan
    """Index of that layer, from 0"""
    dead_experts: float = math.nan
    """Number of experts of all layers that got no token"""
    router_entropy: float = math.nan
    """Entropy of the router's distribution over all experts, natural log, mean over tokens and layers"""
    expert_load: dict[int, np.ndarray] = field(default_factory=dict, compare=False)
    """int64 [experts] by index of the layer from 0, the tokens that each expert got; on rank 0 alone"""
    replayed_fraction: float | None = None
    """Fraction of the pairs of a token and a layer whose experts were given; None without routing replay"""
    replay_changed_fraction: float | None = None
    """Fraction of these pairs for which the router would have chosen other experts"""
