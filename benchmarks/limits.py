"""What the processor can do at most, and how much of it the steps of a race take.

- A matrix product of two float32 matrices gives the operations per second, a dot product of two long vectors the bytes
  read per second, both on the threads that a step has.
- Operations: `slimrl plan`'s formula. A token costs 2 N and its attention forward, and twice that backward, with N
  parameters (arXiv:2001.08361, section 2.1). Neither padding nor recomputation counts.
- Bytes of decoding (arXiv:2211.05102, section 2.1): each process reads its weights once for each token of a mean
  trajectory, as if all of its trajectories ran to the same end, and the keys and values of each token's context. Of
  trajectories of one length that is what is read; with a tail it is less.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from slimrl.estimates.planner.engine import kv_bytes_per_token
from slimrl.estimates.planner.parameters import ModelParameters, model_parameters
from slimrl.estimates.planner.shape import Shape
from slimrl.estimates.planner.work import forward_flops_per_token
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config

MATRIX_ROWS = 3072
VECTOR_BYTES = 256 * 1024**2
"""Bytes of each of two vectors: more than a processor's caches hold"""
MEASURED_FOR_S = 2.0
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The best of some seconds of each."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def measured(cls, threads: int) -> Self:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        matrix, vector = torch.rand(MATRIX_ROWS, MATRIX_ROWS), torch.rand(VECTOR_BYTES // FLOAT_BYTES)
        other = vector.clone()
        product_s = _shortest_s(lambda: matrix @ matrix)
        read_s = _shortest_s(lambda: torch.dot(vector, other))
        torch.set_num_threads(before)
        return cls(flops_per_s=2 * MATRIX_ROWS**3 / product_s, bytes_per_s=2 * VECTOR_BYTES / read_s)


def _shortest_s(call: Callable[[], object]) -> float:
    """Seconds of the shortest of the calls that fit into MEASURED_FOR_S."""
    shortest, end = float("inf"), time.perf_counter() + MEASURED_FOR_S
    while (start := time.perf_counter()) < end:
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Operations and bytes of a step of a model whose trajectories are sampled by `processes` at a time.

    Args:
        tokens: sampled in the step.
        sequence_tokens: of all trajectories, prompts and tools' answers included.
        trajectories: of the step.
    """

    shape: Shape
    parameters: ModelParameters
    tokens: float
    sequence_tokens: float
    trajectories: int
    processes: int

    @property
    def training_flops(self) -> float:
        """Forward and backward of all tokens."""
        return 3 * self.generation_flops

    @property
    def generation_flops(self) -> float:
        """Forward of all tokens, each computed once: a prompt of several trajectories for each of them."""
        length = round(self.sequence_tokens / self.trajectories)
        return self.sequence_tokens * forward_flops_per_token(self.shape, self.parameters, length)

    @property
    def decoding_bytes(self) -> float:
        sampled = self.tokens / self.trajectories
        context = self.sequence_tokens / self.trajectories - sampled / 2
        weights = self.processes * sampled * FLOAT_BYTES * self.parameters.active_without_embedding
        return weights + self.tokens * context * kv_bytes_per_token(self.shape, 1, FLOAT_BYTES)


def sizes_of(model: Path) -> tuple[Shape, ModelParameters]:
    """Raises ValueError for a folder that is no checkpoint of a supported model."""
    hf_config = read_hf_config(model)
    family = family_of(hf_config)
    config = family.megatron_config(hf_config)
    return Shape.of(config), model_parameters(family.weight_map(hf_config), config)
