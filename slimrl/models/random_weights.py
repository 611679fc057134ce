"""Random weights of a model, tensor by tensor from the family's own list of names and shapes."""

from collections.abc import Iterator

import torch
from torch import Tensor

from slimrl.data.seeds import derive_seed
from slimrl.models.weight_map import WeightMap

EXPERT_BIAS_STD = 0.01
"""Standard deviation of the bias that chooses experts; small, so that all of them are chosen."""


def random_tensors(
    weight_map: WeightMap, std: float, seed: int, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) in the order of the map's specs, each from a seed of its own; norms are 1.

    A tensor under a second name is equal to its original.
    """
    for tensor in weight_map.hf_tensors.values():
        if tensor.name.endswith("norm.weight"):
            value = torch.ones(tensor.shape, dtype=dtype)
        else:
            generator = torch.Generator().manual_seed(derive_seed(seed, tensor.name))
            spread = EXPERT_BIAS_STD if tensor.name.endswith("e_score_correction_bias") else std
            value = torch.empty(tensor.shape, dtype=dtype).normal_(0.0, spread, generator=generator)
        yield from ((name, value) for name in tensor.names)
