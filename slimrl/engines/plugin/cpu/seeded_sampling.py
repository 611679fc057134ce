"""Sampling that depends on the request's seed and the token's position, and on nothing else.

SGLang honours `sampling_seed` only in its deterministic mode, which needs Triton kernels. Here every request has
a seed on a CPU: its own, or one drawn when its prefill starts. A token is drawn by inverting the cumulative
distribution at one uniform number per row, a hash of (seed, position); it costs less than torch.multinomial and
needs neither a global generator nor a compiler.
"""

import random
from typing import Any

import torch
from torch import Tensor

from slimrl.models.fingerprint import SPLITMIX_STEP, splitmix64


def uniforms(seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """Float64 [R] in [0, 1) with 53 random bits: SplitMix64 of each seed, at the index given by the position."""
    # The seed is mixed first, so that neighbouring seeds do not give shifted copies of one sequence.
    state_R = splitmix64(seeds_R.long() + SPLITMIX_STEP) + (positions_R.long() + 1) * SPLITMIX_STEP
    return ((splitmix64(state_R) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def sample(probs_RV: Tensor, seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """Draw one column per row.

    Args:
        probs_RV: non-negative weights, not necessarily summing to 1.
        seeds_R: integer seed of each row's request.
        positions_R: integer position of the token in its request.

    Returns:
        int64 [R, 1]; never a column of weight 0.
    """
    cumulative_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    threshold_R1 = uniforms(seeds_R, positions_R)[:, None] * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, threshold_R1, right=True)


def sampling_from_probs(probs: Tensor, sampling_seed: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """Replaces sampling_from_probs_torch; int32 [R]."""
    if sampling_seed is None or positions is None:
        raise ValueError("a batch reached the sampler without seeds")
    return sample(probs, sampling_seed, positions).view(-1).to(torch.int32)


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Replaces the compiled function of the same name, which the top-k and top-p paths call; int64 [R, 1]."""
    return sample(logprobs.exp(), seed, positions)


def after_from_schedule_batch(info: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """Give each request of a new batch its seed; filtering and merging of batches carry it along."""
    if info.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        seeds = [random.getrandbits(63) if seed is None else seed for seed in seeds]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
    return info
